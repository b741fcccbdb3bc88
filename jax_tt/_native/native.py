"""Kinds of tables with native ops."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch
from jax_tt._jax import backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.operands import sentinel_operand
from jax_tt._native.table_call import Calls, run
from jax_tt._native.table_group import TableGroup
from jax_tt._table.options import Lookup
from jax_tt._table.reference import ReferenceTable, stepped
from jax_tt._table.table import named
from jax_tt._table.types import Params, Slots, State


class NativeTable(ReferenceTable):
    """A kind with native ops, selected by ``method`` and by the platform that a program is lowered for.

    Attributes:
        calls: the native ops.
    """

    calls: ClassVar[Calls]

    @property
    def row_attributes(self) -> Mapping[str, Any]:
        """What native ops must be told of the form of the rows."""
        return {}

    @property
    def steps_natively(self) -> bool:
        """Whether gradients, and the step of its rule, are native ops."""
        return self.update is None or self.update.is_native

    def group(self, lookup: Lookup) -> Any:
        if lookup.method == "reference":
            return None
        method = "cuda_emulated" if lookup.method == "cuda_emulated" else "auto"
        return TableGroup(self.calls, method)

    def method(self, lookup: Lookup, state: State) -> str:
        return backend.choose(lookup.method, self.storage(state))

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        """`Table.forward`; an invalid sentinel is an error in native ops on CPU, and gives NaN elsewhere."""
        if lookup.method == "reference":
            return super().forward(state, batch, lookup)
        params, sentinel = self.params(state), state.get("sentinel")
        axes = varying_axes(params, batch)
        params, batch, sentinel = vary_over((params, batch, sentinel), axes)

        def native(platform: str, params: Params, batch: Batch, sentinel: Any) -> Any:
            of_all = self, platform, params, batch, lookup
            return vary_over(
                run(self.calls.forward(*of_all, sentinel=sentinel_operand(sentinel))), axes
            )

        def reference(params: Params, batch: Batch, sentinel: Any) -> Any:
            state = named(self, params)
            if sentinel is not None:
                state["sentinel"] = sentinel
            out, _ = ReferenceTable.forward(self, state, batch, lookup)
            platform = backend.native_platforms()[0]
            _, saved = jax.eval_shape(partial(native, platform), params, batch, sentinel)
            return vary_over((out, zeros_like(saved)), axes)

        return backend.run(lookup.method, native, reference, params, batch, sentinel)

    def param_gradients(
        self, params: Params, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[Params, jax.Array | None]:
        axes = varying_axes(params, batch, g)

        def reference(params: Params, batch: Batch, residuals: Any, g: jax.Array) -> Any:
            own = ReferenceTable.param_gradients(self, params, batch, residuals, g, lookup)
            return vary_over(own, axes)

        def native(
            platform: str, params: Params, batch: Batch, residuals: Any, g: jax.Array
        ) -> Any:
            of_all = self, platform, params, batch, lookup
            return vary_over(run(self.calls.backward(*of_all, residuals=residuals, g=g)), axes)

        return backend.run(lookup.method, native, reference, params, batch, residuals, g)

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, Slots, jax.Array, jax.Array | None]:
        if not self.steps_natively:
            params = self.params(state)
            grads, dweights = self.param_gradients(params, batch, residuals, g, lookup)
            return *stepped(self, state, batch, grads, lookup, values), dweights

        def reference(state: State, batch: Batch, residuals: Any, g: Any, values: Any) -> Any:
            return ReferenceTable.stepped_params(self, state, batch, residuals, g, lookup, values)

        def native(
            platform: str, state: State, batch: Batch, residuals: Any, g: Any, values: Any
        ) -> Any:
            of_all = self, platform, self.params(state), batch, lookup
            own = {"slots": self.stepped_slots(state), "residuals": residuals, "g": g}
            found = run(self.calls.update(*of_all, **own, values=values))
            return self.varying_step(found, state, batch, g)

        return backend.run(lookup.method, native, reference, state, batch, residuals, g, values)

    def varying_step(self, stepped: Any, state: State, batch: Batch, g: jax.Array | None) -> Any:
        """What `stepped_params` returns, from the results of a native op, which JAX takes to be replicated."""
        *new, dweights = stepped
        arrays = self.params(state), self.stepped_slots(state)
        new = vary_over(new, varying_axes(arrays))
        return *new, vary_over(dweights, varying_axes(arrays, batch, g))


def zeros_like(saved: Any) -> Any:
    """Placeholder for native residuals in the reference: all branches must return the same types."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), saved)
