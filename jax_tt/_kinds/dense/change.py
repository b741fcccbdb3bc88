"""What becomes of a dense table that grows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_int, mismatch
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._table.change import Carry, Change, Growth, appended, extended, grow, with_params
from jax_tt._table.copies import without_values
from jax_tt._table.initial_rows import unboxed
from jax_tt._table.state import State


@grow.register(DenseTable)
def grown(table: DenseTable, state: State, growth: Growth) -> Change:
    """New rows follow the existing ones, which are unchanged; so is their optimizer state."""
    rows, before = as_int("num_embeddings", growth.num_embeddings), table.num_embeddings
    if rows < before:
        expected = f"at least {before}, the rows that the table has"
        raise mismatch(f"{table.ids.label}num_embeddings", rows, expected)
    after = dataclasses.replace(without_values(table), num_embeddings=rows)
    old = state["embedding"]
    _check_shards(table, old, rows)
    if growth.like is None:
        new = _initial(after, growth.key, (rows - before, table.features), old.dtype)
    else:
        new = old[jnp.broadcast_to(jnp.asarray(growth.like), rows - before)]
    carry: dict[str, Carry] = {"embedding": extended}
    params = {"embedding": appended(old, new)}
    return Change(after, {**state, **with_params(state, after, params, carry)}, carry)


def _initial(table: DenseTable, key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    if not shape[0]:
        return jnp.zeros(shape, dtype)
    rows = jnp.asarray(unboxed(table.embedding_init)(key, shape, dtype))
    if rows.shape != shape:
        fix = "Where the initialiser is for a whole table, give rows that new ones are like, like=."
        got = f"new rows of shape {rows.shape}"
        raise mismatch(f"{table.ids.label}embedding_init", got, shape, fix)
    return rows.astype(dtype)


def _check_shards(table: DenseTable, old: Any, rows: int) -> None:
    """Raises unless the new number of rows can be divided as the present rows are."""
    if not isinstance(old, jax.Array):
        return
    sharding = old.sharding
    try:
        sharding.shard_shape((rows, table.features))
    except ValueError as error:
        shards = old.shape[0] // sharding.shard_shape(old.shape)[0]
        raise ValueError(
            f"{table.ids.label}num_embeddings: got {rows}; expected a multiple of {shards}, the number of shards of "
            f"the rows, e.g. {-(-rows // shards) * shards}."
        ) from error
