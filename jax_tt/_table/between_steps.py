"""What some rules do to all rows of a table between two steps."""

from __future__ import annotations

import math
from typing import Any

import jax

from jax_tt._base.dtypes import accumulator
from jax_tt._jax.rounding import round_to
from jax_tt._table.table import Table
from jax_tt.optimizers import ChangesAll


def changed_between_steps(
    table: Table, step: jax.Array, state: dict[str, Any], applied: jax.Array, seed: jax.Array
) -> dict[str, Any]:
    """Parameters and slots after a step and what a `ChangesAll` does to all rows after it.

    ``step`` is the number of steps after it, ``state`` the parameters and slots, ``applied`` 1 or 0, and ``seed`` is
    for stochastic rounding.
    """
    update = table.update
    assert update is not None
    rule = update.optimizer
    assert isinstance(rule, ChangesAll)
    due = rule.changes_all(step)

    def changed(state: dict[str, Any]) -> dict[str, Any]:
        new = {}
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        slots = zip(
            table.spec.param_names, table.spec.slot_names, table.spec.slots(state), strict=True
        )
        for name, slot_names, arrays in slots:
            param = state[name]
            rows = param.reshape(param.shape[0], math.prod(param.shape[1:]))
            rows, arrays = rule.change_all(rows.astype(accumulator(param.dtype)), arrays, step)
            own_key = key if update.rounds_stochastically(param.dtype) else None
            new[name] = round_to(rows, param.dtype, own_key).reshape(param.shape)
            new |= zip(slot_names, arrays, strict=True)
        return new

    # Both branches work in place: a table is not copied in steps in which nothing is due.
    return jax.lax.cond(due & (applied != 0), changed, dict, state)
