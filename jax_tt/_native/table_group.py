"""`NativeTable`, a kind with native ops, and `TableGroup`, the tables that they handle together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._jax import backend
from jax_tt._jax.reverse_only import once
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.partition import is_partitioned, num_blocks
from jax_tt._native.table_call import BackwardPass, Calls, UpdatePass, run
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.groups import BoundTable, Call, Cotangents, Gradients, of_one_table
from jax_tt._table.options import Lookup
from jax_tt._table.parts_of_arrays import (
    Key,
    Part,
    SharedArrays,
    attached,
    detached,
    restacked,
    taken,
)
from jax_tt._table.reference import ReferenceTable, stepped
from jax_tt._table.state import Params, SlotArrays, State
from jax_tt._table.table import Execution

# Ids of one update: its working memory may grow with those of all its tables.
_MOST_IDS = 2**26


@dataclasses.dataclass(frozen=True)
class TableGroup:
    """The group of all tables of a kind, for `jax_tt._table.groups`.

    One native call per pass takes all tables that the kind can have in it. On platforms without native ops, the
    reference takes their place.

    Attributes:
        calls: the native calls of the kind.
        method: as in `jax_tt._jax.backend.run`, but not ``"reference"``.
    """

    calls: Calls
    method: str
    unwraps: ClassVar[bool] = True

    def forward(self, calls: Sequence[Call], wide: ConcatLayout | None) -> tuple[Any, Any]:
        if wide is not None and not self._in_columns(calls):
            sums, saved = self.forward(calls, None)
            return wide.joined(sums), saved
        if wide is not None:
            array = backend.run(self.method, *self._forward_pass(calls, wide))
            # As a residual, it only orders the update after the forward pass; its first axis stands for one block.
            saved = (array[None],)
            return array, [saved if call.use.lookup.wanted.names else () for call in calls]
        results: dict[int, Any] = {}
        for members in alike(calls) if len(calls) > 1 else [[0]]:
            one = self._forward_pass([calls[k] for k in members])
            found = backend.run(self.method, *one)
            results.update(zip(members, found, strict=True))
        sums, saved = zip(*(results[k] for k in range(len(calls))), strict=True)
        return sums, saved

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Gradients, wide: ConcatLayout | None
    ) -> list[Cotangents]:
        if wide is not None and not self._in_columns(calls):
            gs, wide = separate_gradients(calls, gs, wide), None
        cotangents: list[Cotangents] = [({}, None)] * len(calls)
        stepped, others = [], []
        for k, (call, g) in enumerate(zip(calls, _each(calls, gs, wide), strict=True)):
            table: Any = call.use.table
            if g is None:
                continue
            if call.use.lookup.wanted.names and table.steps_natively:
                (others if table.update is None else stepped).append(k)
                continue
            if wide is not None:
                (g,) = separate_gradients([call], gs, wide.of([k]))
            # The sums of all tables may stand for those of this one: they only order the step after the forward pass.
            cotangents[k] = of_one_table(call, residuals[k], g)
        parts = [(part, self._new_states) for part in self._parts(calls, stepped)]
        parts += [(part, self._named_gradients) for part in self._parts(calls, others)]
        if wide is None:
            calls = _in_blocks_of_stacks(calls)
            parts = [
                ([part[k] for k in members], of_part)
                for part, of_part in parts
                for members in alike([calls[k] for k in part])
            ]
        for members, of_part in parts:
            given = [calls[k] for k in members], [residuals[k] for k in members]
            if wide is None:
                results = of_part(*given, [gs[k] for k in members])
            else:
                results = of_part(*given, gs, wide.of(members))
            for k, of_table in zip(members, results, strict=True):
                cotangents[k] = of_table
        return cotangents

    # Passes of tables without wrappers, each in one native call

    def _forward_pass(
        self, calls: Sequence[Call], wide: ConcatLayout | None = None
    ) -> tuple[Any, ...]:
        """The native function, the one in JAX, and their arguments, as `backend.run` takes them.

        They return sums and residuals of every table, or one array of all sums. An invalid sentinel is an error in
        native ops on CPU, and gives NaN elsewhere.
        """
        axes = [varying_axes(call.state, call.batch) for call in calls]

        def native(platform: str, calls: Sequence[Call], shared: SharedArrays) -> Any:
            calls = attached(calls, shared) if shared else calls
            results = run([self.calls.forward(platform, call) for call in calls], wide)
            return (
                results
                if wide is not None or not any(axes)
                else list(map(vary_over, results, axes))
            )

        def in_jax(calls: Sequence[Call], shared: SharedArrays) -> Any:
            alone = taken(attached(calls, shared))
            sums = list(map(self.calls.forward.in_jax, alone))
            if wide is not None:
                return wide.joined(sums)
            types = jax.eval_shape(partial(native, backend.native_platforms()[0]), alone, {})
            saved = map(vary_over, [zeros_like(residuals) for _, residuals in types], axes)
            return list(zip(sums, saved, strict=True))

        if any(axes):
            calls = list(map(vary_over, calls, axes))
        parts = any(call.use.has_parts for call in calls)
        return native, in_jax, *(detached(calls) if parts else (calls, {}))

    def backward_pass(
        self,
        one: type[BackwardPass] | type[UpdatePass],
        calls: Sequence[Call],
        residuals: Sequence[Any],
        gs: Gradients,
        wide: ConcatLayout | None = None,
    ) -> list[Any]:
        """What one of the backward `calls` returns for every table; the other operands as in `backward`."""

        def native(
            platform: str, calls: Sequence[Call], shared: SharedArrays, residuals: Any, gs: Any
        ) -> Any:
            calls = attached(calls, shared) if shared else calls
            of_each, of_all = (gs, {}) if wide is None else ([None] * len(calls), {"g": gs})
            if wide is not None and one is self.calls.update:
                of_all = {"out": residuals[0][0], **of_all}
            of_tables = [
                one(platform, *operands) for operands in zip(calls, residuals, of_each, strict=True)
            ]
            results = varying(calls, run(of_tables, wide, of_all), _each(calls, gs, wide))
            return detached(results) if shared else (results, {})

        def in_jax(calls: Sequence[Call], shared: SharedArrays, residuals: Any, gs: Any) -> Any:
            del residuals
            calls = attached(calls, shared)
            alone, gs = taken(calls), separate_gradients(calls, gs, wide)
            results = varying(alone, map(one.in_jax, alone, gs), gs)
            if one is not self.calls.update or not shared:
                return results, {}
            changed = [(x.use.table.spec, x.state) for x in calls]
            before = [(spec.params(state), spec.stepped_slots(state)) for spec, state in changed]
            arrays, stacks = restacked(before, [result[:2] for result in results])
            return [(*new, *rest[2:]) for new, rest in zip(arrays, results, strict=True)], stacks

        def varying(calls: Sequence[Call], results: Iterable[Any], gs: Any) -> list[Any]:
            if not jax.sharding.get_abstract_mesh().manual_axes:
                return list(results)
            return [one.varying(*row) for row in zip(calls, results, gs, strict=True)]

        parts = any(call.use.has_parts for call in calls)
        given = detached(list(calls)) if parts else (list(calls), {})
        found, after = backend.run(self.method, native, in_jax, *given, residuals, gs)
        return attached(found, after) if after else found

    def _named_gradients(self, calls: Sequence[Call], *passed: Any) -> list[Cotangents]:
        found = self.backward_pass(self.calls.backward, calls, *passed)
        return [
            (dict(zip(call.use.table.spec.param_names, grads, strict=True)), dweights)
            for call, (grads, dweights) in zip(calls, found, strict=True)
        ]

    def _new_states(
        self,
        calls: Sequence[Call],
        residuals: Sequence[Any],
        gs: Gradients,
        wide: ConcatLayout | None = None,
    ) -> list[Cotangents]:
        tables: list[Any] = [call.use.table for call in calls]
        counts = [call.state["step"] for call in calls]
        batches, gs = once(([call.batch for call in calls], gs), counts)
        steps = [
            table.step_of(None, call.state, batch, g, call.use.lookup, call.values)
            for table, call, batch, g in zip(
                tables, calls, batches, _each(calls, gs, wide), strict=True
            )
        ]
        given = [
            Call(
                dataclasses.replace(call.use, lookup=step.lookup),
                call.state,
                step.batch,
                step.values,
                flat=call.flat,
            )
            for call, step in zip(calls, steps, strict=True)
        ]
        gs = [step.g for step in steps] if wide is None else steps[0].g
        after = self.backward_pass(self.calls.update, given, residuals, gs, wide)
        results = []
        for table, call, step, found in zip(tables, calls, steps, after, strict=True):
            new, _, dweights = table.after_step(call.state, step, *found)
            results.append((new, dweights))
        return results

    # Which tables one native call takes

    def _in_columns(self, calls: Sequence[Call]) -> bool:
        """Whether the native call can have the sums of all features in one array: the batch is whole on this device."""
        # XLA may divide a batch over the devices of a process. The segments of a table are those of its features, one
        # feature after the other: a share of them has other samples than the same share of the array's rows, so that
        # a device would have columns of samples that it has no ids of.
        return self.calls.forward.in_columns and not any(
            not isinstance(call.batch.num_segments, int)
            or is_partitioned()
            or call.use.lookup.axis_name is not None
            or varying_axes(call.state, call.batch)
            for call in calls
        )

    def _parts(self, calls: Sequence[Call], members: Sequence[int]) -> list[list[int]]:
        """The members in about equal parts that one native call takes."""
        # The tables of a stack are in one part: two calls would copy the arrays that they share.
        units: dict[Any, list[int]] = {}
        for k in members:
            units.setdefault(_stack(calls[k]) or k, []).append(k)
        sizes = {}
        for key, (k, *_) in units.items():
            spec = calls[k].use.table.spec
            sizes[key] = sum(map(len, (spec.param_names, *spec.stepped_names)))
        total = sum(sizes.values())
        most = max(1, -(-total // max(1, -(-total // self.calls.update.most_arrays))))
        parts: list[list[int]] = []
        size = ids = 0
        for key, unit in units.items():
            counts = [math.prod(calls[k].batch.ids.shape[:2]) for k in unit]
            count = sum(count for count in counts if isinstance(count, int))
            if not parts or size >= most or ids + count > _MOST_IDS:
                parts.append([])
                size = ids = 0
            parts[-1] += unit
            size += sizes[key]
            ids += count
        return parts


def zeros_like(saved: Any) -> Any:
    """Placeholder for native residuals in the reference: all branches must return the same types."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), saved)


