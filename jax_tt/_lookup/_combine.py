"""Combiners: what becomes of the rows of a bag."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._lookup._batch import Batch, largest, of_positions, pool, present
from jax_tt._lookup._explicit import pooled_over_explicit_axes, reshape_rows
from jax_tt._lookup._ids import reads_row
from jax_tt._lookup._inputs import one_bag_per_position
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import Table


def batch_to_sum(table: Table, batch: Batch) -> Batch:
    """The batch whose sums `combine` takes for a maximum: one bag per position. For the others it is the batch."""
    if batch.weights is not None:
        raise ValueError(
            f"{table.label}bags.weights: got weights with combiner='max', which takes none. Pass bags "
            "without weights, or use the combiner 'sum', 'mean', 'mean_count' or 'sqrtn'."
        )
    return one_bag_per_position(batch)


def combine(lookup: Lookup, table: Table, batch: Batch, sums: jax.Array) -> jax.Array:
    """From the sums of `batch_to_sum` to one vector per bag, ``[S, nb, D]``; an empty bag gives 0."""
    combiner = lookup.combiner
    if combiner == "sum":
        return sums
    if combiner == "max":
        sums = reshape_rows(sums, (batch.num_segments, batch.capacity, sums.shape[-1]))
    # Of nothing `where` makes a constant, and a fused table behind it would get zeros for its new value.
    if not sums.size or not batch.num_bags:
        return pool(batch, sums) if combiner == "max" else sums

    def combined(inputs: tuple[Batch, jax.Array]) -> jax.Array:
        batch, sums = inputs
        if combiner == "max":
            return _maximum(reads_row(table, batch, lookup), batch, sums)
        return _divided(combiner, batch, sums)

    return pooled_over_explicit_axes(combined, (batch, sums), batch)


def _divided(combiner: str, batch: Batch, sums: jax.Array) -> jax.Array:
    here = present(batch)
    if batch.weights is None or combiner == "mean_count":
        size = pool(batch, here.astype(sums.dtype))
    else:
        weights = jnp.where(here, batch.weights, 0).astype(sums.dtype)
        size = pool(batch, weights if combiner == "mean" else weights * weights)
    empty = size == 0
    # The inner `where` keeps 1/0 and the infinite slope of sqrt(0) out of the gradient.
    safe = jnp.where(empty, 1, size)
    divisor = jnp.sqrt(safe) if combiner == "sqrtn" else safe
    return jnp.where(empty[..., None], 0, sums / divisor[..., None])


def _maximum(counted: jax.Array, batch: Batch, rows: jax.Array) -> jax.Array:
    """Maximum of ``rows[S, cap, D]`` over the positions of each bag that are ``counted[S, cap]``, column by column.

    The result is the sum of the rows with all but the maximum masked, so that the gradient of a column goes to the
    first position that holds its maximum, by a gather.
    """
    counted = counted[..., None]
    keys = _sortable(jax.lax.stop_gradient(rows))
    keys = jnp.where(counted, keys, jnp.iinfo(keys.dtype).min)
    highest = counted & (keys == of_positions(batch, largest(batch, keys)))
    to_end = (batch.capacity - jnp.arange(batch.capacity, dtype=jnp.int32))[None, :, None]
    to_end = jnp.where(highest, to_end, 0)
    first = highest & (to_end == of_positions(batch, largest(batch, to_end)))
    return pool(batch, jnp.where(first, rows, 0))


def _sortable(values: jax.Array) -> jax.Array:
    """Integers in the order of floats, NaN above all and -0 equal to 0: their maximum is the same on every device."""
    kind = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    most = jnp.iinfo(kind).max
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), kind)
    return jnp.where(jnp.isnan(values), most, jnp.where(bits < 0, bits ^ most, bits))
