"""Batches of codebook rows: a segment for each part of the columns, in which an id has a position for each code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch, present
from jax_tt._ids.id_space import digits_in_range
from jax_tt._native.operands import MAX_POSITIONS
from jax_tt._table.options import IGNORED, Lookup

if TYPE_CHECKING:
    from jax_tt._kinds.coded.table import CodedTable
    from jax_tt._table.types import State


def expanded(table: CodedTable, state: State, batch: Batch, lookup: Lookup) -> Batch:
    """The batch of codebook rows of a batch of ids."""
    _check_size(table, batch)
    (ids,), ok = digits_in_range(table.ids, batch)
    here = present(batch)
    if lookup.bounds in IGNORED:
        here &= ok
    entries = table.entries(state, ids)
    if lookup.bounds == "error":
        entries = jnp.where(ok[..., None], entries, jnp.int32(table.num_entries))
    entries = jnp.where(here[..., None], entries, jnp.int32(-1))
    parts, (segments, capacity) = table.column_parts, here.shape
    terms = table.part_terms
    entries = jnp.moveaxis(entries.reshape(segments, capacity, parts, terms), 2, 1)
    entries = entries.reshape(segments * parts, capacity * terms)
    offsets = jnp.repeat(batch.offsets * terms, parts, axis=0)
    weights = batch.weights
    if weights is not None:
        weights = jnp.repeat(jnp.repeat(weights, parts, axis=0), terms, axis=1)
    return Batch(entries, offsets, weights, padded=True, rectangular=batch.rectangular)


def whole(table: CodedTable, sums: jax.Array) -> jax.Array:
    """Sums ``[S, nb, D]`` of those of the expanded batch."""
    segments, bags = sums.shape[0] // table.column_parts, sums.shape[1]
    parts = sums.reshape(segments, table.column_parts, bags, table.width)
    return jnp.moveaxis(parts, 1, 2).reshape(segments, bags, table.features)


def by_part(table: CodedTable, sums: jax.Array) -> jax.Array:
    """The inverse of `whole`."""
    segments, bags = sums.shape[:2]
    parts = sums.reshape(segments, bags, table.column_parts, table.width)
    return jnp.moveaxis(parts, 2, 1).reshape(segments * table.column_parts, bags, table.width)


def of_positions(table: CodedTable, batch: Batch, dweights: jax.Array | None) -> jax.Array | None:
    """The gradient of the weights, from that of the weights of the expanded batch."""
    if dweights is None:
        return None
    segments, capacity = batch.ids.shape[:2]
    by_code = dweights.reshape(segments, table.column_parts, capacity, table.part_terms)
    return jnp.sum(by_code, axis=(1, 3))


def _check_size(table: CodedTable, batch: Batch) -> None:
    """Raises for more codes than one call takes, in terms of the batch and not of that of codebook rows."""
    groups, capacity = batch.ids.shape[:2]
    ids, bags = groups * capacity, groups * (batch.offsets.shape[1] - 1)
    sizes = ids * table.all_codes, bags * table.column_parts
    if max((n for n in sizes if isinstance(n, int)), default=0) > MAX_POSITIONS:
        raise ValueError(
            f"{table.ids.label}bags: got {ids} ids in {bags} bags, with {table.all_codes} codes of each id and "
            f"{table.column_parts} parts of each bag; one call takes at most {MAX_POSITIONS} of either. Split the "
            "batch."
        )
