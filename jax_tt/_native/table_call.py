"""`TableCall`: the call of a native op on one table, and on many tables at once."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from jax_tt._native.call import Named, Types, apart, native_call, native_tables_call, together
from jax_tt._native.operands import lookup_attributes, make_operands, sentinel_operand
from jax_tt._native.partition import Arrays, Dimensions, Split, over_blocks
from jax_tt._table.groups import Call

if TYPE_CHECKING:
    from jax_tt._table.wide import Wide


class TableCall(abc.ABC):
    """The call of an op on one table, or the part of one table in a call on many.

    The operands and results of an op on many tables, ``tables_`` and the name, are those of the op on one, table by
    table.

    Attributes:
        kind: what the names of the ops begin with.
        op: the rest of the name of the op on one table.
        together_on: platforms that have the op on many.
        in_columns: whether that can have the sums of all tables, or their gradients, in one array.
        most_arrays: about how many arrays one call may change in place. XLA takes time to compile it with the cube of
            their number.
        blocked, whole: arrays as in `over_blocks`; together they are the operands in the order of the target.
        blocked_results: as in `over_blocks`.
        appended, appended_results: names of ``whole`` arrays and of results that follow each other, of all tables, in
            one array each in a call on many tables.
    """

    kind: ClassVar[str]
    op: ClassVar[str]
    together_on: ClassVar[tuple[str, ...]]
    in_columns: ClassVar[bool]
    most_arrays: ClassVar[int]
    blocked_results: ClassVar[tuple[str, ...]]
    appended: ClassVar[tuple[str, ...]] = ()
    appended_results: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Makes calls trees of their attributes, for `types_in`."""
        super().__init_subclass__()
        jax.tree_util.register_pytree_node(
            cls, lambda call: ([vars(call)], None), partial(_with_attributes, cls)
        )

    def __init__(self, platform: str, call: Call):
        self.table: Any = call.use.table
        self.platform, self.batch, self.lookup = platform, call.batch, call.use.lookup
        self.params = {name: call.state[name] for name in self.table.spec.param_names}
        first = self.params[self.table.spec.param_names[0]]
        self.operands = make_operands(self.table, first.dtype, call.batch)
        self.blocked: dict[str, jax.Array] = dict(self.operands.arrays)
        self.whole: dict[str, jax.Array] = dict(self.params)
        if self.op == "forward":
            self.whole = {"sentinel": sentinel_operand(call.state.get("sentinel")), **self.whole}

    @abc.abstractmethod
    def results(self, args: Named) -> Types:
        """Types of the results for the blocks of one device."""

    @classmethod
    @abc.abstractmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int | None:
        """Bytes of working memory for one native call on tables with these operands.

        Args:
            calls: on one table each.
            given: their operands.
            columns: of the array that has the sums of all features, if there is one.
        """

    @abc.abstractmethod
    def finished(self, found: Named) -> Any:
        """What the op returns for the table, from its results."""

    def gradient_types(self) -> Types:
        """Types of the gradients of the parameters as results."""
        return {
            f"d{name}": jax.ShapeDtypeStruct(param.shape, self.operands.accum)
            for name, param in self.params.items()
        }

    def gradients(self, found: Named) -> Arrays:
        """The gradients of the parameters among the results."""
        return tuple(found[f"d{name}"] for name in self.params)

    def summed_gradients(self, found: Named, axes: Any) -> Named:
        """Their sums over all devices, by name."""
        own = dict(zip(self.gradient_types(), self.gradients(found), strict=True))
        return lax.psum(own, axes) if axes else own

    def describe(self, name: str) -> str:
        """What warnings call an array."""
        return f"{self.table.ids.label}{name}"

    def dimensions(self) -> dict[str, Dimensions]:
        """The named dimensions of arrays, as in `over_blocks`."""
        return {}

    def on_shard(self, axes: Mapping[str, tuple[str, ...]]) -> Any:
        """The call on a device that has a shard of a table; ``axes`` as in `jax_tt._native.partition.Split.of`."""
        raise NotImplementedError

    def gathered(self, args: Named, axes: Any) -> Named:
        """The operands on a device that has a share of the blocks."""
        del axes
        return args

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        """The results of all devices from those of one."""
        del args, axes
        return found

    def attributes(self, axes: Any) -> dict[str, Any]:
        of_batch = lookup_attributes(self.platform, self.table, self.batch, self.lookup, axes)
        return of_batch | self.table.row_attributes

    def attributes_of_many(self, axes: Any) -> dict[str, Any]:
        """The attributes in a call on many tables, which take no arrays."""
        return self.attributes(axes)

    @classmethod
    def of_tables(
        cls,
        calls: Sequence[Any],
        given: Sequence[Named],
        shared: Named,
        axes: Any,
        wide: Wide | None,
    ) -> tuple[Named, Sequence[Named]]:
        """What one native call returns of all tables, and of each of them as `over_blocks` wants it.

        Args:
            calls: on one table each.
            given: their operands on this device.
            shared: operands of all tables.
            axes: as in `over_blocks`.
            wide: as in `run`.
        """
        gathered = [call.gathered(args, axes) for call, args in zip(calls, given, strict=True)]
        into = wide if cls.op == "forward" else None
        results: list[dict[str, Any]] = [
            dict(call.results(args)) if into is None else {}
            for call, args in zip(calls, gathered, strict=True)
        ]
        of_all = {} if into is None else {"sums": into.type(calls[0].operands.accum)}
        for name in cls.appended_results:
            types = [of_table.pop(name) for of_table in results]
            of_all[name] = jax.ShapeDtypeStruct((len(types),), types[0].dtype)
        attributes = [call.attributes_of_many(axes) for call in calls]
        by_table = () if wide is None else wide.columns
        for of_table, columns in zip(attributes, by_table, strict=False):
            of_table["features"] = np.int64(len(columns))
        columns = [column for own_columns in by_table for column in own_columns]
        found, of_each = native_tables_call(
            calls[0].platform,
            f"{cls.kind}tables_{cls.op}",
            (shared, gathered),
            (of_all, results),
            cls.workspace(calls, gathered, len(columns)),
            attributes,
            {"columns": np.asarray(columns, np.int64)} if cls.in_columns else {},
        )
        summed = [
            call.summed(results, args, axes)
            for call, results, args in zip(calls, of_each, given, strict=True)
        ]
        return found, summed

    def local(self, args: Named, split: Split) -> Named:
        """The results of the call on one table, as `over_blocks` wants them."""
        if split.of:
            return self.on_shard(split.of).local(args, Split(split.axes))
        given = self.gathered(args, split.axes)
        found = native_call(
            self.platform,
            f"{self.kind}{self.op}",
            given,
            self.results(given),
            self.workspace([self], [given], 0),
            self.attributes(split.axes),
        )
        return self.summed(found, args, split.axes)


