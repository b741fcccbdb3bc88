"""Combiners of the rows of a bag."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch, largest, pool, present, spread_to_positions
from jax_tt._ids.explicit import like_segments, over_explicit_axes, reshape_rows
from jax_tt._ids.id_space import digits_in_range
from jax_tt._ids.inputs import one_bag_per_position
from jax_tt._table.options import IGNORED, Lookup
from jax_tt._table.table import Table


def batch_to_sum(table: Table, batch: Batch) -> Batch:
    """The batch whose sums `combine` reduces to maxima: one bag per position."""
    if batch.weights is not None:
        raise ValueError(
            f"{table.ids.label}bags.weights: got weights with combiner='max', which takes none. Pass bags "
            "without weights, or use the combiner 'sum', 'mean', 'mean_count' or 'sqrtn'."
        )
    return one_bag_per_position(batch)


def combine(lookup: Lookup, table: Table, batch: Batch, sums: jax.Array) -> jax.Array:
    """One vector per bag, ``[S, nb, D]``, from its sums (for ``"max"`` from those of `batch_to_sum`); 0 if empty."""
    combiner = lookup.combiner
    if combiner == "sum":
        return sums
    if combiner == "max":
        sums = reshape_rows(sums, (batch.num_segments, batch.capacity, sums.shape[-1]))
    # An empty `where` is constant-folded, and a fused table would then get zeros as its new value.
    if not sums.size or not batch.num_bags:
        return pool(batch, sums) if combiner == "max" else sums

    def combined(inputs: tuple[Batch, jax.Array]) -> jax.Array:
        batch, sums = inputs
        if combiner == "max":
            return _maximum(_reads_row(table, batch, lookup), batch, sums)
        return _divided(combiner, batch, sums)

    return over_explicit_axes(combined, (batch, sums), lambda: like_segments(batch))


def _divided(combiner: str, batch: Batch, sums: jax.Array) -> jax.Array:
    if batch.weights is not None and combiner != "mean_count":
        weights = jnp.where(present(batch), batch.weights, 0).astype(sums.dtype)
        size = pool(batch, weights if combiner == "mean" else weights * weights)
    elif batch.rectangular or batch.padded:
        size = pool(batch, present(batch).astype(sums.dtype))
    else:
        size = (batch.offsets[:, 1:] - batch.offsets[:, :-1]).astype(sums.dtype)
    empty = size == 0
    # The inner `where` keeps 1/0 and the infinite derivative of sqrt(0) out of the gradient.
    safe = jnp.where(empty, 1, size)
    divisor = jnp.sqrt(safe) if combiner == "sqrtn" else safe
    return jnp.where(empty[..., None], 0, sums / divisor[..., None])


def _reads_row(table: Table, batch: Batch, lookup: Lookup) -> jax.Array:
    """Positions that read a row: present, and not an id for which ``bounds`` reads zeros; bool ``[S, cap]``."""
    here = present(batch)
    if table.ids.takes_keys or lookup.bounds not in IGNORED:
        return here
    return here & digits_in_range(table.ids, batch)[1]


def _maximum(counted: jax.Array, batch: Batch, rows: jax.Array) -> jax.Array:
    """Maximum of ``rows[S, cap, D]`` over the positions of each bag that are ``counted[S, cap]``, column by column.

    The result is the sum of the rows with all but the maximum masked, so that the gradient of a column is a gather and
    goes to the first position of the maximum.
    """
    counted = counted[..., None]
    keys = _sortable(jax.lax.stop_gradient(rows))
    keys = jnp.where(counted, keys, jnp.iinfo(keys.dtype).min)
    highest = counted & (keys == spread_to_positions(batch, largest(batch, keys)))
    to_end = (batch.capacity - jnp.arange(batch.capacity, dtype=jnp.int32))[None, :, None]
    to_end = jnp.where(highest, to_end, 0)
    first = highest & (to_end == spread_to_positions(batch, largest(batch, to_end)))
    return pool(batch, jnp.where(first, rows, 0))


def _sortable(values: jax.Array) -> jax.Array:
    """Integers in the order of the floats, with NaN last and -0 equal to 0: the maximum is the same on all devices."""
    kind = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    most = jnp.iinfo(kind).max
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), kind)
    return jnp.where(jnp.isnan(values), most, jnp.where(bits < 0, bits ^ most, bits))
