"""`insert_keys`: gives the keys of a batch a row, before the batch is looked up."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt import _words
from jax_tt._arguments import as_array
from jax_tt._bags import Bags
from jax_tt._hash import backend
from jax_tt._hash.admission import AdmitAfter, AdmitWithProbability
from jax_tt._hash.directory import COUNTERS, Eviction, Insertion, KeyDirectory
from jax_tt._hash.initial import threefry
from jax_tt._hash.keys import keys_of, score_words
from jax_tt._hash.missing import check_count
from jax_tt._hash.reference import erase
from jax_tt._hash.table import (
    CLOCK,
    SEED,
    TOTALS,
    WAITING,
    HashTable,
    directory_of,
    named_directory,
    require_hash_table,
    waiting_of,
)
from jax_tt._lookup._batch import present
from jax_tt._lookup._inputs import bag_batch, lookup_batch
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import State

_LAST = 2**31 - 2


class Evicted(NamedTuple):
    """Keys that lost their row; entries with ``touched`` 0 are empty, and unspecified otherwise.

    Attributes:
        keys: uint32 ``[n, 2]``, high and low word.
        scores: uint32 ``[n, 2]``, high and low word.
        touched: int32 ``[n]``, the number of the last batch that requested the key.
        arrays: the row and its optimizer state by the name of the array in the state, ``[n, ...]`` in its type; empty
            if the rows of the table share parameters.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(8, 8, ways=8)
    >>> state, _ = jax_tt.insert_keys(table, table.init(jax.random.key(0)), np.arange(8))
    >>> state, inserted = jax_tt.insert_keys(table, state, np.array([99]), return_evicted=True)
    >>> inserted.evicted.keys.tolist(), inserted.evicted.arrays["embedding"].shape
    ([[0, 0]], (1, 8))
    """

    keys: Any
    scores: Any
    touched: Any
    arrays: dict[str, Any]


class Inserted(NamedTuple):
    """What an insertion did; ``n`` is the number of ids of the batch.

    Attributes:
        slots: int32 ``[n]``, the slots of new keys in ascending order, then the capacity.
        keys: uint32 ``[n, 2]``, the new keys: high and low word.
        counts: int32 scalars by name: ``"requests"`` and ``"hits"`` are ids, ``"unique"``, ``"unique_hits"``,
            ``"inserted"``, ``"evicted"`` and ``"refused"`` distinct keys. Refused ones found no room; the others that
            were neither there nor inserted were not admitted.
        evicted: `Evicted`, beside the new keys in the same slots; None unless asked for.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(8, 64)
    >>> state, inserted = jax_tt.insert_keys(table, table.init(jax.random.key(0)), np.array([7, 7, 3]))
    >>> sorted(inserted.keys[:2, 1].tolist())
    [3, 7]
    """

    slots: Any
    keys: Any
    counts: dict[str, Any]
    evicted: Evicted | None = None


def insert_keys(
    table: HashTable,
    state: State,
    ids: Any,
    *,
    scores: Any = None,
    epoch: Any = None,
    method: str = "auto",
    return_evicted: bool = False,
) -> tuple[dict[str, Any], Inserted]:
    """Finds or inserts the keys of a batch, which counts as one request for each of its ids.

    Call it before the lookup of the batch, outside of what is differentiated; under ``jit`` with a donated state it
    changes the state in place. The result does not depend on the order of the ids.

    Args:
        table: the `HashTable`.
        state: its arrays by name.
        ids: keys of any shape, or `Bags` of them, of which padding and unused positions do not count.
        scores: with the policy ``"custom"``, and only then, one integer from 0 to 2**64 - 1 per id; the largest one
            of a key is its score.
        epoch: with the policies ``"epoch_lru"`` and ``"epoch_lfu"``, and only then, the present epoch, an integer
            scalar from 0 to 2**31 - 1.
        method: as in `tt_embed_bag`.
        return_evicted: whether to return the rows that were evicted and their optimizer state, which costs reading
            them.

    Returns:
        The state, and `Inserted`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(8, 1024, optimizer=jax_tt.optimizers.Adagrad(0.1))
    >>> state = table.init(jax.random.key(0))
    >>> state, inserted = jax_tt.insert_keys(table, state, np.array([7, 7, -1]))
    >>> {name: int(count) for name, count in inserted.counts.items() if count}
    {'requests': 3, 'unique': 2, 'inserted': 2}
    """
    table = require_hash_table(table)
    table.check(state)
    keys, here, words = requests_of(table, ids, scores)
    return inserted_requests(table, state, (keys, here, words), epoch, method, return_evicted)


def requests_of(table: HashTable, ids: Any, scores: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys uint32 ``[n, 2]``, which positions count, bool ``[n]``, and scores uint32 ``[n, 2]``."""
    keys, here = keys_of_ids(table, ids)
    if (table.policy == "custom") != (scores is not None):
        what = "expected one integer per id" if scores is None else "expected None"
        raise ValueError(
            f"{table.label}scores: got {'None' if scores is None else 'an array'} for the policy {table.policy!r}; "
            f"{what}. Scores belong to policy='custom'."
        )
    if scores is None:
        return keys, here, jnp.zeros_like(keys)
    words = jnp.asarray(score_words(f"{table.label}scores", scores, _shape(ids))).reshape(-1, 2)
    return keys, here, jax.lax.bitcast_convert_type(words, jnp.uint32)