def _with_attributes(kind: type[TableCall], _: None, attributes: Sequence[dict[str, Any]]) -> Any:
    call = object.__new__(kind)
    vars(call).update(*attributes)
    return call


class Calls(NamedTuple):
    """The calls of a kind of tables.

    Attributes:
        forward: takes what `TableCall` does; returns sums ``[S, nb, D]`` and residuals.
        backward: takes also the residuals and the gradient of the sums, which is None where one array has those of all
            tables; returns the gradients of the parameters and of the weights.
        update: takes the same; returns what `Table.stepped_params` does.
    """

    forward: type[Any]
    backward: type[Any]
    update: type[Any]


def run(calls: Sequence[Any], wide: Wide | None = None, shared: Named | None = None) -> Any:
    """What calls of the same op on each of several tables return, from one native call where the platform has it.

    Args:
        calls: on one table each, for one platform.
        wide: where their sums are in one array, if they are. Sums and their gradients are then no operands and results
            of the calls, and the result of a forward pass is that array.
        shared: operands of all tables.
    """
    (kind,) = {type(call) for call in calls}
    platform = calls[0].platform
    if platform not in kind.together_on or (len(calls) == 1 and wide is None):
        return [
            call.finished(
                over_blocks(
                    Partial(kind.local, call),
                    call.blocked,
                    call.whole,
                    call.blocked_results,
                    call.dimensions,
                    Partial(kind.describe, call),
                )
            )
            for call in calls
        ]
    appended = kind.appended
    shared = {} if shared is None else shared
    once = *appended, *shared

    def local(calls: Sequence[Any], args: Named, split: Split) -> Named:
        of_all = {name: args[name] for name in once}
        shards, of_kind = calls, kind
        if split.of:
            of_each_table = apart(split.of, len(calls))
            shards = [c.on_shard(axes) for c, axes in zip(calls, of_each_table, strict=True)]
            of_kind = type(shards[0])
        given = apart(args, len(calls))
        found, of_each = of_kind.of_tables(shards, given, of_all, split.axes, wide)
        return {**found, **together(of_each)}

    blocked = together(call.blocked for call in calls)
    own_whole = together(
        {name: array for name, array in call.whole.items() if name not in appended}
        for call in calls
    )
    of_all = {name: jnp.concatenate([call.whole[name] for call in calls]) for name in appended}
    whole = of_all | dict(shared) | own_whole
    results = together(dict.fromkeys(call.blocked_results) for call in calls)

    def dimensions() -> dict[str, Dimensions]:
        return {
            f"{k}/{array}": tuple(name and f"{k}/{name}" for name in named)
            for k, call in enumerate(calls)
            for array, named in call.dimensions().items()
        }

    def describe(calls: Sequence[Any], name: str) -> str:
        k, _, array = name.partition("/")
        return calls[int(k)].describe(array) if array else name

    found = over_blocks(
        Partial(local, calls),
        blocked,
        whole,
        list(results),
        dimensions,
        Partial(describe, calls),
    )
    if wide is not None and kind.op == "forward":
        return found["sums"]
    return [
        call.finished({**own, **{name: found[name][k] for name in kind.appended_results}})
        for k, (call, own) in enumerate(zip(calls, apart(found, len(calls)), strict=True))
    ]
