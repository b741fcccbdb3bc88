"""`ReferenceTable`: kinds in plain JAX, which is always available, differentiable, and the oracle of native ops.

Every function takes the canonical `Batch` and works in the accumulator type (float32, or float64 for float64).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch, pool, present
from jax_tt._ids.id_space import digits_in_range, outside
from jax_tt._jax.reverse_only import once
from jax_tt._jax.rounding import fold_key, round_to
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._table.options import IGNORED, Lookup
from jax_tt._table.state import Params, SlotArrays, State, kept_sentinel, sentinel_holds
from jax_tt._table.table import APPLIED, Table
from jax_tt.optimizers import ChangesAll


def rows(
    table: ReferenceTable, params: Params, batch: Batch, lookup: Lookup
) -> tuple[jax.Array, jax.Array]:
    """Row of every position ``[S, cap, D]``, with bounds applied; 0 for positions that read none.

    The second result says which positions read one, bool ``[S, cap]``.
    """
    digits, ok = digits_in_range(table.ids, batch)
    value = table.rows(params, digits, lookup.precision)
    here = present(batch)
    if lookup.bounds in IGNORED:
        here = here & ok
    elif lookup.bounds == "error":
        value = jnp.where(ok[..., None], value, jnp.nan)
    return jnp.where(here[..., None], value, 0), here


def forward(
    table: ReferenceTable,
    params: Params,
    batch: Batch,
    lookup: Lookup,
    sentinel: jax.Array | None = None,
) -> jax.Array:
    """Weighted sums of rows ``[S, nb, D]``, all NaN if the sentinel is invalid."""
    value, here = rows(table, params, batch, lookup)
    if batch.weights is not None:
        # A position that reads no row may have any weight, including NaN.
        weights = jnp.where(here, batch.weights, 0).astype(value.dtype)
        value = value * weights[..., None]
    sums = pool(batch, value)
    return sums if sentinel is None else jnp.where(sentinel_holds(sentinel), sums, jnp.nan)


def backward(
    table: ReferenceTable, params: Params, batch: Batch, g: jax.Array, lookup: Lookup
) -> tuple[Params, jax.Array | None]:
    """Gradients of `forward` in the accumulator type, for this shard of the batch only."""
    accum = accumulator(params[0].dtype)
    # Marked as varying, replicated parameters get the gradient of this shard only.
    wide = vary_over(tuple(param.astype(accum) for param in params), varying_axes(batch, g))

    def pooled(wide: Params, weights: Any) -> jax.Array:
        return forward(table, wide, dataclasses.replace(batch, weights=weights), lookup)

    if lookup.wanted.weights:
        _, pullback = jax.vjp(pooled, wide, batch.weights)
        grads, dweights = pullback(g.astype(accum))
        return tuple(grads), dweights
    _, pullback = jax.vjp(lambda wide: pooled(wide, batch.weights), wide)
    (grads,) = pullback(g.astype(accum))
    return tuple(grads), None


def update(
    table: ReferenceTable,
    state: State,
    batch: Batch,
    g: jax.Array,
    lookup: Lookup,
    values: dict[str, Any],
) -> tuple[Params, SlotArrays, jax.Array, jax.Array | None]:
    """Gradient and one optimizer step on the touched rows.

    Returns:
        New parameters and slots; 0.0 if the batch itself prevents the step, regardless of ``values["allowed"]``,
        otherwise 1.0; and the gradient of the weights, computed with the rows before the step.
    """
    grads, dweights = backward(table, table.spec.params(state), batch, g, lookup)
    return *stepped(table, state, batch, grads, lookup, values), dweights


def stepped(
    table: ReferenceTable,
    state: State,
    batch: Batch,
    grads: Params,
    lookup: Lookup,
    values: dict[str, Any],
) -> tuple[Params, SlotArrays, jax.Array]:
    """One optimizer step on the touched rows, with the gradients of this shard.

    Gradients are summed over ``lookup.axis_name`` first. Returns what `update` does, without the last.
    """
    assert table.update is not None
    params, slots = table.spec.params(state), table.spec.stepped_slots(state)
    read = touched(table, batch, lookup)
    if lookup.axis_name is not None:
        grads = lax.psum(grads, lookup.axis_name)
        read = [lax.psum(rows.astype(jnp.int32), lookup.axis_name) > 0 for rows in read]
    grads = tuple(grad * values["inv_scale"].astype(grad.dtype) for grad in grads)
    applied = ~poisoned(table, batch, lookup, lookup.axis_name)
    if table.update.skip_nonfinite:
        applied &= jnp.all(jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads]))
    key = jax.random.wrap_key_data(values["seed"], impl="threefry2x32")
    stochastic = table.update.rounds_stochastically(params[0].dtype)
    new_params, new_slots = [], []
    for k, (param, slot, grad, rows_touched) in enumerate(
        zip(params, slots, grads, read, strict=True)
    ):
        flat = param.reshape(param.shape[0], math.prod(param.shape[1:]))
        old, *old_slots = (array.astype(grad.dtype) for array in (flat, *slot))
        new, stepped = table.update.optimizer.update_rows(
            old, grad.reshape(flat.shape), tuple(old_slots), values["hyper"]
        )
        own_key = jax.random.fold_in(key, k) if stochastic else None
        new = round_to(new, param.dtype, own_key)
        stepped = [
            round_to(now, was.dtype, fold_key(own_key, 1 + j))
            for j, (now, was) in enumerate(zip(stepped, slot, strict=True))
        ]
        keep = rows_touched & applied & (values["allowed"] != 0)
        new_params.append(jnp.where(keep[:, None], new, flat).reshape(param.shape))
        new_slots.append(
            tuple(
                jnp.where(keep if now.ndim == 1 else keep[:, None], now, was)
                for now, was in zip(stepped, slot, strict=True)
            )
        )
    return tuple(new_params), tuple(new_slots), applied.astype(jnp.float32)


def poisoned(table: Table, batch: Batch, lookup: Lookup, axes: Any) -> jax.Array:
    """Whether any shard has an id that makes its bag NaN, so that the gradients of the batch are meaningless."""
    if lookup.bounds != "error":
        return jnp.zeros((), bool)
    bad = jnp.any(outside(table.ids, batch))
    return lax.psum(bad.astype(jnp.int32), axes) > 0 if axes else bad


def touched(table: ReferenceTable, batch: Batch, lookup: Lookup) -> list[jax.Array]:
    """Whether the batch reads each row of each parameter, regardless of the gradient; bool ``[rows]`` each."""
    digits, ok = digits_in_range(table.ids, batch)
    here = present(batch)
    if lookup.bounds in (*IGNORED, "error"):
        here = here & ok
    flags = []
    for digit, factor in zip(digits, table.ids.radices, strict=True):
        count = jnp.zeros(factor, jnp.int32).at[digit]
        count = count.max(here.astype(jnp.int32), mode="drop", wrap_negative_indices=False)
        flags.append(count > 0)
    return flags


def summed_axes(table: Table, state: State, batch: Batch, g: jax.Array, lookup: Lookup) -> Any:
    """The axes that a step sums gradients over, as `Lookup.axis_name`.

    Where shards of a batch stand beside a replicated table, they are the axes of the shards.
    """
    trained = {name: state[name] for name in table.spec.trained_names}
    axes = varying_axes(batch, g) - varying_axes(trained)
    return tuple(sorted(axes, key=str)) if axes else lookup.axis_name


def stepped_scalars(table: Table, state: State, applied: jax.Array) -> dict[str, jax.Array]:
    """The scalars after a step that was ``applied`` or not, 1 or 0; only that where a collection has the scalars."""
    # All shards of a table refuse a step together, and share the scalars.
    shards = varying_axes(applied) - varying_axes(state["step"])
    applied = lax.pmin(applied, tuple(sorted(shards, key=str))) if shards else applied
    if table.update is not None and table.update.shared:
        return {APPLIED: applied}
    return {
        "sentinel": kept_sentinel(state["sentinel"]),
        # A compile-time constant, so that the compiler knows that the old table is not needed.
        "used": vary_over(jnp.ones((), jnp.float32), varying_axes(state["used"])),
        "step": state["step"] + applied,
    }


class Step(NamedTuple):
    """The arguments of `ReferenceTable.stepped_params` other than the table's."""

    batch: Batch
    g: jax.Array
    lookup: Lookup
    values: Any


