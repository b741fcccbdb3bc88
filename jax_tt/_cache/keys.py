"""Ids of a batch as the cache knows them, and the batch divided into hits and misses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._ops._batch import Batch, is_padding, present
from jax_tt._ops._ids import digits_in_range
from jax_tt._ops._spec import DenseSpec, TTSpec


def keys_of(spec: TTSpec, batch: Batch, dtype: Any) -> jax.Array:
    """Row of every position ``[S, cap]``; -1 where there is none: padding, outside every bag, or out of range."""
    here = present(batch)
    if batch.split:
        digits, ok = digits_in_range(spec, batch)
        row = jnp.zeros(batch.ids.shape[:2], dtype)
        for digit, factor in zip(digits, spec.row_factors, strict=True):
            row = row * factor + digit.astype(dtype)
    else:
        last = min(spec.num_embeddings - 1, int(jnp.iinfo(batch.ids.dtype).max))
        clamped = jnp.clip(batch.ids, 0, last)
        ok = clamped == batch.ids
        row = clamped.astype(dtype)
    if spec.bounds != "clip":
        here = here & ok
    return jnp.where(here, row, -1)


def divide(
    spec: TTSpec, batch: Batch, slots: jax.Array, capacity: int
) -> tuple[tuple[DenseSpec, Batch], tuple[TTSpec, Batch]]:
    """The hits as a batch of slots of the cached rows, and the rest as a batch of the table.

    Either keeps the shape of the whole; what belongs to the other is padding.
    """
    hit = slots >= 0
    hits = dataclasses.replace(batch, ids=slots, padded=True)
    rows = DenseSpec(capacity, spec.features, "unchecked", True, spec.name)
    ids = batch.ids
    if not batch.padded and spec.num_embeddings >= int(jnp.iinfo(ids.dtype).max) and _unsigned(ids):
        ids = ids.astype(jnp.int64)  # all bits set is a row of this table, and no mark
        batch = dataclasses.replace(batch, ids=ids)
    mark = jnp.asarray(jnp.iinfo(ids.dtype).max if _unsigned(ids) else -1, ids.dtype)
    if not batch.padded:
        # The mark of padding was an id out of range like any other; another one takes its place,
        # which messages of the native op know.
        stray = is_padding(batch)
        info = jnp.iinfo(ids.dtype)
        other = jnp.asarray(info.max - 1 if _unsigned(ids) else info.min, ids.dtype)
        ids = jnp.where(stray[..., None] if batch.split else stray, other, ids)
    ids = jnp.where(hit[..., None] if batch.split else hit, mark, ids)
    misses = dataclasses.replace(batch, ids=ids, padded=True)
    return (rows, hits), (dataclasses.replace(spec, padded=True), misses)


def _unsigned(ids: jax.Array) -> bool:
    return ids.dtype.kind == "u"