def keys_of_ids(table: HashTable, ids: Any) -> tuple[jax.Array, jax.Array]:
    """Keys uint32 ``[n, 2]``, and which positions count, bool ``[n]``."""
    is_bags = isinstance(ids, Bags)
    batch = bag_batch(table, ids, jnp.float32)[0] if is_bags else lookup_batch(table, ids)[0]
    return keys_of(batch), present(batch).reshape(-1)


def inserted_requests(
    table: HashTable,
    state: State,
    requests: tuple[jax.Array, jax.Array, jax.Array],
    epoch: Any,
    method: str,
    return_evicted: bool,
) -> tuple[dict[str, Any], Inserted]:
    """`insert_keys` of the result of `requests_of`."""
    keys, here, given = jax.lax.stop_gradient(requests)
    method = table.method(Lookup(method=method), state)
    now = jnp.minimum(state[CLOCK], _LAST) + 1
    epochs = _epoch(table, epoch)
    directory = directory_of(state)
    state = {**state, CLOCK: now}
    admitted, waiting, missed = here, {}, None
    if table.admission is not None:
        found = backend.find(directory, keys, here, method) >= 0
        if isinstance(table.admission, AdmitAfter):
            admitted, waiting, missed = _admitted_after(
                table, state, keys, here & ~found, now, method
            )
        else:
            admitted, missed = _drawn(table, state, keys, here & ~found, now)
        admitted = found | admitted
    directory, done = backend.insert(
        directory, keys, admitted, given, now, epochs, table.eviction, method
    )
    counts = _counts(done, missed)
    total = jnp.stack(list(counts.values())).astype(jnp.uint32)
    state = {
        **state,
        **named_directory(directory),
        **waiting,
        TOTALS: _words.added(state[TOTALS], total),
    }
    state, old = _reset(table, state, done, method, return_evicted)
    check_count(
        table.safe_check,
        f"{table.label}ids: {{count}} new keys of a batch found no room in their sets of the table, which has "
        f"{table.num_embeddings} rows. They read their initial values and train nothing. Raise the capacity, let the "
        "table grow (jax_tt.grow_if_full), or choose a policy that evicts. safe_check='ignore' says nothing.",
        counts["refused"],
    )
    evicted = None
    if return_evicted:
        evicted = Evicted(done.old_keys, done.old_scores, done.old_touched, old)
    return state, Inserted(done.slots, done.keys, counts, evicted)


def _shape(ids: Any) -> tuple[int, ...]:
    ids = ids.ids if isinstance(ids, Bags) else ids
    return tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)


