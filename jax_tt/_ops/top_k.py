"""`top_k`: the best rows of a table of any kind for queries."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import (
    as_array,
    as_number,
    as_positive,
    expect,
    expect_ids,
    integers,
    mismatch,
)
from jax_tt._base.dtypes import accumulator
from jax_tt._base.environment import resolve_method
from jax_tt._ids.explicit import over_explicit_axes, spec_of
from jax_tt._ids.keys import key_digits
from jax_tt._ids.split_ids import SplitIds
from jax_tt._lookup.best_rows import Queries, best_rows
from jax_tt._table.check import check_state, check_table
from jax_tt._table.copies import with_update, without_values
from jax_tt._table.state import State, sentinel_holds
from jax_tt._table.table import Table

# Scores of 256 queries and this number of rows fit the caches of a processor.
_BLOCK = 8192


def top_k(
    table: Table,
    state: State,
    queries: Any,
    k: int,
    *,
    exclude: Any = None,
    block: int | None = None,
    recall_target: float | None = None,
    method: str = "auto",
) -> tuple[jax.Array, Any]:
    """The ``k`` rows of a table with the largest inner products with each query.

    The scores of all rows never exist, nor does the dense table of a compressed one: the temporary arrays are ``block``
    rows and their scores. The reference of a tensor train also has the slices of its cores for a block. A native scan
    on the CPU has no block; each of its threads keeps up to ``2 k + 32`` rows, of 8 bytes, for up to 512 queries at a
    time: of these as many as fit 32 MiB, but at least 16. Nothing is differentiable; the arguments are constants of a
    loss.

    Args:
        table: of any kind.
        state: its arrays by name.
        queries: floats ``[..., D]``. A query that has a NaN has no best rows.
        k: the number of rows, an integer that the program is compiled for.
        exclude: ids ``[..., E]`` that a query leaves out, such as items that a user has seen, padded with -1; None for
            none. Keys for a hash table, as its lookups take them.
        block: rows that are scored together; by default 8,192.
        recall_target: None for the best rows. A number in (0, 1) lets `jax.lax.approx_max_k` find this share of them on
            average, which is faster on TPUs and GPUs.
        method: ``"native"``, ``"reference"`` or ``"auto"``, as in lookups.

    Returns:
        Scores ``[..., k]`` in descending order, float32, or float64 for a table of float64; and ids int32 ``[..., k]``,
        ascending among equal scores. Where there are fewer than ``k`` rows, scores are -inf and ids -1. Rows whose
        score is NaN or -inf are left out. For a hash table, the ids are keys, `SplitIds` with digits
        ``[..., k, 2]``, all -1 where there is none, of which `dynamic.join_keys` makes integers; of keys with equal
        scores that are more than ``k``, those with the first slots are returned.

    Raises:
        ValueError: a shape or a number does not fit, or ``exclude`` has ids out of range, which is noticed unless they
            are traced; traced ones have no effect.
        TypeError: an argument is of another type, or the table takes slots: its rows are not all on the device.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> state = table.init(jax.random.key(0))
    >>> row, _ = jax_tt.lookup(table, state, jnp.array([7]))
    >>> scores, ids = jax_tt.top_k(table, state, row, 3, exclude=jnp.array([[7, -1]]))
    >>> ids.shape, bool((ids == 7).any())
    ((1, 3), False)
    """
    check_table(table, state)
    check_state(table, state)
    table.ids.refuse_slots(
        "table", "Tiers.dump writes all rows, with their ids, for a table that holds them"
    )
    label = table.ids.label
    k = as_positive(f"{label}k", k)
    block = _BLOCK if block is None else as_positive(f"{label}block", block)
    block = min(block, table.num_embeddings)
    if recall_target is not None:
        recall_target = as_number(
            f"{label}recall_target",
            recall_target,
            "None or a number in (0, 1)",
            lambda x: 0 < x < 1,
        )
    if table.num_embeddings + block >= 2**31:
        got = f"{table.num_embeddings} rows"
        fix = "Score the candidates of another method instead, with jax_tt.lookup."
        raise mismatch(f"{label}table", got, "fewer than 2**31, as all of them are scored", fix)
    vectors = _vectors(label, queries, table.features)
    arrays = dict(state), vectors, _excluded(table, exclude, vectors.shape[:-1])
    static = k, block, recall_target, resolve_method(method)
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays))
    # Eager calls of equal tables share a program. What is not needed here may not be hashable.
    table = without_values(with_update(table, None))
    return over_explicit_axes(
        functools.partial(_found if traced else _compiled, table, *static),
        jax.lax.stop_gradient(arrays),
        lambda: P(*spec_of(vectors)[:-1]),
    )


def _found(
    table: Table,
    k: int,
    block: int,
    recall_target: float | None,
    method: str,
    arrays: tuple[State, jax.Array, jax.Array],
) -> tuple[jax.Array, Any]:
    state, vectors, exclude = arrays
    lead = vectors.shape[:-1]
    count = math.prod(lead)
    flat = vectors.reshape(count, table.features).astype(accumulator(table.spec.storage(state)))
    if "sentinel" in state:
        flat = jnp.where(sentinel_holds(state["sentinel"]), flat, jnp.nan)
    exclude = exclude.reshape(count, *exclude.shape[len(lead) :])
    found = best_rows(table, state, Queries(flat, exclude, None, k, block, recall_target, method))
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), found)


_compiled = jax.jit(_found, static_argnums=(0, 1, 2, 3, 4))


def _vectors(label: str, queries: Any, features: int) -> jax.Array:
    vectors = as_array(f"{label}queries", queries)
    if vectors.ndim == 0 or vectors.shape[-1] != features:
        raise mismatch(f"{label}queries", vectors, f"[..., {features}], the table's features last")
    expect(jnp.issubdtype(vectors.dtype, jnp.floating), f"{label}queries", vectors, "floats")
    return jnp.asarray(vectors)


def _excluded(table: Table, exclude: Any, shape: tuple[Any, ...]) -> jax.Array:
    """Ids int32 ``[*shape, E]``, or digits of keys ``[*shape, E, 3]``."""
    name = f"{table.ids.label}exclude"
    if table.ids.takes_keys:
        if exclude is None:
            return jnp.full((*shape, 0, 3), -1, jnp.int32)
        ids = key_digits(name, exclude, padded=True)
        _check_shape(name, ids.shape, shape)
        return jnp.asarray(ids.digits)[..., :3]
    if exclude is None:
        return jnp.full((*shape, 0), -1, jnp.int32)
    if isinstance(exclude, SplitIds):
        raise TypeError(f"{name}: got SplitIds; expected integers, whose tables have no keys.")
    ids = integers(name, as_array(name, exclude), exclude, np.int32)
    _check_shape(name, ids.shape, shape)
    rows = table.num_embeddings
    if not isinstance(ids, Tracer) and ids.size:
        flat = np.asarray(ids).reshape(-1)
        expect_ids(name, flat[flat != -1], rows, "and -1 for padding")
    xp = np if isinstance(ids, np.ndarray) else jnp
    return jnp.asarray(xp.where((ids >= 0) & (ids < rows), ids, -1).astype(np.int32))


def _check_shape(name: str, given: tuple[Any, ...], shape: tuple[Any, ...]) -> None:
    if tuple(given[:-1]) != tuple(shape) or not given:
        expected = f"[{', '.join(map(str, (*shape, 'E')))}], a list for each query, padded with -1"
        raise mismatch(name, f"shape {given}", expected)
