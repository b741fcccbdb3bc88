"""Kinds of tables with native ops."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from jax_tt._ids.batch import Batch
from jax_tt._jax import backend
from jax_tt._native.table_call import Calls
from jax_tt._native.table_group import TableGroup
from jax_tt._table.groups import Call, Use
from jax_tt._table.options import Lookup
from jax_tt._table.reference import ReferenceTable, stepped
from jax_tt._table.state import Params, Slots, State
from jax_tt._table.table import Execution


class NativeTable(ReferenceTable):
    """A kind with native ops, selected by ``method`` and by the platform that a program is lowered for.

    On its own, a table is a group of one.

    Attributes:
        calls: the native ops.
    """

    calls: ClassVar[Calls]

    @functools.cached_property
    def row_attributes(self) -> Mapping[str, Any]:
        """What native ops must be told of the form of the rows."""
        return {}

    @property
    def steps_natively(self) -> bool:
        """Whether gradients, and the step of its rule, are native ops."""
        return self.update is None or self.update.is_native

    def execution(self, lookup: Lookup, state: State) -> Execution:
        method = backend.choose(lookup.method, self.spec.storage(state))
        if method == "reference":
            return Execution(by_jax=self.update is None)
        return Execution(method, TableGroup(self.calls, method))

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        if lookup.method == "reference":
            return super().forward(state, batch, lookup)
        calls = [Call(Use(self, lookup), state, batch, ())]
        (sums,), (residuals,) = TableGroup(self.calls, lookup.method).forward(calls, None)
        return sums, residuals

    def param_gradients(
        self, params: Params, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[Params, jax.Array | None]:
        call = Call(Use(self, lookup), self.spec.named(params), batch, ())
        group = TableGroup(self.calls, lookup.method)
        (gradients,) = group.backward_pass(self.calls.backward, [call], [residuals], [g])
        return gradients

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, Slots, jax.Array, jax.Array | None]:
        if not self.steps_natively:
            params = self.spec.params(state)
            grads, dweights = self.param_gradients(params, batch, residuals, g, lookup)
            return *stepped(self, state, batch, grads, lookup, values), dweights
        call = Call(Use(self, lookup), state, batch, values)
        group = TableGroup(self.calls, lookup.method)
        (after,) = group.backward_pass(self.calls.update, [call], [residuals], [g])
        return after