def alike(calls: Sequence[Call]) -> list[list[int]]:
    """The numbers of the calls that one native call takes: all of them, if possible.

    Batches that are partitioned over the devices in another number of blocks need another call, and so do tables with
    another accumulator type, whose steps have hyper-parameters of that type.
    """
    parts: dict[Any, list[int]] = {}
    for k, call in enumerate(calls):
        blocks = call.use.blocks or num_blocks(call.batch.num_segments)
        accum = accumulator(call.use.table.spec.storage(call.state))
        parts.setdefault((blocks if is_partitioned(blocks) else 1, accum), []).append(k)
    return list(parts.values())


def _stack(call: Call) -> Key | None:
    """What names the array of the stack that a table is in."""
    first = call.state[call.use.table.spec.param_names[0]]
    return first.key if isinstance(first, Part) else None


def _in_blocks_of_stacks(calls: Sequence[Call]) -> Sequence[Call]:
    """The calls with as many blocks as divide the batches of all tables of a stack.

    What changes a stack is one native call, or its arrays would be copied.
    """
    if not is_partitioned():
        return calls
    blocks: dict[Key | None, int] = {}
    for call in calls:
        key = _stack(call)
        blocks[key] = math.gcd(blocks.get(key, 0), num_blocks(call.batch.num_segments))
    return [
        call
        if (key := _stack(call)) is None
        else call._replace(use=dataclasses.replace(call.use, blocks=blocks[key]))
        for call in calls
    ]


