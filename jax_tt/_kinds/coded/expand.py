"""Batches of codebook rows: a segment for each part of the columns, in which an id has a position for each code."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch, present
from jax_tt._kinds.coded.codes import entries_at
from jax_tt._kinds.coded.layout import CodeLayout
from jax_tt._native.operands import MAX_POSITIONS
from jax_tt._table.options import IGNORED, Lookup
from jax_tt._table.state import State


def expanded(
    layout: CodeLayout, state: State, batch: Batch, lookup: Lookup, ids: jax.Array, ok: jax.Array
) -> Batch:
    """The batch of codebook rows of a batch, whose ``ids`` have been clamped and were in range where ``ok``."""
    _check_size(layout, batch)
    here = present(batch)
    if lookup.bounds in IGNORED:
        here &= ok
    entries = entries_at(layout, state, ids)
    if lookup.bounds == "error":
        entries = jnp.where(ok[..., None], entries, jnp.int32(layout.num_entries))
    entries = jnp.where(here[..., None], entries, jnp.int32(-1))
    parts, (segments, capacity) = layout.column_parts, here.shape
    terms = layout.part_terms
    entries = jnp.moveaxis(entries.reshape(segments, capacity, parts, terms), 2, 1)
    entries = entries.reshape(segments * parts, capacity * terms)
    offsets = jnp.repeat(batch.offsets * terms, parts, axis=0)
    weights = batch.weights
    if weights is not None:
        weights = jnp.repeat(jnp.repeat(weights, parts, axis=0), terms, axis=1)
    return Batch(entries, offsets, weights, padded=True, rectangular=batch.rectangular)


def whole(layout: CodeLayout, sums: jax.Array) -> jax.Array:
    """Sums ``[S, nb, D]`` of ids from the sums of the expanded batch."""
    segments, bags = sums.shape[0] // layout.column_parts, sums.shape[1]
    parts = sums.reshape(segments, layout.column_parts, bags, layout.width)
    return jnp.moveaxis(parts, 1, 2).reshape(segments, bags, layout.features)


def by_part(layout: CodeLayout, sums: jax.Array) -> jax.Array:
    """The inverse of `whole`."""
    segments, bags = sums.shape[:2]
    parts = sums.reshape(segments, bags, layout.column_parts, layout.width)
    return jnp.moveaxis(parts, 2, 1).reshape(segments * layout.column_parts, bags, layout.width)


def of_positions(layout: CodeLayout, batch: Batch, dweights: jax.Array | None) -> jax.Array | None:
    """The gradient of the weights, from the gradient of the weights of the expanded batch."""
    if dweights is None:
        return None
    segments, capacity = batch.ids.shape[:2]
    by_code = dweights.reshape(segments, layout.column_parts, capacity, layout.part_terms)
    return jnp.sum(by_code, axis=(1, 3))


def _check_size(layout: CodeLayout, batch: Batch) -> None:
    """Raises for more codes than one call takes, in terms of the batch and not of that of codebook rows."""
    groups, capacity = batch.ids.shape[:2]
    ids, bags = groups * capacity, groups * (batch.offsets.shape[1] - 1)
    sizes = ids * layout.all_codes, bags * layout.column_parts
    if max((n for n in sizes if isinstance(n, int)), default=0) > MAX_POSITIONS:
        raise ValueError(
            f"{layout.label}bags: got {ids} ids in {bags} bags, with {layout.all_codes} codes of each id and "
            f"{layout.column_parts} parts of each bag; one call takes at most {MAX_POSITIONS} of either. Split the "
            "batch."
        )
