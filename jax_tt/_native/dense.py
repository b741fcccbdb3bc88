"""Dense-table ops on the native kernels, of one table or of many in one call."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._lookup._batch import Batch
from jax_tt._lookup._vma import all_shards, own_shard
from jax_tt._native._call import (
    Named,
    apart,
    native,
    native_call,
    numbered,
    together,
    types_of,
)
from jax_tt._native._operands import (
    lookup_attributes,
    make_operands,
    sentinel_operand,
    step_operands,
    update_attributes,
    weights_result,
)
from jax_tt._native.partition import Arrays, over_blocks
from jax_tt._tables.options import Lookup

if TYPE_CHECKING:
    from jax_tt._lookup._wide import Wide
    from jax_tt._tables.dense import DenseTable

Types = Mapping[str, jax.ShapeDtypeStruct]


class DenseCall(abc.ABC):
    """The call of an op on one table, or the part of one table in a call on many.

    Attributes:
        op: name of the op.
        blocked, whole: arrays as in `over_blocks`; together they are the operands in the order of the target.
        blocked_results: as in `over_blocks`.
        appended, appended_results: names of ``whole`` arrays and of results that follow each other, of all tables, in
            one array each in a call on many tables.
    """

    op: ClassVar[str]
    blocked_results: ClassVar[tuple[str, ...]]
    appended: ClassVar[tuple[str, ...]] = ()
    appended_results: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, table: DenseTable, platform: str, rows: jax.Array, batch: Batch, lookup: Lookup
    ):
        self.table, self.platform, self.batch, self.lookup = table, platform, batch, lookup
        self.operands = make_operands(table, rows.dtype, batch)
        self.blocked: dict[str, jax.Array] = dict(self.operands.arrays)
        self.whole: dict[str, jax.Array] = {"rows": rows}

    @abc.abstractmethod
    def results(self, args: Named) -> Types:
        """Types of the results for the blocks of one device."""

    def gathered(self, args: Named, axes: Any) -> Named:
        """The operands on a device that has a share of the blocks."""
        del axes
        return args

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        """The results of all devices from those of one."""
        del args, axes
        return found

    def attributes(self, axes: Any) -> dict[str, Any]:
        return lookup_attributes(self.platform, self.table, self.batch, self.lookup, axes)


class Forward(DenseCall):
    op = "forward"
    blocked_results = ("out",)

    def __init__(self, *of_all: Any, sentinel: jax.Array | None):
        super().__init__(*of_all)
        self.whole = {"sentinel": sentinel_operand(sentinel), **self.whole}

    def results(self, args: Named) -> Types:
        return {"out": self.operands.sums_type(args["ids"], self.table.features)}

    def finished(self, found: Named) -> tuple[jax.Array, Arrays]:
        """Sums and residuals."""
        out, operands = found["out"], self.operands
        sums = out.reshape(operands.groups, operands.bags, self.table.features)
        # The forward result only orders the update after the forward pass; otherwise XLA would copy the table.
        return sums, (out,) if self.lookup.wanted.names else ()


class Backward(DenseCall):
    op = "backward"
    blocked_results = ("dweights",)

    def __init__(self, *of_all: Any, g: jax.Array | None):
        super().__init__(*of_all)
        if g is not None:
            self.blocked |= self.operands.gradient(g)

    def results(self, args: Named) -> Types:
        return {
            "dweights": self.operands.weights_type(args["ids"], self.lookup.wanted.weights),
            "drows": jax.ShapeDtypeStruct(self.whole["rows"].shape, self.operands.accum),
        }

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        return {**found, "drows": lax.psum(found["drows"], axes)} if axes else found

    def finished(self, found: Named) -> tuple[Arrays, jax.Array | None]:
        """Gradients of the parameters and of the weights."""
        return (found["drows"],), weights_result(self.batch, found["dweights"], self.lookup)


class Update(DenseCall):
    op = "update"
    blocked_results = ("dweights",)
    appended = ("hyper", "scale", "seed")
    appended_results = ("applied",)

    def __init__(
        self, *of_all: Any, slots: Arrays, out: jax.Array, g: jax.Array | None, values: Named
    ):
        super().__init__(*of_all)
        if g is not None:
            self.blocked = {"out": out, **self.blocked, **self.operands.gradient(g)}
        self.changed = numbered("table", (self.whole["rows"], *slots))
        self.whole = step_operands(values) | self.changed

    def gathered(self, args: Named, axes: Any) -> Named:
        axes = self.lookup.axis_name or axes
        if not axes:
            return args
        # Every replica applies the update of the whole batch: ids and output gradients are smaller than a table.
        gathered = {name: all_shards(args[name], axes) for name in self.blocked if name != "out"}
        first = lax.psum(args["out"].reshape(-1)[:1], axes)  # to run after the forward pass
        return {**args, **gathered, "out": first}

    def results(self, args: Named) -> Types:
        return {
            "applied": jax.ShapeDtypeStruct((), jnp.float32),
            "dweights": self.operands.weights_type(args["ids"], self.lookup.wanted.weights),
            **types_of(self.changed),
        }

    def attributes(self, axes: Any) -> dict[str, Any]:
        assert self.table.update is not None
        update = update_attributes(self.table.update, self.changed["table_0"].dtype)
        return super().attributes(self.lookup.axis_name or axes) | update

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        axes = self.lookup.axis_name or axes
        if not axes:
            return found
        own = own_shard(found["dweights"], args["ids"].shape[0], axes)
        return {**found, "dweights": own}

    def finished(
        self, found: Named
    ) -> tuple[Arrays, tuple[Arrays, ...], jax.Array, jax.Array | None]:
        """New parameters and slots, whether the step was applied, and the gradient of the weights."""
        dweights = weights_result(self.batch, found["dweights"], self.lookup)
        rows, *slots = (found[name] for name in self.changed)
        return (rows,), (tuple(slots),), found["applied"], dweights


def run(call: Any) -> Any:
    """The results of a call on one table."""

    def local(args: Named, axes: Any) -> Named:
        given = call.gathered(args, axes)
        found = native_call(
            call.platform,
            f"dense_{call.op}",
            given,
            call.results(given),
            _workspace([call], [given]),
            call.attributes(axes),
        )
        return call.summed(found, args, axes)

    return call.finished(over_blocks(local, call.blocked, call.whole, call.blocked_results))


def run_together(
    calls: Sequence[Any], wide: Wide | None = None, shared: Named | None = None
) -> Any:
    """The results of calls of the same op on several tables, from one native call.

    Args:
        calls: on one table each, for one platform.
        wide: where their sums are in one array, if they are. Sums and their gradients are then no operands and results
            of the calls, and the result of a forward pass is that array.
        shared: operands of all tables.
    """
    (kind,) = {type(call) for call in calls}
    op, appended = kind.op, kind.appended
    shared = {} if shared is None else shared
    into = wide if op == "forward" else None

    def local(args: Named, axes: Any) -> Named:
        own = list(zip(calls, apart(args, len(calls)), strict=True))
        given = [call.gathered(these, axes) for call, these in own]
        results: list[dict[str, Any]] = [
            dict(call.results(these)) if into is None else {}
            for call, these in zip(calls, given, strict=True)
        ]
        of_all = {} if into is None else {"sums": into.type(calls[0].operands.accum)}
        for name in kind.appended_results:
            types = [of_table.pop(name) for of_table in results]
            of_all[name] = jax.ShapeDtypeStruct((len(types),), types[0].dtype)
        attributes: dict[str, Any] = {str(k): call.attributes(axes) for k, call in enumerate(calls)}
        by_table = () if wide is None else wide.columns
        for k, own_columns in enumerate(by_table):
            attributes[str(k)]["features"] = np.int64(len(own_columns))
        columns = [column for own_columns in by_table for column in own_columns]
        attributes["columns"] = np.asarray(columns, np.int64)
        found = native_call(
            calls[0].platform,
            f"dense_tables_{op}",
            {name: args[name] for name in (*appended, *shared)} | together(given),
            of_all | together(results),
            _workspace(calls, given, len(columns)),
            attributes,
        )
        summed = together(
            call.summed(results, these, axes)
            for (call, these), results in zip(own, apart(found, len(calls)), strict=True)
        )
        return {name: found[name] for name in of_all} | summed

    blocked = together(call.blocked for call in calls)
    own_whole = together(
        {name: array for name, array in call.whole.items() if name not in appended}
        for call in calls
    )
    of_all = {name: jnp.concatenate([call.whole[name] for call in calls]) for name in appended}
    whole = of_all | dict(shared) | own_whole
    results = together(dict.fromkeys(call.blocked_results) for call in calls)
    found = over_blocks(local, blocked, whole, list(results))
    if into is not None:
        return found["sums"]
    return [
        call.finished({**own, **{name: found[name][k] for name in kind.appended_results}})
        for k, (call, own) in enumerate(zip(calls, apart(found, len(calls)), strict=True))
    ]


def _workspace(calls: Sequence[Any], given: Sequence[Named], columns: int = 0) -> int | None:
    """Bytes of working memory for one native call with these operands.

    Args:
        columns: of the array that has the sums of all features, if there is one.
    """
    platform = calls[0].platform
    if platform == "cpu":
        return None
    return native(platform).dense_workspace_size(
        calls[0].op,
        [call.table.num_embeddings for call in calls],
        [call.table.features for call in calls],
        [math.prod(args["ids"].shape[:2]) for args in given],
        columns,
    )


def dense_forward(
    table: DenseTable,
    platform: str,
    params: Arrays,
    batch: Batch,
    lookup: Lookup,
    sentinel: jax.Array | None,
) -> tuple[jax.Array, Arrays]:
    return run(Forward(table, platform, *params, batch, lookup, sentinel=sentinel))


def dense_backward(
    table: DenseTable,
    platform: str,
    params: Arrays,
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    lookup: Lookup,
) -> tuple[Arrays, jax.Array | None]:
    del residuals
    return run(Backward(table, platform, *params, batch, lookup, g=g))


def dense_update(
    table: DenseTable,
    platform: str,
    arrays: tuple[Arrays, tuple[Arrays, ...]],
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    lookup: Lookup,
    values: Named,
) -> tuple[Arrays, tuple[Arrays, ...], jax.Array, jax.Array | None]:
    (params, (slots,)), (out,) = arrays, residuals
    return run(
        Update(table, platform, *params, batch, lookup, slots=slots, out=out, g=g, values=values)
    )