def _each(calls: Sequence[Call], gs: Gradients, wide: ConcatLayout | None) -> Sequence[Any]:
    """The gradient that every call gets: its own, or the one that they share."""
    return gs if wide is None else [gs] * len(calls)


def separate_gradients(
    calls: Sequence[Call], gs: Gradients, wide: ConcatLayout | None
) -> Sequence[Any]:
    """The gradients of the sums of every call."""
    return gs if wide is None else wide.separated(gs, [call.shape for call in calls])


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
        return self.update is None or self.update.optimizer.kind is not None

    def execution(self, lookup: Lookup, state: State) -> Execution:
        method = backend.choose(lookup.method, self.spec.storage(state))
        if method == "reference":
            return Execution(differentiable=self.update is None)
        return Execution(method, TableGroup(self.calls, method))

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        if lookup.method == "reference":
            return super().forward(state, batch, lookup)
        calls = [Call(BoundTable(self, lookup), state, batch, ())]
        (sums,), (residuals,) = TableGroup(self.calls, lookup.method).forward(calls, None)
        return sums, residuals

    def param_gradients(
        self, params: Params, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[Params, jax.Array | None]:
        call = Call(BoundTable(self, lookup), self.spec.named(params), batch, ())
        group = TableGroup(self.calls, lookup.method)
        (gradients,) = group.backward_pass(self.calls.backward, [call], [residuals], [g])
        return gradients

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, SlotArrays, jax.Array, jax.Array | None]:
        if not self.steps_natively:
            params = self.spec.params(state)
            grads, dweights = self.param_gradients(params, batch, residuals, g, lookup)
            return *stepped(self, state, batch, grads, lookup, values), dweights
        call = Call(BoundTable(self, lookup), state, batch, values)
        group = TableGroup(self.calls, lookup.method)
        (after,) = group.backward_pass(self.calls.update, [call], [residuals], [g])
        return after
