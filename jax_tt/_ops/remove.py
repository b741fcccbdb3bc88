"""`dynamic.remove`: takes keys out of a hash table, by name or by a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import as_condition, as_positive, mismatch
from jax_tt._directories.hash_directory import (
    CLOCK,
    KEYS,
    KeyDirectory,
    directory_of,
    named_directory,
)
from jax_tt._directories.hash_reference import erase
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._jax.vma import of_all, places_of_all
from jax_tt._kinds.hashed.table import HashTable, checked_hash_table, clock_of_whole
from jax_tt._native import hash_backend
from jax_tt._ops.inserting import Evicted, keys_of_ids, treatment_of_keys
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import scope_of
from jax_tt._table.wrapper import is_sharded

# Among the arrays of slots: which ones to empty.
_CHOSEN = "chosen"


class KeyView(NamedTuple):
    """What a condition for removal sees of every slot; its result for empty slots does not count.

    Attributes:
        keys: uint32 ``[capacity, 2]``, high and low word.
        scores: uint32 ``[capacity, 2]``, high and low word.
        touched: int32 ``[capacity]``, the number of the last batch that requested the key.
        age: int32 ``[capacity]``, how many batches ago that was.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(1024, 8)
    >>> _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.array([3, 4]))
    >>> _, state = jax_tt.dynamic.insert(table, state, np.array([4]))
    >>> gone, state = jax_tt.dynamic.remove(table, state, where=lambda view: view.age >= 1, size=2)
    >>> gone.keys[:, 1].tolist(), gone.touched.tolist()
    ([3, 0], [1, 0])
    """

    keys: Any
    scores: Any
    touched: Any
    age: Any


def remove_keys(
    table: HashTable,
    state: State,
    keys: Any = None,
    *,
    where: Callable[[KeyView], jax.Array] | None = None,
    size: int | None = None,
    method: str = "auto",
) -> tuple[Evicted, dict[str, Any]]:
    """Takes keys out of a table; their rows are free for others.

    Args:
        table: the `HashTable`, or a `ShardedTable` of one.
        state: its arrays by name.
        keys: the keys to remove, as `dynamic.insert` takes them; those without a row are skipped. `Bags` with
            malformed offsets are refused.
        where: instead of ``keys``, a function from a `KeyView` to bool ``[capacity]``, such as
            ``lambda view: view.age > 1000``.
        size: of the result; with ``where`` at most so many keys are removed, the first ones in the order of slots.
            Default: the number of ``keys``, or the capacity; of a `ShardedTable` it has to be given with ``where``.
        method: as in `tt.embed_bag`.

    Returns:
        The `Evicted` keys with their rows in the order of slots, each array with ``size`` entries, and the state.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(1024, 8)
    >>> _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.array([3, 4]))
    >>> gone, state = jax_tt.dynamic.remove(table, state, np.array([4, 5]))
    >>> gone.keys[:, 1].tolist(), gone.arrays["embedding"].shape
    ([4, 0], (2, 8))
    """
    anywhere: Any = table
    whole = checked_hash_table(table, state)
    if (keys is None) == (where is None):
        got = "neither" if keys is None else "both"
        expected = "one of them, keys to remove or a condition"
        raise mismatch(f"{whole.ids.label}keys, where", got, expected)
    names = (*KEYS, *whole.table.spec.row_arrays)
    given = {name: state[name] for name in names}
    words: Any = None
    if where is None:
        # Without any key if the bags are refused.
        *words, _ = keys_of_ids(whole, keys, treatment_of_keys(anywhere, "error", method))
        size = words[1].size if size is None else size
    else:
        if size is None and is_sharded(anywhere):
            expected = "the most keys to remove, whose rows every device gets, e.g. size=1024"
            raise mismatch(f"{whole.ids.label}size", "None for a sharded table", expected)
        size = whole.num_embeddings if size is None else size
        axes = anywhere.axes if is_sharded(anywhere) else None
        slots = {name: state[name] for name in (*KEYS, CLOCK)}
        given[_CHOSEN] = _chosen(whole, where, over_explicit_axes(_view, slots, P(axes)))
    size = size if size == 0 and where is None else as_positive("size", size)
    static = size, whole.execution(Lookup(method=method), state).method
    with jax.named_scope(scope_of([anywhere])):
        if is_sharded(anywhere):
            changed, gone = anywhere.at_owners(_remove, (*static, anywhere.axes), given, words)
        else:
            clock = clock_of_whole(whole, state)
            changed, gone = _remove(*static, (), given, words)
            changed = {**changed, CLOCK: clock}
    return gone, {**state, **changed}


def _remove(
    size: int, method: str, axes: tuple[str, ...], arrays: dict[str, Any], words: Any
) -> tuple[dict[str, Any], Evicted]:
    """Removes keys on one device; returns the arrays that change, and the keys with their rows.

    Either ``arrays`` hold the slots to empty, bool ``[capacity]``, or ``words`` are keys uint32 ``[n, 2]`` and which of
    them count. ``size`` are the entries of the result, ``axes`` the mesh axes that slots are sharded over.
    """
    directory = directory_of(arrays)
    capacity = directory.capacity
    if words is None:
        chosen = arrays[_CHOSEN]
    else:
        keys, here = words
        slots = hash_backend.find(directory, keys, here, method)
        marks = jnp.zeros(capacity, bool).at[jnp.where(slots < 0, capacity, slots)]
        chosen = marks.set(True, mode="drop")
    (slots,) = jnp.nonzero(chosen, size=min(size, capacity) if axes else size, fill_value=capacity)
    slots = slots.astype(jnp.int32)
    rows = {name: array for name, array in arrays.items() if name not in (*KEYS, _CHOSEN)}
    places = places_of_all(slots < capacity, axes) if axes else None
    if places is not None:
        slots = jnp.where(places < size, slots, capacity)

    def entries(array: jax.Array) -> jax.Array:
        taken = array.at[slots].get(mode="fill", fill_value=0)
        return taken if places is None else of_all(taken, places, size, axes)

    gone = jax.tree.map(entries, Evicted(*_of_slots(directory), rows))
    return named_directory(erase(directory, slots)), gone


def _of_slots(directory: KeyDirectory) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and scores uint32 ``[capacity, 2]`` and last batches ``[capacity]``."""
    keys, scores = (
        words.transpose(0, 2, 1).reshape(-1, 2) for words in (directory.keys, directory.scores)
    )
    return keys, scores, directory.touched.reshape(-1)


def _view(state: State) -> KeyView:
    keys, scores, touched = _of_slots(directory_of(state))
    return KeyView(keys, scores, touched, state[CLOCK] - touched)


def _chosen(table: HashTable, where: Any, view: KeyView) -> jax.Array:
    shape = view.touched.shape
    chosen = as_condition(f"{table.ids.label}where", where, view, shape, "per slot")
    return jnp.asarray(chosen) & (view.touched > 0)
