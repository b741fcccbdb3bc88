"""The step of a dense table by a rule in plain JAX, which is given the distinct rows of the batch.

No array here has the size of the table: new rows are written into the table in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch, present, spread_to_positions
from jax_tt._ids.id_space import digits_in_range
from jax_tt._jax.rounding import exactly, fold_key, round_to
from jax_tt._jax.row_sums import sums_by_row
from jax_tt._jax.vma import all_shards, own_shard
from jax_tt._table import reference
from jax_tt._table.options import IGNORED, Lookup
from jax_tt._table.state import Params, SlotArrays, State
from jax_tt._table.table import Table
from jax_tt.optimizers.row_gradients import RowGradients


class Distinct(NamedTuple):
    """The distinct rows of the ``n`` positions of a batch.

    Attributes:
        rows: numbers of rows ``[n]``, ascending; beyond the last row, the highest number of the type.
        sums: the sums of their gradients ``[n, D]`` in the accumulator type, 0 beyond the last row.
        places: where the row of every position is, ``[n]``.
    """

    rows: jax.Array
    sums: jax.Array
    places: jax.Array


class RowFormat(NamedTuple):
    """How rows of numbers are stored.

    Attributes:
        decoded: stored rows ``[n, ...]`` as numbers ``[n, D]``.
        encoded: new rows ``[n, D]`` in the form that they are stored in, ``(new, rows, dtype, key)``: their numbers in
            the table, the type of the parameter, and the key of stochastic rounding or None.
        spacing: the largest distance of two levels of stored rows, ``[n]``; None if numbers are not rounded to levels.
            Rules may make up for the errors of stochastic rounding to levels.
    """

    decoded: Callable[[jax.Array], jax.Array]
    encoded: Callable[[jax.Array, jax.Array, Any, jax.Array | None], jax.Array]
    spacing: Callable[[jax.Array], jax.Array] | None = None


def update(
    table: Table,
    state: State,
    batch: Batch,
    residuals: Any,
    g: jax.Array,
    lookup: Lookup,
    values: dict[str, Any],
    rows_as: RowFormat | None = None,
) -> tuple[Params, SlotArrays, jax.Array, jax.Array | None]:
    """`Table.stepped_params` of a table of which row k is that of id k alone.

    ``rows_as`` is None if rows are numbers in the type of the parameter.
    """
    assert table.update is not None
    (param,), (slots,) = table.spec.params(state), table.spec.stepped_slots(state)
    rule, axes = table.update.optimizer, lookup.axis_name
    rows_as = NUMBERS if rows_as is None else rows_as
    rows, gradients = _positions(table, batch, g.astype(accumulator(param.dtype)), lookup)
    here = rows != no_row(rows)
    weighted = gradients if batch.weights is None else gradients * batch.weights[..., None]
    weighted = jnp.where(here[..., None], weighted, 0).reshape(-1, table.features)
    distinct = _distinct(rows.reshape(-1), weighted, axes)
    sums = distinct.sums * values["inv_scale"].astype(distinct.sums.dtype)
    applied = ~reference.poisoned(table, batch, lookup, axes)
    if table.update.skip_nonfinite:
        applied &= jnp.all(jnp.isfinite(sums))
    changes = applied & (values["allowed"] != 0) & ~never(residuals, axes)
    changed = jnp.where(changes, distinct.rows, no_row(rows))
    old = rows_as.decoded(_read(param, distinct.rows)).astype(sums.dtype)
    if isinstance(rule, RowGradients):
        new_param, new_slots = param, rule.left(changed, sums)
    else:
        of_rows = tuple(_read(slot, distinct.rows).astype(sums.dtype) for slot in slots)
        new, stepped = rule.update_rows(old, sums, of_rows, values["hyper"])
        stochastic = table.update.rounds_stochastically(table.spec.rounded_type or param.dtype)
        seed = values["seed"] if stochastic else None
        key = None if seed is None else jax.random.wrap_key_data(seed, impl="threefry2x32")
        stored = rows_as.encoded(new, distinct.rows, param.dtype, key)
        new_param = _written(param, changed, stored)
        if key is not None and rows_as.spacing is not None:
            errors, spacing = new - rows_as.decoded(stored), rows_as.spacing(stored)
            stepped = rule.compensated(stepped, errors, spacing, values["hyper"])
        # Rows are below this number, which keeps the keys of slots apart from the keys of the parameter.
        new_slots = tuple(
            _written(
                slot,
                changed,
                _rounded(now, distinct.rows, slot.dtype, fold_key(key, 2**32 - 1 - j)),
            )
            for j, (slot, now) in enumerate(zip(slots, stepped, strict=True))
        )
    dweights = None
    if lookup.wanted.weights:
        places = distinct.places if axes is None else own_shard(distinct.places, rows.size, axes)
        products = jnp.sum(old[places].reshape(gradients.shape) * gradients, axis=-1)
        dweights = jnp.where(here, products, 0)
    return (new_param,), (new_slots,), applied.astype(jnp.float32), dweights


def _positions(
    table: Table, batch: Batch, g: jax.Array, lookup: Lookup
) -> tuple[jax.Array, jax.Array]:
    """The row of every position ``[S, cap]``, marked if it trains none, and the gradient of its bag ``[S, cap, D]``."""
    (rows,), ok = digits_in_range(table.ids, batch)
    here = present(batch) & (ok | (lookup.bounds not in (*IGNORED, "error")))
    if rows.dtype.itemsize < 4:
        rows = rows.astype(jnp.int32)
    shape = (*rows.shape, table.features)
    of_bag = spread_to_positions(batch, g) if batch.num_bags else jnp.zeros(shape, g.dtype)
    return jnp.where(here, rows, no_row(rows)), jnp.broadcast_to(of_bag, shape)


def never(read: Any, axes: Any) -> jax.Array:
    """False, computed from what was read of a table in a way that XLA does not see through.

    It orders a step after that, e.g. after the forward pass, for which XLA would otherwise keep a copy of the table. An
    optimization barrier does not: it is gone when XLA places copies.
    """
    firsts = [leaf.reshape(-1)[:1] for leaf in jax.tree.leaves(read)]
    flags = (jnp.sum((x == x) & (x != x), dtype=jnp.int32) for x in firsts)
    never = sum(flags, jnp.zeros((), jnp.int32))
    return (never if axes is None else lax.psum(never, axes)) > 0


def no_row(rows: jax.Array) -> jax.Array:
    """The number that stands for no row: out of range, so that it is not read and not written."""
    return jnp.asarray(jnp.iinfo(rows.dtype).max, rows.dtype)


def _distinct(rows: jax.Array, gradients: jax.Array, axes: Any) -> Distinct:
    if axes is not None:
        # Every replica takes the step of the whole batch.
        rows, gradients = all_shards(rows, axes), all_shards(gradients, axes)
    numbers, places = jnp.unique(rows, return_inverse=True, size=rows.size, fill_value=no_row(rows))
    places = places.reshape(-1)
    # Gradients of positions that train no row are 0, and are many where batches are padded.
    trains = jnp.where(rows == no_row(rows), rows.size, places)
    return Distinct(numbers, sums_by_row(rows.size, trains, gradients), places)


def _read(array: jax.Array, rows: jax.Array) -> jax.Array:
    """These rows of the table or of a slot, 0 for marks."""
    options: Any = {"mode": "fill", "fill_value": 0, "indices_are_sorted": True}
    return exactly(lambda x: x.at[rows].get(**options, wrap_negative_indices=False), array)


def _written(array: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """The table or a slot with new rows, except for marks."""
    given = array.at[rows]
    return given.set(
        new.astype(array.dtype), mode="drop", indices_are_sorted=True, wrap_negative_indices=False
    )


def _rounded(new: jax.Array, rows: jax.Array, dtype: Any, key: jax.Array | None) -> jax.Array:
    """The new rows in this type; random bits depend on the row and not on its place in the batch."""
    if key is None:
        return round_to(new, dtype, None)
    return jax.vmap(lambda values, key: round_to(values, dtype, key))(new, keys_of_rows(key, rows))


def keys_of_rows(key: jax.Array, rows: jax.Array) -> jax.Array:
    """A key for each row, which depends on its number and not on its place in the batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows.astype(jnp.uint32))


NUMBERS = RowFormat(lambda stored: stored, _rounded)
