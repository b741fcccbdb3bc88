"""`TableCall`: the part of one table in the call of a native op, and `run`, the call on any number of tables."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import Partial

from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.call import (
    BAGS,
    ROWS,
    Named,
    Types,
    flatten_tables,
    native_call,
    numbered,
    once_each,
    owners_of,
    part_of,
    types_of,
    unflatten_tables,
)
from jax_tt._native.operands import hyper_operand, joined, lookup_attributes, make_operands
from jax_tt._native.partition import Arrays, Dimensions, Split, is_partitioned, over_blocks
from jax_tt._table import reference
from jax_tt._table.groups import Call
from jax_tt._table.parts_of_arrays import Key, Part, is_rows

if TYPE_CHECKING:
    from jax_tt._table.concat_layout import ConcatLayout


class TableCall(abc.ABC):
    """The part of one table in the call of a native op, which takes any number of tables of a kind.

    Attributes:
        kind: what the names of the ops begin with.
        op: the rest of the name.
        in_columns: whether the op can have the sums of all tables, or their gradients, in one array.
        takes_parts: whether operands may be a `Part` of arrays that several tables share.
        most_arrays: about how many arrays one call may change in place. XLA takes time to compile it with the cube of
            their number.
        blocked, whole: arrays as in `over_blocks`; together they are the operands in the order of the target.
        blocked_results: as in `over_blocks`.
        appended: arrays that follow each other, of all tables, in one array each, before all other operands.
        appended_results: names of results that do so.
        communicates: whether devices exchange operands or results, by `gathered` and `summed`.
        over: the mesh axes that the table is sharded over, if this is the call on a shard.
        of_shard: the attributes that differ from those of the call on the whole table.
        has_parts: whether operands are parts of arrays.
        of_parts: the attributes of these operands.
    """

    kind: ClassVar[str]
    op: ClassVar[str]
    in_columns: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = False
    most_arrays: ClassVar[int]
    blocked_results: ClassVar[tuple[str, ...]]
    appended_results: ClassVar[tuple[str, ...]] = ()
    communicates: bool = True
    over: tuple[str, ...] = ()
    of_shard: Mapping[str, Any] = MappingProxyType({})
    of_parts: Mapping[str, Any] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        """Makes calls trees of their attributes, for `types_in`."""
        super().__init_subclass__()
        jax.tree_util.register_pytree_node(cls, cls._flattened, cls._unflattened)

    def _flattened(self) -> tuple[list[Any], Any]:
        """The attributes of a call, and their names; of a dict, whose items JAX would sort, the values and keys."""
        given = vars(self)
        values = [list(x.values()) if isinstance(x, dict) else x for x in given.values()]
        return values, [(name, [*x] if isinstance(x, dict) else None) for name, x in given.items()]

    @classmethod
    def _unflattened(cls, names: Any, values: Sequence[Any]) -> Any:
        call = object.__new__(cls)
        for (name, keys), value in zip(names, values, strict=True):
            vars(call)[name] = value if keys is None else dict(zip(keys, value, strict=True))
        return call

    def __init__(self, platform: str, call: Call):
        self.table: Any = call.use.table
        self.platform, self.batch, self.lookup = platform, call.batch, call.use.lookup
        self.params = {name: call.state[name] for name in self.table.spec.param_names}
        first = self.params[self.table.spec.param_names[0]]
        self.storage = self.table.spec.storage(self.params)
        self.operands = make_operands(self.table, self.storage, call.batch, call.use.blocks)
        self.blocked: dict[str, Any] = dict(self.operands.arrays)
        self.has_parts = isinstance(first, Part)
        if call.flat is not None and self._takes_flat(self.has_parts):
            self.blocked |= call.flat
            self.has_parts = True
        self.whole: dict[str, jax.Array] = dict(self.params)
        self.appended: dict[str, jax.Array] = {}
        # What errors begin with: the function that was called, and the pass, unless it is the forward pass.
        self.caller = self.lookup.caller
        if self.op == "forward":
            sentinel = call.state.get("sentinel", jnp.ones((), jnp.float32))
            self.whole = {"sentinel": sentinel, **self.whole}
        else:
            self.caller = f"{self.op} of {self.caller}"

    def _takes_flat(self, stacked: bool) -> bool:
        """Whether the op cuts the bags out of those of many features itself, for which it reads offsets on the host."""
        if self.platform != "cpu" or not self.takes_parts or self.lookup.wanted.weights:
            return False
        # Stacks are whole on every device.
        return self.lookup.axis_name is None and (stacked or not is_partitioned())

    @abc.abstractmethod
    def results(self, args: Named) -> Types:
        """Types of the results for the blocks of one device."""

    @classmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int | None:
        """Bytes of working memory for one native call on a GPU on tables with these operands; None for a CPU.

        Args:
            calls: of one table each.
            given: their operands.
            columns: of the array that has the sums of all features, if there is one.
        """
        del calls, given, columns
        return None

    @abc.abstractmethod
    def finished(self, found: Named) -> Any:
        """What the op returns for the table, from its results."""

    def dimensions(self) -> dict[str, Dimensions]:
        """The named dimensions of arrays, as in `over_blocks`."""
        return {}

    def on_shard(self, axes: Mapping[str, tuple[str, ...]]) -> Self:
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

    @classmethod
    def of_shards(
        cls, shards: Sequence[Any], wide: ConcatLayout | None, args: Named, split: Split
    ) -> Named:
        """`of_tables` for the calls of `on_shard`."""
        return cls.of_tables(shards, wide, args, split)

    @classmethod
    def of_tables(
        cls, calls: Sequence[Any], wide: ConcatLayout | None, args: Named, split: Split
    ) -> Named:
        """What one native call returns of all tables, for `over_blocks`: the operands and results as in `run`."""
        if split.of:
            of_each = zip(calls, unflatten_tables(split.of, len(calls)), strict=True)
            shards = [call.on_shard(axes) for call, axes in of_each]
            return cls.of_shards(shards, wide, args, Split(split.axes))
        axes, into = split.axes, wide if cls.op == "forward" else None
        given = unflatten_tables(args, len(calls))
        gathered, results, attributes = [], [], {}
        for k, call in enumerate(calls):
            gathered.append(call.gathered(given[k], axes) if call.communicates else given[k])
            results.append(dict(call.results(gathered[k])) if into is None else {})
            attributes[str(k)] = call.attributes(axes or call.over) | call.of_shard | call.of_parts
        columns: list[int] = []
        for k, own_columns in enumerate(() if wide is None else wide.columns):
            attributes[str(k)]["features"] = np.int64(len(own_columns))
            columns += own_columns
        if cls.in_columns:
            attributes["columns"] = np.asarray(columns, np.int64)
        of_all = {} if into is None else {"sums": into.type(calls[0].operands.accum)}
        for name in cls.appended_results:
            types = [of_table.pop(name) for of_table in results]
            of_all[name] = jax.ShapeDtypeStruct((len(types),), types[0].dtype)
        platform = calls[0].platform
        # Native ops on a CPU allocate their memory themselves.
        workspace = None if platform == "cpu" else cls.workspace(calls, gathered, len(columns))
        found = native_call(
            platform,
            f"{cls.kind}{cls.op}",
            {name: array for name, array in args.items() if "/" not in name}
            | flatten_tables(gathered),
            of_all | flatten_tables(results),
            workspace,
            attributes | {"caller": calls[0].caller},
        )
        if not any(call.communicates for call in calls):
            return found
        summed = [
            call.summed(own, given[k], axes)
            for k, (call, own) in enumerate(
                zip(calls, unflatten_tables(found, len(calls)), strict=True)
            )
        ]
        return {name: found[name] for name in of_all} | flatten_tables(summed)


class ForwardPass(TableCall):
    """A forward pass, which returns sums ``[S, nb, D]`` and residuals."""

    op = "forward"
    communicates = False

    @staticmethod
    def in_jax(call: Call) -> jax.Array:
        """The sums without native ops."""
        table: Any = call.use.table
        params, sentinel = table.spec.params(call.state), call.state.get("sentinel")
        return reference.forward(table, params, call.batch, call.use.lookup, sentinel)

    def residuals(self, found: Named) -> Arrays:
        # The forward result only orders the update after the forward pass; otherwise XLA would copy the table.
        return (found["out"],)

    def finished(self, found: Named) -> tuple[jax.Array, Arrays]:
        operands = self.operands
        sums = found["out"].reshape(operands.groups, operands.bags, self.table.features)
        return sums, self.residuals(found) if self.lookup.wanted.names else ()


class GradientPass(TableCall):
    """What a backward pass and an update have in common.

    Both take residuals, the last of which is the result of the forward pass, and the gradient of the sums, which is
    None where one array has those of all tables.
    """

    blocked_results = ("dweights",)

    def __init__(self, platform: str, call: Call, residuals: Arrays, g: jax.Array | None):
        super().__init__(platform, call)
        if g is not None:
            self.blocked |= self.saved(residuals) | self.operands.gradient(g)

    def saved(self, residuals: Arrays) -> dict[str, jax.Array]:
        """The residuals that are operands of both."""
        del residuals
        return {}

    def weights_type(self, args: Named) -> jax.ShapeDtypeStruct:
        """Gradients of the weights of the blocks of this device; empty unless they are wanted."""
        operands = self.operands
        count = operands.positions // operands.blocks if self.lookup.wanted.weights else 0
        # The bags of many features are one block.
        blocks = args["ids"].shape[0] if "ids" in args else 1
        return jax.ShapeDtypeStruct((blocks, count), operands.accum)

    def weights_gradient(self, found: Named) -> jax.Array | None:
        wanted = self.lookup.wanted.weights
        return found["dweights"].reshape(self.batch.ids.shape[:2]) if wanted else None


class BackwardPass(GradientPass):
    """A backward pass, which returns the gradients of the parameters and of the weights."""

    op = "backward"

    @staticmethod
    def in_jax(call: Call, g: Any) -> Any:
        """The results without native ops."""
        table: Any = call.use.table
        params = table.spec.params(call.state)
        return reference.backward(table, params, call.batch, g, call.use.lookup)

    @staticmethod
    def varying(call: Call, gradients: Any, g: Any) -> Any:
        """Results, which JAX may take to be replicated, marked as varying where the operands do."""
        return vary_over(gradients, varying_axes(call.state, call.batch, g))

    def gradient_types(self, args: Named) -> Types:
        rows: dict[str, Any] = {
            name: array if is_rows(array) else args[name] for name, array in self.params.items()
        }
        return types_of({f"d{name}": x for name, x in rows.items()}, self.operands.accum)

    def results(self, args: Named) -> Types:
        return {"dweights": self.weights_type(args), **self.gradient_types(args)}

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        own = {name: found[name] for name in self.gradient_types(args)}
        return {"dweights": found["dweights"], **(lax.psum(own, axes) if axes else own)}

    def finished(self, found: Named) -> tuple[Arrays, jax.Array | None]:
        return tuple(found[f"d{name}"] for name in self.params), self.weights_gradient(found)


class UpdatePass(GradientPass):
    """A backward pass with the step of the optimizer, which returns what `Table.stepped_params` does."""

    op = "update"
    appended_results = ("applied",)

    def __init__(self, platform: str, call: Call, residuals: Arrays, g: jax.Array | None):
        super().__init__(platform, call, residuals, g)
        if g is not None:
            out = residuals[-1]
            if call.use.blocks is not None:
                out = out.reshape(self.operands.sums_type(call.use.blocks, out.shape[-1]).shape)
            self.blocked = {"out": out, **self.blocked}
        slots = self.table.spec.stepped_slots(call.state)
        self.slots = numbered("slot", itertools.chain.from_iterable(slots))
        self.changed = self.params | self.slots
        values, inverse = call.values, call.values["inv_scale"]
        hyper = hyper_operand(platform, self.table.update.optimizer, values["hyper"])
        scale = joined([inverse[None], values["allowed"].astype(inverse.dtype)[None]])
        self.whole = self.changed
        self.appended = {"hyper": hyper, "scale": scale, "seed": values["seed"]}

    @staticmethod
    def in_jax(call: Call, g: Any) -> Any:
        """The results without native ops."""
        table: Any = call.use.table
        return reference.update(table, call.state, call.batch, g, call.use.lookup, call.values)

    @staticmethod
    def varying(call: Call, after: Any, g: Any) -> Any:
        """As of a backward pass; the new values vary as the old ones do."""
        *new, dweights = after
        table = call.use.table
        arrays = table.spec.params(call.state), table.spec.stepped_slots(call.state)
        new = vary_over(new, varying_axes(arrays))
        return *new, vary_over(dweights, varying_axes(arrays, call.batch, g))

    def attributes(self, axes: Any) -> dict[str, Any]:
        update = self.table.update
        return super().attributes(axes) | {
            "optimizer": update.optimizer.kind,
            "skip_nonfinite": bool(update.skip_nonfinite),
            "stochastic_rounding": update.rounds_stochastically(self.storage),
        }

    def results(self, args: Named) -> Types:
        return {
            "applied": jax.ShapeDtypeStruct((), jnp.float32),
            "dweights": self.weights_type(args),
            # Rows in a stack are in the result of the table that has its arrays.
            **types_of({name: args[name] for name in self.changed if name in args}),
        }

    def finished(
        self, found: Named
    ) -> tuple[Arrays, tuple[Arrays, ...], jax.Array, jax.Array | None]:
        params = tuple(found[name] for name in self.params)
        rest = iter(found[name] for name in self.slots)
        slots = tuple(tuple(next(rest) for _ in names) for names in self.table.spec.stepped_names)
        return params, slots, found["applied"], self.weights_gradient(found)


class Calls(NamedTuple):
    """The calls of a kind of tables."""

    forward: type[ForwardPass]
    backward: type[BackwardPass]
    update: type[UpdatePass]


def run(calls: Sequence[Any], wide: ConcatLayout | None = None, shared: Named | None = None) -> Any:
    """What calls of the same op on each of several tables return, from one native call.

    Args:
        calls: of one table each, for one platform.
        wide: where their sums are in one array, if they are. Sums and their gradients are then no operands and results
            of the calls, and the result of a forward pass is that array.
        shared: operands of all tables.
    """
    (kind,) = {type(call) for call in calls}
    appended = [call.appended for call in calls]
    once = {name: joined([own[name] for own in appended]) for name in appended[0]}
    once |= shared or {}

    owners: Mapping[Key, int] = {}
    if True in [call.has_parts for call in calls]:
        owners = owners_of([(*call.blocked.values(), *call.whole.values()) for call in calls])
    blocked = flatten_tables(call.blocked for call in calls)
    whole = once | flatten_tables(call.whole for call in calls)
    if owners:
        blocked, whole = once_each(owners, blocked), once_each(owners, whole)
        for call in calls:
            call.of_parts = part_of(owners, call.whole.values(), ROWS)
            call.of_parts |= part_of(owners, call.blocked.values(), BAGS)
    results = flatten_tables(dict.fromkeys(call.blocked_results) for call in calls)

    def dimensions() -> dict[str, Dimensions]:
        return {
            f"{k}/{array}": tuple(name and f"{k}/{name}" for name in named)
            for k, call in enumerate(calls)
            for array, named in call.dimensions().items()
        }

    def describe(calls: Sequence[Any], name: str) -> str:
        k, _, array = name.partition("/")
        return f"{calls[int(k)].table.ids.label}{array}" if array else name

    found = over_blocks(
        Partial(kind.of_tables, calls, wide),
        blocked,
        whole,
        list(results),
        dimensions,
        Partial(describe, calls),
    )
    if wide is not None and kind.op == "forward":
        return found["sums"]
    each = unflatten_tables(found, len(calls))
    for k, call in enumerate(calls if owners else ()):
        for name, rows in call.whole.items():
            if isinstance(rows, Part) and name in each[owners[rows.key]]:
                after = dataclasses.replace(rows, array=found[f"{owners[rows.key]}/{name}"])
                each[k] = {**each[k], name: after}
    return [
        call.finished({**own, **{name: found[name][k] for name in kind.appended_results}})
        for k, (call, own) in enumerate(zip(calls, each, strict=True))
    ]
