"""`Composite`: a table that is made of other tables."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base.arguments import expect, instance_of, mismatch, type_of
from jax_tt._base.dtypes import accumulator
from jax_tt._base.storage import require_arrays, table_label
from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import IdSpace
from jax_tt._table import groups
from jax_tt._table.change import has_cache
from jax_tt._table.check import check_state
from jax_tt._table.copies import (
    freeze,
    with_default_stddev,
    with_name,
    with_update,
    without_values,
)
from jax_tt._table.groups import BoundTable, Call
from jax_tt._table.options import Lookup, NeededCotangents, StepInputs, Update
from jax_tt._table.reference import stepped_scalars
from jax_tt._table.state import SCALARS, Array, State, StateSpec, scalars_of
from jax_tt._table.step_values import step_values
from jax_tt._table.table import APPLIED, Execution, Table
from jax_tt._table.wrapper import is_sharded
from jax_tt.optimizers import ReadsScaled


@dataclasses.dataclass(frozen=True)
class Composite(Table):
    """A table whose rows are sums of rows of other tables: of one row of each, or of some.

    Its state has the arrays of table k with the prefix ``table_k_``. Subclasses say which ids each table is asked for,
    by `batches`, and what becomes of whole tables.

    Attributes:
        tables: of the same number of columns and with the same update.
        name: for error messages.
    """

    tables: tuple[Any, ...]
    name: str | None = None

    def __post_init__(self) -> None:
        label = table_label(self.name)
        expected = "a tuple of tables, e.g. (table, other)"
        instance_of(f"{label}tables", self.tables, Sequence, expected)
        object.__setattr__(self, "tables", tuple(self.tables))
        expect(self.tables, f"{label}tables", "none", "at least one")
        for k, table in enumerate(self.tables):
            self._check_table(f"{label}tables[{k}]", table)

    def _check_table(self, argument: str, table: Any) -> None:
        instance_of(argument, table, Table, "a jax_tt.Table, e.g. jax_tt.dense_table(1000, 16)")
        if table.ids.takes_keys or has_cache(table) or is_sharded(table):
            expected = "a table without a row cache, which is not a hash table and is not divided over devices"
            raise mismatch(argument, type_of(table), expected, error=TypeError)
        first = self.tables[0]
        if self.common(table) != self.common(first):
            got = f"{self.common(table)}"
            raise mismatch(argument, got, f"{self.common(first)}, as tables[0] has")
        if table.update != first.update:
            got = f"update={table.update}"
            expected = f"that of tables[0], {first.update}: all of them are stepped together"
            raise mismatch(argument, got, expected, "Use with_update of the whole table.")
        if table.update is not None and isinstance(table.update.optimizer, ReadsScaled):
            rule = type(table.update.optimizer).__name__
            got = f"the rule {rule}, which scales the rows that are read"
            raise mismatch(argument, got, "another one, e.g. optimizers.RowWiseAdagrad(0.05)")

    @abc.abstractmethod
    def common(self, table: Table) -> str:
        """The sizes that all tables have in common, in words."""

    @property
    def features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.tables[0].features

    @property
    def update(self) -> Update | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.tables[0].update

    def of_each(self, change: Callable[[Any], Any]) -> Self:
        """The same of changed tables."""
        return dataclasses.replace(self, tables=tuple(map(change, self.tables)))

    @functools.cached_property
    def members(self) -> tuple[Any, ...]:
        """The tables with names, and without the step count and sentinel, which the whole table has."""
        named = self.of_each(
            lambda table: (
                table
                if table.update is None
                else with_update(table, dataclasses.replace(table.update, shared=True))
            )
        ).tables
        return tuple(with_name(table, f"{self.title}, table {k}") for k, table in enumerate(named))

    @property
    def title(self) -> str:
        """What error messages about one of the tables call the whole."""
        return self.name or type(self).__name__

    # State

    def separated(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The state of every table from the whole state, with the step count and sentinel if it is fused."""
        scalars = {name: state[name] for name in SCALARS if name in state}
        states = []
        for k in range(len(self.tables)):
            prefix = f"table_{k}_"
            names = [name for name in state if name.startswith(prefix)]
            states.append({name.removeprefix(prefix): state[name] for name in names} | scalars)
        return states

    def joined(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The inverse of `separated`, without the step count and the sentinel."""
        return {
            f"table_{k}_{name}": array
            for k, state in enumerate(states)
            for name, array in state.items()
            if name not in SCALARS
        }

    @functools.cached_property
    def spec(self) -> StateSpec:
        arrays: list[Array] = []
        for k, table in enumerate(self.members):
            names = {array.name: f"table_{k}_{array.name}" for array in table.spec.arrays}
            for array in table.spec.renamed(names, by_row=False):
                # Orders of ids are mapped in the lookup of every table.
                role = "constant" if array.role == "buffer" else array.role
                arrays.append(dataclasses.replace(array, role=role))
        return StateSpec((*arrays, *scalars_of(self.update)))

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, len(self.tables))
        params = [table.init_params(one) for table, one in zip(self.members, keys, strict=True)]
        return self.joined(params)

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        pairs = zip(self.members, self.separated(params), strict=True)
        rest = self.joined([table.init_rest(part) for table, part in pairs])
        return rest | self.spec.initial_scalars()

    def own_arrays(self, state: State) -> dict[str, Any]:
        """Arrays of a frozen state that belong to no table."""
        del state
        return {}

    # Lookups

    @functools.cached_property
    def ids(self) -> IdSpace:
        reason = f"{type_of(self)}, whose tables split ids in different ways; expected integers."
        return dataclasses.replace(super().ids, integers_only=reason)

    def execution(self, lookup: Lookup, state: State) -> Execution:
        pairs = zip(self.members, self.separated(state), strict=True)
        methods = {table.execution(lookup, part).method for table, part in pairs}
        if methods == {"reference"}:
            return Execution(differentiable=self.update is None)
        return Execution(lookup.method)

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        given = self.batches(state, batch, lookup)
        triples = zip(self.members, self.separated(state), given, strict=True)
        batches = [table.prepare(part, one, lookup)[1] for table, part, one in triples]
        sums, saved = groups.forward(self._calls(state, batches, lookup), None)
        accum = accumulator(self.spec.storage(state))
        return functools.reduce(lax.add, (x.astype(accum) for x in sums)), (batches, saved)

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        del batch
        return self._cotangents(state, residuals, g, lookup, ())

    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        del batch
        new, dweights = self._cotangents(state, residuals, g, lookup, values)
        flags = [new.pop(f"table_{k}_{APPLIED}") for k in range(len(self.tables))]
        applied = functools.reduce(jnp.maximum, flags)
        return new | stepped_scalars(self, state, applied), dweights

    def _cotangents(
        self, state: State, residuals: Any, g: jax.Array, lookup: Lookup, values: Sequence[Any]
    ) -> tuple[dict[str, Any], jax.Array | None]:
        batches, saved = residuals
        calls = self._calls(state, batches, lookup, values)
        gs = [g.astype(accumulator(call.use.table.spec.storage(call.state))) for call in calls]
        cotangents = groups.backward(calls, saved, gs, None)
        dweights = [dweight for _, dweight in cotangents if dweight is not None]
        return self.joined([new for new, _ in cotangents]), (
            sum(dweights[1:], dweights[0]) if dweights else None
        )

    @abc.abstractmethod
    def batches(self, state: State, batch: Batch, lookup: Lookup) -> list[Batch]:
        """The batch for each table, before it prepares it."""

    def _calls(
        self, state: State, batches: Sequence[Batch], lookup: Lookup, values: Sequence[Any] = ()
    ) -> list[Call]:
        calls = []
        for k, (table, part, batch) in enumerate(
            zip(self.members, self.separated(state), batches, strict=True)
        ):
            names = frozenset(
                name
                for name in table.spec.trained_names
                if f"table_{k}_{name}" in lookup.wanted.names
            )
            execution = table.execution(lookup, part)
            of_table = dataclasses.replace(
                lookup,
                # An id out of range is one of all tables; the first one reports it.
                bounds="zero" if k and lookup.bounds == "warn" else lookup.bounds,
                method=execution.method,
                wanted=NeededCotangents(names, lookup.wanted.weights),
            )
            calls.append(
                Call(
                    BoundTable(table, of_table, execution), part, batch, values[k] if values else ()
                )
            )
        return calls

    # The whole table

    def of_members(
        self, state: State, function: Callable[..., jax.Array], *args: Any
    ) -> list[jax.Array]:
        """What a function of every table and its state returns, in the accumulator type."""
        accum = accumulator(self.spec.storage(state))
        pairs = zip(self.members, self.separated(state), strict=True)
        return [function(table, part, *args).astype(accum) for table, part in pairs]


@step_values.register(Composite)
def step_values_of_each(table: Composite, state: State, inputs: StepInputs) -> Any:
    # With the same random numbers, the rounding errors of equal tables would add up.
    key = jax.random.key(0) if inputs.key is None else inputs.key
    pairs = zip(table.members, table.separated(state), strict=True)
    return tuple(
        step_values(member, part, inputs._replace(key=jax.random.fold_in(key, k)) if k else inputs)
        for k, (member, part) in enumerate(pairs)
    )


@check_state.register(Composite)
def check_each(table: Composite, state: State) -> None:
    require_arrays(table, state, (*table.spec.trained_names, *table.spec.constant_names))
    for member, part in zip(table.members, table.separated(state), strict=True):
        check_state(member, part)


@with_update.register(Composite)
def with_update_of_each(table: Composite, update: Update | None) -> Composite:
    return table.of_each(lambda member: with_update(member, update))


@with_default_stddev.register(Composite)
def with_default_stddev_of_each(table: Composite, stddev: float) -> Composite:
    return table.of_each(lambda member: with_default_stddev(member, stddev))


@without_values.register(Composite)
def without_values_of_each(table: Composite) -> Composite:
    return table.of_each(without_values)


@freeze.register(Composite)
def freeze_each(table: Composite, state: State) -> tuple[Composite, dict[str, Any]]:
    check_state(table, state)
    frozen = [freeze(*member) for member in zip(table.members, table.separated(state), strict=True)]
    tables = tuple(
        with_name(member, given.name)
        for (member, _), given in zip(frozen, table.tables, strict=True)
    )
    kept = table.joined([arrays for _, arrays in frozen])
    return dataclasses.replace(table, tables=tables), kept | table.own_arrays(state)