def _reset(
    table: HashTable, state: dict[str, Any], done: Insertion, method: str, return_old: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state with initial rows and optimizer state in the slots of new keys, and the old ones by name."""
    arrays = table.table.row_arrays
    if not arrays:
        return state, {}
    new = []
    for name, value in arrays.items():
        if value is None:
            wanted = done.slots < table.num_embeddings
            new.append(table.initial(state, done.keys, wanted, state[name].dtype, method))
        else:
            new.append(jnp.asarray(value, state[name].dtype))
    changed, old = backend.exchange(
        [state[name] for name in arrays], new, done.slots, method, return_old=return_old
    )
    state = {**state, **dict(zip(arrays, changed, strict=True))}
    return state, dict(zip(arrays, old, strict=True)) if return_old else {}


def _admitted_after(
    table: HashTable,
    state: State,
    keys: jax.Array,
    missed: jax.Array,
    now: jax.Array,
    method: str,
) -> tuple[jax.Array, dict[str, Any], tuple[jax.Array, jax.Array]]:
    """Positions whose keys have been requested often enough; the keys that wait; and the counts of those that missed.

    The scores of keys that wait are the last batch and, in the low word, the requests.
    """
    assert isinstance(table.admission, AdmitAfter)
    waiting, done = backend.insert(
        waiting_of(state),
        keys,
        missed,
        jnp.zeros_like(keys),
        now,
        now.astype(jnp.uint32),
        Eviction("epoch_lfu"),
        method,
    )
    slots = done.found
    requests = _low_words(waiting)[jnp.maximum(slots, 0)]
    admitted = (slots >= 0) & (requests >= np.uint32(min(table.admission.requests, 2**32 - 1)))
    waiting = erase(waiting, jnp.where(admitted, slots, -1))
    counts = dict(zip(COUNTERS, done.counts, strict=True))
    return admitted, named_directory(waiting, WAITING), (counts["requests"], counts["unique"])


def _low_words(directory: KeyDirectory) -> jax.Array:
    return directory.scores[:, 1].reshape(-1)


def _drawn(
    table: HashTable, state: State, keys: jax.Array, missed: jax.Array, now: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Positions whose keys are drawn, and the counts of those that missed."""
    assert isinstance(table.admission, AdmitWithProbability)
    seed = state[SEED]
    # Another key of the generator than that of initial rows, which is the seed itself.
    first, second = threefry(seed[0], seed[1], now.astype(jnp.uint32), jnp.uint32(1))
    bits, _ = threefry(first, second, keys[:, 0], keys[:, 1])
    most = np.uint32(max(int(table.admission.probability * 2**32) - 1, 0))
    by = (~missed, keys[:, 0], keys[:, 1])
    absent, high, low = jax.lax.sort(by, num_keys=3)
    new = jnp.ones(missed.shape, bool)
    new = new.at[1:].set((high[1:] != high[:-1]) | (low[1:] != low[:-1]))
    unique = jnp.sum(new & ~absent, dtype=jnp.int32)
    return missed & (bits <= most), (jnp.sum(missed, dtype=jnp.int32), unique)


def _counts(done: Insertion, missed: tuple[jax.Array, jax.Array] | None) -> dict[str, jax.Array]:
    """The counts by name; ``missed`` are the requests and distinct keys that were not in the table."""
    counts: dict[str, jax.Array] = dict(zip(COUNTERS, done.counts, strict=True))
    if missed is not None:
        requests, unique = missed
        counts |= {
            "requests": counts["hits"] + requests,
            "unique": counts["unique_hits"] + unique,
        }
    return counts


def _epoch(table: HashTable, epoch: Any) -> jax.Array:
    if table.policy.startswith("epoch_") != (epoch is not None):
        expected = "an integer scalar" if epoch is None else "None"
        raise ValueError(
            f"{table.label}epoch: got {epoch!r} for the policy {table.policy!r}; expected {expected}. Epochs belong to "
            "the policies 'epoch_lru' and 'epoch_lfu'."
        )
    if epoch is None:
        return jnp.zeros((), jnp.uint32)
    array = as_array(f"{table.label}epoch", epoch)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{table.label}epoch: got {array.dtype} of shape {array.shape}; expected an integer scalar."
        )
    if isinstance(array, np.ndarray) and not 0 <= int(array) < 2**31:
        raise ValueError(f"{table.label}epoch: got {int(array)}; expected 0 to 2**31 - 1.")
    return jnp.maximum(jnp.asarray(array), 0).astype(jnp.uint32)
