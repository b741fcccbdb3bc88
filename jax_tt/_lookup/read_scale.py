"""Rows that a lookup multiplies by factors of their own, as some rules have it.

The factors become weights of the forward pass alone: the gradients of such a table are those with respect to the rows
that the lookup returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.id_space import digits_in_range
from jax_tt._table.groups import Call
from jax_tt.optimizers import ReadsScaled

Scales = list[jax.Array | None]


def scaled_reads(calls: Sequence[Call]) -> tuple[list[Call], Scales]:
    """The calls with the factors in their weights, and the factor of every position ``[S, cap]`` of each call.

    A factor is None where the rows are read as they are.
    """
    reading: list[Call] = []
    scales: Scales = []
    for call in calls:
        scales.append(_scale(call))
        reading.append(call if scales[-1] is None else _weighted(call, scales[-1]))
    return reading, scales


def _scale(call: Call) -> jax.Array | None:
    table = call.use.table
    if table.update is None or not call.use.lookup.train:
        return None
    optimizer = table.update.optimizer
    if not isinstance(optimizer, ReadsScaled):
        return None
    ((ids,), _), (slots,) = digits_in_range(table.ids, call.batch), table.spec.slots(call.state)
    of_ids = (
        slot.at[ids.reshape(-1)].get(mode="promise_in_bounds", wrap_negative_indices=False)
        for slot in slots
    )
    return optimizer.read_scale(tuple(of_ids), call.values["hyper"]).reshape(ids.shape)


def _weighted(call: Call, scale: jax.Array) -> Call:
    weights = scale.astype(accumulator(call.use.table.spec.storage(call.state)))
    if call.batch.weights is not None:
        weights = weights * call.batch.weights.astype(weights.dtype)
    return call._replace(batch=dataclasses.replace(call.batch, weights=weights))
