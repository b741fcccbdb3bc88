"""`remove_keys`: takes keys out of a hash table, by name or by a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._arguments import as_positive
from jax_tt._hash import backend
from jax_tt._hash.directory import directory_of, named_directory
from jax_tt._hash.insert import Evicted, keys_of_ids
from jax_tt._hash.reference import erase
from jax_tt._hash.table import CLOCK, HashTable, require_hash_table
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import State


class KeyView(NamedTuple):
    """What a condition for removal sees of every slot; those of empty slots are not looked at.

    Attributes:
        keys: uint32 ``[capacity, 2]``, high and low word.
        scores: uint32 ``[capacity, 2]``, high and low word.
        touched: int32 ``[capacity]``, the number of the last batch that requested the key.
        age: int32 ``[capacity]``, how many batches ago that was.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(8, 1024)
    >>> state, _ = jax_tt.insert_keys(table, table.init(jax.random.key(0)), np.array([3, 4]))
    >>> state, _ = jax_tt.insert_keys(table, state, np.array([4]))
    >>> state, gone = jax_tt.remove_keys(table, state, where=lambda view: view.age >= 1, size=2)
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
) -> tuple[dict[str, Any], Evicted]:
    """Takes keys out of a table; their rows are free for others.

    Args:
        table: the `HashTable`.
        state: its arrays by name.
        keys: the keys to remove, as `insert_keys` takes them; those without a row are skipped.
        where: instead of ``keys``, a function from a `KeyView` to bool ``[capacity]``, such as
            ``lambda view: view.age > 1000``.
        size: of the result; with ``where`` at most so many keys are removed, the first ones in the order of slots.
            Default: the number of ``keys``, or the capacity.
        method: as in `tt_embed_bag`.

    Returns:
        The state, and the `Evicted` keys with their rows in the order of slots, each array with ``size`` entries.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(8, 1024)
    >>> state, _ = jax_tt.insert_keys(table, table.init(jax.random.key(0)), np.array([3, 4]))
    >>> state, gone = jax_tt.remove_keys(table, state, np.array([4, 5]))
    >>> gone.keys[:, 1].tolist(), gone.arrays["embedding"].shape
    ([4, 0], (2, 8))
    """
    table = require_hash_table(table)
    table.check(state)
    if (keys is None) == (where is None):
        raise ValueError(
            f"{table.label}keys, where: got {'neither' if keys is None else 'both'}; expected one of them, keys to "
            "remove or a condition."
        )
    directory, capacity = directory_of(state), table.num_embeddings
    method = table.method(Lookup(method=method), state)
    if where is None:
        words, here = keys_of_ids(table, keys)
        slots = backend.find(directory, words, here, method)
        marks = jnp.zeros(capacity, bool).at[jnp.where(slots < 0, capacity, slots)]
        chosen = marks.set(True, mode="drop")
        size = here.size if size is None else size
    else:
        chosen = _chosen(table, where, _view(state))
        size = capacity if size is None else size
    size = size if size == 0 and where is None else as_positive("size", size)
    (slots,) = jnp.nonzero(chosen, size=size, fill_value=capacity)
    slots = slots.astype(jnp.int32)
    view = _view(state)
    arrays = {
        name: state[name].at[slots].get(mode="fill", fill_value=0)
        for name in table.table.row_arrays
    }
    of_keys = [a.at[slots].get(mode="fill", fill_value=0) for a in view[:3]]
    state = {**state, **named_directory(erase(directory, slots))}
    return state, Evicted(of_keys[0], of_keys[1], of_keys[2], arrays)


def _view(state: State) -> KeyView:
    directory = directory_of(state)
    keys, scores = (
        words.transpose(0, 2, 1).reshape(-1, 2) for words in (directory.keys, directory.scores)
    )
    touched = directory.touched.reshape(-1)
    return KeyView(keys, scores, touched, state[CLOCK] - touched)


def _chosen(table: HashTable, where: Any, view: KeyView) -> jax.Array:
    chosen = jnp.asarray(where(view))
    if chosen.shape != view.touched.shape or chosen.dtype != bool:
        raise ValueError(
            f"{table.label}where: returned {chosen.dtype} of shape {chosen.shape}; expected bool of shape "
            f"{view.touched.shape}, one per slot."
        )
    return chosen & (view.touched > 0)