class ReferenceTable(Table):
    """A kind in plain JAX: rows are a function of the parameters and of the digits of their ids.

    A kind has `Table.spec`, `Table.init_params` and `rows`. The methods here index the parameters by the digits
    of a row in mixed radix, one parameter per digit, and JAX differentiates them.
    """

    @abc.abstractmethod
    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        """Rows ``[..., D]`` in the accumulator type, for digits ``[...]`` that are in range."""

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        """Weighted sums ``[S, nb, D]`` in the accumulator type, and residuals."""
        params, sentinel = self.spec.params(state), state.get("sentinel")
        return forward(self, params, batch, lookup, sentinel), ()

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        """Gradients of the parameters in their accumulator type, and of the weights if they are wanted."""
        params = self.spec.params(state)
        grads, dweights = self.param_gradients(params, batch, residuals, g, lookup)
        return dict(zip(self.spec.param_names, grads, strict=True)), dweights

    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        """The state after the update with output gradient ``g``, and the gradient of the weights."""
        new, _, dweights = self.step_if(None, state, batch, residuals, g, lookup, values)
        return new, dweights

    def step_if(
        self,
        allowed: jax.Array | None,
        state: State,
        batch: Batch,
        residuals: Any,
        g: jax.Array,
        lookup: Lookup,
        values: Any,
    ) -> tuple[dict[str, Any], jax.Array, jax.Array | None]:
        """`step` that changes nothing where ``allowed`` is 0, and that also says whether the batch allows the step.

        Returns:
            The new state; 1.0, or 0.0 where gradients are not finite and such steps are skipped, or where ``bounds``
            refuses an id; and the gradient of the weights. The second does not depend on ``allowed``.
        """
        batch, g = once((batch, g), state["step"])
        step = self.step_of(allowed, state, batch, g, lookup, values)
        stepped = self.stepped_params(
            state, step.batch, residuals, step.g, step.lookup, step.values
        )
        return self.after_step(state, step, *stepped)

    def step_of(
        self,
        allowed: jax.Array | None,
        state: State,
        batch: Batch,
        g: jax.Array,
        lookup: Lookup,
        values: Any,
    ) -> Step:
        """The arguments of `stepped_params` in a step that ``allowed`` and that of ``values`` allow, 1 by default.

        ``batch`` and ``g`` have passed `once`.
        """
        both = values.get("allowed", np.ones((), np.float32))
        both = both if allowed is None else both * allowed
        lookup = lookup.replace(axis_name=summed_axes(self, state, batch, g, lookup))
        batch, g = vary_over((batch, g), varying_axes(batch, g))
        return Step(batch, g, lookup, {**values, "allowed": both})

    def after_step(
        self,
        state: State,
        step: Step,
        params: Params,
        slots: SlotArrays,
        applied: jax.Array,
        dweights: jax.Array | None,
    ) -> tuple[dict[str, Any], jax.Array, jax.Array | None]:
        """What `step_if` returns, from what `stepped_params` does."""
        new = dict(zip(self.spec.param_names, params, strict=True))
        for names, arrays in zip(self.spec.stepped_names, slots, strict=True):
            new |= dict(zip(names, arrays, strict=True))
        # Slots that only `ChangesAll.change_all` changes.
        of_slots = [name for names in self.spec.slot_names for name in names]
        new |= {name: state[name] for name in of_slots if name not in new}
        taken = step.values["allowed"] * applied
        if self.update is not None and isinstance(self.update.optimizer, ChangesAll):
            seed = step.values["seed"]
            new = changed_between_steps(self, state["step"] + taken, new, taken, seed)
        new |= stepped_scalars(self, state, taken)
        return new, applied, dweights

    def param_gradients(
        self, params: Params, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[Params, jax.Array | None]:
        """Gradients of the parameters, for this shard only, and of the weights."""
        del residuals
        return backward(self, params, batch, g, lookup)

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, SlotArrays, jax.Array, jax.Array | None]:
        """New parameters and slots, whether the batch allows the step, and the gradient of the weights.

        ``values`` are `step_values` and ``allowed``, which is 0 if nothing may change.
        """
        del residuals
        return update(self, state, batch, g, lookup, values)


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
