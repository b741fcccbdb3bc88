"""The canonical input of every op: segments of positions, pooled into bags."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._jax.row_sums import sum_over_positions, sums_by_row

HIGHEST_BIT = 2**31  # of a uint32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """``S`` independent segments of ``cap`` positions, each pooled into ``nb`` bags.

    Ragged bags are a single segment; a rectangular input has one segment with one bag per row; a plain lookup has one
    segment with one position and one bag per id.

    Attributes:
        ids: int32/uint32/int64 ``[S, cap]``, or int32 digits ``[S, cap, d]``.
        offsets: int32 ``[S, nb + 1]``; bag b of a segment holds positions ``offsets[b]:offsets[b + 1]``.
        weights: ``[S, cap]`` in float32 (float64 beside float64 tables), or None.
        slots: int32 ``[S, cap]``, the cache slot of every id, -1 for a miss; None before `Table.prepare`.
        padded: static; whether -1 (all bits set, all digits -1) marks padding.
        rectangular: static; whether every segment is a single bag of all its positions.
        cut: static; the first ids that became the largest and the smallest int32 on the host, for reports. None if no
            id did.
        current: static; whether `LocatedKeys.current` is true of the ids.
    """

    ids: Any
    offsets: Any
    weights: Any
    slots: Any = None
    padded: bool = dataclasses.field(metadata={"static": True}, default=False)
    rectangular: bool = dataclasses.field(metadata={"static": True}, default=False)
    cut: tuple[int | None, int | None] | None = dataclasses.field(
        metadata={"static": True}, default=None
    )
    current: bool = dataclasses.field(metadata={"static": True}, default=False)

    @property
    def num_segments(self) -> int:
        return self.ids.shape[0]

    @property
    def capacity(self) -> int:
        return self.ids.shape[1]

    @property
    def num_bags(self) -> int:
        """Bags per segment."""
        return self.offsets.shape[1] - 1

    @property
    def split(self) -> bool:
        """Whether ``ids`` holds digits."""
        return self.ids.ndim == 3


def single_rows(rows: jax.Array) -> Batch:
    """A batch of one bag for each of ``rows[n]``; negative ones are padding."""
    offsets = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (rows.shape[0], 2))
    return Batch(jnp.maximum(rows, -1)[:, None], offsets, None, padded=True, rectangular=True)


def bag_index(batch: Batch) -> jax.Array:
    """Bag of each position, int32 ``[S, cap]``; ``nb`` for positions past the last offset."""
    if batch.rectangular:
        return jnp.zeros((batch.num_segments, batch.capacity), jnp.int32)
    segments = jnp.arange(batch.num_segments, dtype=jnp.int32)[:, None]
    ends = jnp.zeros((batch.num_segments, batch.capacity + 1), jnp.int32)
    ends = ends.at[segments, batch.offsets[:, 1:]].add(1, mode="drop")
    return jnp.cumsum(ends, axis=1, dtype=jnp.int32)[:, : batch.capacity]


def is_padding(batch: Batch) -> jax.Array:
    """Positions that hold the padding mark, bool ``[S, cap]``."""
    if batch.split:
        return jnp.all(batch.ids == -1, axis=-1)
    return batch.ids == padding_mark(batch.ids.dtype)


def with_marks(batch: Batch) -> Batch:
    """A batch without padding as one in which the mark means padding.

    An id that equals the mark, which is out of range, is replaced by one with only the highest bit set, which error
    messages of the native ops account for. If the ids are unsigned, the table must have at most `HIGHEST_BIT` rows.
    """
    stray = is_padding(batch)
    other = HIGHEST_BIT if unsigned(batch.ids) else jnp.iinfo(batch.ids.dtype).min
    other = jnp.asarray(other, batch.ids.dtype)
    ids = jnp.where(stray[..., None] if batch.split else stray, other, batch.ids)
    return dataclasses.replace(batch, ids=ids, padded=True)


def unsigned(ids: jax.Array) -> bool:
    return ids.dtype.kind == "u"


def present(batch: Batch) -> jax.Array:
    """Positions that count: inside a bag and not padding; bool ``[S, cap]``."""
    if batch.rectangular:
        inside = jnp.ones(batch.ids.shape[:2], bool)
    else:
        position = jnp.arange(batch.capacity, dtype=jnp.int32)[None, :]
        inside = (position >= batch.offsets[:, :1]) & (position < batch.offsets[:, -1:])
    return inside & ~is_padding(batch) if batch.padded else inside


def pool(batch: Batch, values: jax.Array) -> jax.Array:
    """Sums ``values[S, cap, ...]`` over the positions of each bag, giving ``[S, nb, ...]``."""
    if batch.rectangular:
        return sum_over_positions(values)
    if batch.num_bags == 0:  # XLA rejects a scatter into an empty array
        return values[:, :0]
    total = batch.num_segments * batch.num_bags
    first = jnp.arange(batch.num_segments, dtype=jnp.int32)[:, None] * batch.num_bags
    bag = bag_index(batch)
    # Positions outside every bag have index nb.
    bags = jnp.where(bag < batch.num_bags, first + bag, total)
    flat = values.reshape(-1, *values.shape[2:])
    sums = sums_by_row(total, bags.reshape(-1), flat, adjacent=True)
    return sums.reshape(batch.num_segments, batch.num_bags, *values.shape[2:])


def largest(batch: Batch, values: jax.Array) -> jax.Array:
    """Maximum of integers ``values[S, cap, ...]`` over the positions of each bag, giving ``[S, nb, ...]``."""
    if batch.rectangular:
        return jnp.max(values, axis=1, keepdims=True)
    segments = jnp.arange(batch.num_segments, dtype=jnp.int32)[:, None]
    shape = (batch.num_segments, batch.num_bags, *values.shape[2:])
    bags = jnp.full(shape, jnp.iinfo(values.dtype).min, values.dtype)
    return bags.at[segments, bag_index(batch)].max(values, mode="drop")


def spread_to_positions(batch: Batch, values: jax.Array) -> jax.Array:
    """``values[S, nb, D]`` of the bag of every position, broadcastable to ``[S, cap, D]``.

    Positions outside every bag get the values of an arbitrary bag.
    """
    if batch.rectangular:
        return values
    bag = jnp.clip(bag_index(batch), 0, batch.num_bags - 1)
    return jnp.take_along_axis(values, bag[..., None], axis=1)


def padding_mark(dtype: Any) -> Any:
    """The id that marks padding: all bits set."""
    return jnp.asarray(jnp.iinfo(dtype).max if jnp.iinfo(dtype).min == 0 else -1, dtype)
