"""Batches in parts of equal size, one or more for every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._ids.bag_parts import join_flat
from jax_tt._ids.batch import Batch, is_padding, padding_mark, present, with_marks


def divide_batch(batch: Batch, parts: int) -> Batch:
    """The batch with a number of segments that is a multiple of ``parts``, and with positions."""
    fits = batch.num_segments % parts == 0 and batch.ids.size
    return batch if fits else in_parts(batch, parts)


def join_sums(sums: jax.Array, batch: Batch) -> jax.Array:
    """Joins the sums of the parts of a batch, ``[S, nb, D]``; the last part may have more bags."""
    shape = batch.num_segments, batch.num_bags, sums.shape[-1]
    if sums.shape == shape:
        return sums
    return sums.reshape(-1, shape[-1])[: shape[0] * shape[1]].reshape(shape)


def in_parts(batch: Batch, parts: int) -> Batch:
    """The batch with one segment for each part, which has an equal number of neighbouring bags.

    A part of ragged bags has as many positions as all of them. Every part has a position, used or not.
    """
    if batch.capacity == 0:
        batch = _with_a_position(batch)
    if _ragged(batch):
        return _parts_of_ragged(batch, parts)
    if not batch.rectangular:
        batch = _with_marks_outside(batch)
    segments, capacity = batch.ids.shape[:2]
    bags = _bags_of_part(batch, parts)

    def cut(array: jax.Array) -> jax.Array:
        spare = parts * bags - segments
        filled = jnp.pad(array, [(0, spare), *[(0, 0)] * (array.ndim - 1)]) if spare else array
        return filled.reshape(parts, bags * capacity, *array.shape[2:])

    there = np.clip(segments - bags * np.arange(parts)[:, None], 0, np.arange(bags + 1))
    offsets = jnp.asarray(there * capacity, jnp.int32)
    return dataclasses.replace(_mapped(cut, batch), offsets=offsets, rectangular=False)


def join_parts(batches: Sequence[Batch]) -> Batch:
    """Joins several batches with the same number of parts, part by part."""

    def join(trees: Any, offsets: Any) -> Any:
        return join_flat(trees, offsets)

    trees = [(batch.ids, batch.weights) for batch in batches]
    (ids, weights), offsets = jax.vmap(join)(trees, [batch.offsets for batch in batches])
    return Batch(ids, offsets, weights, padded=batches[0].padded)


def separate_parts(sums: jax.Array, batches: Sequence[Batch]) -> list[jax.Array]:
    """Separates the sums of batches that `join_parts` has joined."""
    parts = sums.shape[0]
    bags = [_bags_of_part(batch, parts) for batch in batches]
    ends = np.cumsum(bags)
    split = jnp.split(sums, ends[:-1].tolist(), axis=1)
    return [join_sums(part, batch) for part, batch in zip(split, batches, strict=True)]


def _mapped(function: Callable[[jax.Array], jax.Array], batch: Batch) -> Batch:
    """The batch with another array in place of each that has positions."""
    mapped = jax.tree.map(function, dataclasses.replace(batch, offsets=None))
    return dataclasses.replace(mapped, offsets=batch.offsets)


def _ragged(batch: Batch) -> bool:
    return batch.num_segments == 1 and not batch.rectangular


def _bags_of_part(batch: Batch, parts: int) -> int:
    bags = -(-batch.num_segments * batch.num_bags // parts)
    return bags if _ragged(batch) else max(1, bags)


def _with_a_position(batch: Batch) -> Batch:
    """A batch of no positions with one that no bag has."""

    def filled(array: jax.Array) -> jax.Array:
        return jnp.zeros((batch.num_segments, 1, *array.shape[2:]), array.dtype)

    batch = _mapped(filled, batch)
    if not batch.rectangular:
        return batch
    offsets = jnp.zeros((batch.num_segments, 2), jnp.int32)
    return dataclasses.replace(batch, offsets=offsets, rectangular=False)


def _parts_of_ragged(batch: Batch, parts: int) -> Batch:
    offsets = batch.offsets[0]
    bags = _bags_of_part(batch, parts)
    places = np.minimum(
        bags * np.arange(parts)[:, None] + np.arange(bags + 1)[None, :], batch.num_bags
    )
    ends = offsets[places]
    start = ends[:, :1]
    position = start + jnp.arange(batch.capacity, dtype=jnp.int32)[None, :]

    def cut(array: jax.Array) -> jax.Array:
        return array[0].at[position].get(mode="fill", fill_value=0)

    return dataclasses.replace(_mapped(cut, batch), offsets=ends - start)


def _with_marks_outside(batch: Batch) -> Batch:
    """Segments of one bag each, whose positions outside of it are marked as padding."""
    inside = present(dataclasses.replace(batch, padded=False))
    batch = batch if batch.padded else with_marks(batch)
    inside &= ~is_padding(batch)
    mark = padding_mark(batch.ids.dtype)
    ids = jnp.where(inside[..., None] if batch.split else inside, batch.ids, mark)
    return dataclasses.replace(batch, ids=ids, rectangular=True)
