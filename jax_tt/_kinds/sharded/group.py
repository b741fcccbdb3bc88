"""`ShardedGroup`: all sharded tables of a call, whose rows and gradients travel together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_tt._kinds.sharded.backward import local_backward
from jax_tt._kinds.sharded.forward import local_forward
from jax_tt._kinds.sharded.programs import Local, over_devices
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.groups import Call, Cotangents, Gradients
from jax_tt._table.table import APPLIED


@dataclasses.dataclass(frozen=True)
class ShardedGroup:
    """The group of all tables that are sharded over the same axes of a mesh, for `jax_tt._table.groups`."""

    mesh: Mesh
    axes: tuple[str, ...]
    unwraps: ClassVar[bool] = False

    def forward(self, calls: Sequence[Call], wide: ConcatLayout | None) -> tuple[Any, Any]:
        calls = [Call(call.use, call.state, call.batch, ()) for call in calls]
        run = self.on_devices(Local(local_forward, ()), (self._specs(calls),), self._batch)
        sums, residuals = run(calls)
        return (sums if wide is None else wide.joined(sums)), residuals

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Gradients, wide: ConcatLayout | None
    ) -> list[Cotangents]:
        if wide is not None:
            gs = wide.separated(gs, [call.shape for call in calls])
        calls = [Call(*call[:4]) for call in calls]
        results = [
            ({name: self._spec_of(call, name) for name in self._names(call, g)}, self._batch)
            for call, g in zip(calls, gs, strict=True)
        ]
        specs = self._specs(calls), self._batch, self._batch
        run = self.on_devices(Local(local_backward, ()), specs, results)
        return run(calls, residuals, list(gs))

    @property
    def _batch(self) -> Any:
        """The partition of arrays with one part per device."""
        return P(self.mesh.axis_names)

    def _specs(self, calls: Sequence[Call]) -> list[Any]:
        """The partitions of the arrays of calls."""
        states = [{name: self._spec_of(call, name) for name in call.state} for call in calls]
        pairs = zip(calls, states, strict=True)
        return [Call(call.use, state, self._batch, P()) for call, state in pairs]

    def _spec_of(self, call: Call, name: str) -> P:
        return P(self.axes) if name in sharding_of(call).names else P()

    def _names(self, call: Call, g: Any) -> list[str]:
        """The arrays of the cotangents of a call."""
        table: Any = call.use.table
        if g is None or not call.use.lookup.wanted.names:
            return []
        if table.update is None:
            return list(table.spec.param_names)
        shared = table.update.shared
        return [*table.row_arrays, *([APPLIED] if shared else table.spec.scalar_names)]

    def on_devices(self, local: Local, specs: Any, out: Any) -> Callable[..., Any]:
        """Runs ``local`` on each device's shard, as it is inside of a ``shard_map``."""
        if inside_shard_map():
            return local
        return over_devices(local, self.mesh, specs, out)


def inside_shard_map() -> bool:
    """Whether arrays are the shards of one device."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)
