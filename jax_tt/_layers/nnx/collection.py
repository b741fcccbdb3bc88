"""`EmbedCollection` for NNX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_tt._base.arguments import mismatch
from jax_tt._base.keywords import ChecksKeywords, UnknownName
from jax_tt._collection.collection import Collection
from jax_tt._collection.feature import Feature
from jax_tt._collection.frozen import Frozen
from jax_tt._collection.insertion import grow_tables_if_full, insert_collection_keys
from jax_tt._collection.listing import listing
from jax_tt._collection.lookup_features import check_lookup
from jax_tt._collection.stacks import Stack
from jax_tt._collection.states import UPDATES, check_like
from jax_tt._collection.statistics import (
    STATISTICS,
    TOTALS,
    TableStatistics,
    init_totals,
    read_totals,
)
from jax_tt._collection.training_state import Described
from jax_tt._directories.hash_directory import KEYS
from jax_tt._ids.placement import Placement
from jax_tt._jax.reverse_only import refuse_gradient
from jax_tt._kinds.sharded.options import Exchange
from jax_tt._layers.call import (
    FeatureCalls,
    GivenState,
    check_value,
    for_evaluation,
    step_inputs,
)
from jax_tt._layers.nnx.module import (
    check_rngs,
    described_layer,
    hoisted_optimizer,
    read_state,
    set_in_call,
    variable_type,
    write_state,
)
from jax_tt._layers.nnx.stacks import RowsOfVariable, TablesOfStacks, described_stacks
from jax_tt._layers.nnx.table import TableEmbed
from jax_tt._layers.pretrained import replacements
from jax_tt._layers.variables import WHERE_FLAX_ALLOWS, FusedParam, LookupCounts, OutOfRange
from jax_tt._lookup.pooled_sums import OUT_OF_RANGE
from jax_tt._lookup.shared import SHARED, init_shared, is_shared
from jax_tt._ops.inserting import Inserted
from jax_tt._planning.shard_tables import over_mesh
from jax_tt._table.check import check_state
from jax_tt._table.copies import with_update, without_values
from jax_tt._table.options import DEFAULT_LOOKUP, Lookup
from jax_tt._table.parts_of_arrays import is_rows
from jax_tt._table.table import Table


class CollectedTable(TableEmbed):
    """A table of an `EmbedCollection`: its variables, and what can be done with it between steps.

    A call of it returns rows outside of losses; only calls of the collection update a table with an optimizer, and the
    collection has the counts of its steps.
    """

    def _scaled(self, table: Table) -> Table:
        return table

    def _call(
        self,
        op: Callable[..., Any],
        inputs: Any,
        grad_scale: Any,
        hyperparameters: Mapping[str, Any] | None,
    ) -> jax.Array:
        if not is_shared(self.table):
            return super()._call(op, inputs, grad_scale, hyperparameters)
        table, state, lookup, _ = self._begin(grad_scale, hyperparameters)
        message = (
            f"{table.ids.label}this table of a collection was called on its own in a loss; only calls of the "
            "collection update it."
        )
        params = {name: state[name] for name in table.spec.param_names}
        state |= dict(refuse_gradient(message, params))
        result, after = op(with_update(table, None), state, inputs, lookup)
        self._finish(state, after, lookup)
        return result


class TablesByName(dict[str, CollectedTable]):
    """The tables of an `EmbedCollection`: a dict whose errors say which names there are."""

    def __missing__(self, name: Any) -> CollectedTable:
        raise UnknownName("table", name, self)


def _flatten(tables: TablesByName) -> tuple[list[CollectedTable], tuple[str, ...]]:
    names = tuple(sorted(tables))  # as JAX does with a dict
    return [tables[name] for name in names], names


def _flatten_with_keys(
    tables: TablesByName,
) -> tuple[list[tuple[Any, CollectedTable]], tuple[str, ...]]:
    children, names = _flatten(tables)
    return list(zip(map(jax.tree_util.DictKey, names), children, strict=True)), names


def _unflatten(names: tuple[str, ...], children: Any) -> TablesByName:
    return TablesByName(zip(names, children, strict=True))


jax.tree_util.register_pytree_with_keys(TablesByName, _flatten_with_keys, _unflatten, _flatten)

# What a table in a stack has beside its rows: its description, and the options of its calls.
InStacks = Mapping[str, tuple[Table, Lookup]]


class EmbedCollection(FeatureCalls, ChecksKeywords, nnx.Module):
    """Many tables of any kinds, looked up by feature in one call.

    Dense tables and hash tables that are alike share variables, ``stacks[stack][array]``; the variables of another
    table are in ``tables[name]``, under the names that they have in a layer of that table alone (`EmbedBag`,
    `TTEmbedBag`). All tables with an optimizer share a sentinel, a flag ``used`` and one array of step counts, which
    are variables of the collection. `states` and `set_states` convert between these and layers of single tables, e.g.
    for checkpoints. All variables are by name: a state of the layer may be restored into one whose tables were given in
    another order.

    ``tables[name]`` also has the methods for row caches, for growth and for an order of ids, ``attend`` and ``top_k``;
    its attributes ``bounds``, ``method``, ``precision`` and ``axis_name`` may be set for this table alone.

    Args:
        tables: `Table` by name, e.g. of `dense_table` and `tt_table`. Those with an optimizer are updated in the
            backward pass, as `FusedOptimizer` describes; the parameters of the others have ordinary gradients.
        features: `Feature` by name. Those that share a table are looked up in it as one batch.
        lookup: options of the calls.
        mesh, axis, placement, exchange: devices, and how the rows of tables are sharded over them and travel, as in
            `jax_tt.shard_tables`.
            By default, tables are on one device, or on every device of a program.
        statistics: whether training calls count what they look up in every table, for `statistics`. It is counted in a
            variable `LookupCounts`.
        stack: which tables that are alike share variables, as in `jax_tt.Collection`, by default those with an
            optimizer; ``tables[name]`` is a `jax_tt.nnx.StackedTable` then. A step of many tables costs what its
            kernels cost, and not what the variables cost. Methods of a dense table that grow or reorder it take a layer
            with ``stack=False``.
        rngs: random number generators; every table takes one key of ``params``, in the order of ``tables``.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> adagrad = jax_tt.optimizers.RowWiseAdagrad(0.05)
        >>> embed = jax_tt.EmbedCollection(
        ...     {"user": jax_tt.dense_table(1000, 16, optimizer=adagrad), "ad": jax_tt.dense_table(50, 16)},
        ...     {"user_id": jax_tt.Feature("user"), "friends": jax_tt.Feature("user", combiner="mean"),
        ...      "shown": jax_tt.Feature("ad")},
        ...     rngs=nnx.Rngs(0),
        ... )
        >>> batch = {
        ...     "user_id": jnp.array([[7], [8]]),
        ...     "friends": jax_tt.Bags.from_ragged([[1, 2, 3], []]),
        ...     "shown": jnp.array([[4, 5], [6, 7]]),
        ... }
        >>> embed(batch)["friends"].shape, embed.concatenated(batch).shape, embed.stacked(batch).shape
        ((2, 16), (2, 48), (2, 3, 16))

        ``print`` lists the tables with their bytes:

        >>> print(embed)
        table     kind        optimizer        rows  columns   bytes  optimizer bytes
        user      DenseTable  RowWiseAdagrad  1,000       16  64,000            4,004
        ad        DenseTable                     50       16   3,200                0
        (shared)                                                   0                8
        all                                                   67,200            4,012

        Many tables in few variables:

        >>> tables = {f"t{k}": jax_tt.dense_table(100 + k, 16, optimizer=adagrad) for k in range(26)}
        >>> features = {name: jax_tt.Feature(name) for name in tables}
        >>> embed = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
        >>> [stack] = embed.stacks.values()
        >>> stack["embedding"].shape, embed.tables["t3"].embedding[...].shape
        ((2925, 16), (103, 16))
    """

    # An attribute of the layer takes its place where there are no stacks.
    tables: Any = TablesOfStacks()

    def __init__(
        self,
        tables: Mapping[str, Table],
        features: Mapping[str, Feature],
        lookup: Lookup = DEFAULT_LOOKUP,
        *,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] | None = None,
        placement: Placement | Mapping[str, Placement] | str | None = None,
        exchange: Exchange | Mapping[str, Exchange] | None = None,
        statistics: bool = False,
        stack: bool | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_lookup(lookup)
        check_rngs(rngs)
        static, variables = _hoisted(over_mesh(tables, mesh, axis, placement, exchange))
        described = Collection(static, features, stack)
        self.features: Any = described.features  # hashable
        # Flax sorts the names of tables when it takes the module apart.
        self._names, self._stack = tuple(described.tables), stack
        alone, states, held = TablesByName(), {}, {}
        for name, table in described.tables.items():
            if name in described.stack_of:
                states[name], held[name] = initial_rows(table, rngs), lookup
            else:
                own = {"rngs": rngs, "hyperparameters": variables[name]}
                alone[name] = CollectedTable(table, lookup, **own)
        stacks = {name: stack.joined(states) for name, stack in described.stacks.items()}
        stacks = variables_of(described.stacks, stacks)
        self._hold(described, alone, stacks, held, variables)
        if described.sharing:
            for name, value in init_shared(len(described.sharing)).items():
                setattr(self, name, FusedParam(value))
        self.counts: dict[str, LookupCounts] | None = None
        if statistics:
            totals = init_totals(self._names)
            self.counts = nnx.data({name: LookupCounts(value) for name, value in totals.items()})

    # Set by `model.eval()` and `model.train()`, for the tables in stacks.
    deterministic = False
    _in_stacks: InStacks | None = None
    # Those whose ids out of range have been counted, as a table alone has the count then.
    _counted: tuple[str, ...] = ()

    def _hold(
        self,
        described: Collection,
        alone: TablesByName,
        stacks: Mapping[str, Mapping[str, nnx.Variable[Any]]],
        lookups: Mapping[str, Lookup],
        hyperparameters: Mapping[str, Mapping[str, nnx.Variable[Any]]],
    ) -> None:
        """Keeps tables in modules, and in stacks those with ``lookups``."""
        counts = self._counts_out_of_range()
        for name in ("alone", "stacks", "tables", "hyperparameters", "out_of_range"):
            vars(self).pop(name, None)
        if not lookups:
            self.tables, self._in_stacks, self._counted = nnx.data(alone), None, ()
            return
        held = {name: (without_values(described.tables[name]), lookups[name]) for name in lookups}
        self._in_stacks = Frozen({name: held[name] for name in sorted(held)})
        self.alone, self.stacks = nnx.data(alone), nnx.data(dict(stacks))
        of_held = {name: dict(hyperparameters[name]) for name in held if hyperparameters.get(name)}
        self.hyperparameters = nnx.data(of_held)
        self._count_out_of_range(counts)

    def _hold_stacks(
        self,
        after: Collection,
        arrays: Mapping[str, Mapping[str, Any]],
        alone: TablesByName | None = None,
        lookups: Mapping[str, Lookup] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps other tables than before, whose stacks keep their variables where they are the same."""
        before, held = self.collection.stacks, self._in_stacks or {}
        kept = {n: self.stacks[n] for n, one in after.stacks.items() if one == before.get(n)}
        changed = {name: one for name, one in after.stacks.items() if name not in kept}
        self._hold(
            after,
            self.alone if alone is None else alone,
            kept | variables_of(changed, arrays),
            {name: lookup for name, (_, lookup) in held.items()} if lookups is None else lookups,
            self.hyperparameters if hyperparameters is None else hyperparameters,
        )

    def _counts_out_of_range(self) -> dict[str, jax.Array]:
        """The counts so far of the tables in stacks that have one."""
        if not self._counted or self._in_stacks is None:
            return {}
        counts = zip(self._in_stacks, self.out_of_range[...], strict=True)
        return {name: count for name, count in counts if name in self._counted}

    def _count_out_of_range(self, counts: Mapping[str, Any]) -> None:
        """Keeps the variable of the counts where ids out of range are counted."""
        held = self._in_stacks or {}
        warned = {name for name, (_, lookup) in held.items() if lookup.bounds == "warn"}
        self._counted = tuple(name for name in held if name in warned or name in counts)
        if self._counted and not hasattr(self, "out_of_range"):
            so_far = jnp.array([counts.get(name, 0) for name in held], jnp.int32)
            self.out_of_range = OutOfRange(so_far)

    def _set_in_stack(self, name: str, table: Table, lookup: Lookup) -> None:
        before = self._in_stacks or {}
        after = Frozen({**before, name: (table, lookup)})
        if table is not before[name][0]:
            self._described(after, name)
        self._in_stacks = after
        self._count_out_of_range(dict.fromkeys(self._counted, 0))

    def __str__(self) -> str:
        return listing(self.collection.tables, self._sizes())

    @property
    def nbytes(self) -> int:
        """Bytes of all tables: all that lookups need, without optimizer state."""
        return sum(size for size, _ in self._sizes().values())

    @property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer state of all tables with an optimizer."""
        return sum(size for _, size in self._sizes().values())

    def _sizes(self) -> dict[str, tuple[int, int]]:
        return self.collection.sizes(self.arrays())

    @property
    def collection(self) -> Collection:
        """The description of the tables, as they are now, and of the features."""
        return self._described({} if self._in_stacks is None else self._in_stacks)

    def _described(self, in_stacks: InStacks, changed: str | None = None) -> Collection:
        tables = {name: part.table for name, part in self._parts.items()}
        tables |= {name: table for name, (table, _) in in_stacks.items()}
        in_order = tuple((name, tables[name]) for name in self._names)
        described = _collection(in_order, self.features, self._stack)
        if set(described.stacks) != (set() if self._in_stacks is None else set(self.stacks)):
            moved = [name for name in described.stack_of if name not in in_stacks]
            update = tables[changed or moved[0]].update
            label = f"{changed or ' or '.join(moved)}: optimizer"
            expected = "one of the same class as before, by which tables share arrays"
            fix = "Build the layer with stack=False to change it."
            raise mismatch(label, update and update.optimizer, expected, fix)
        return described

    @property
    def steps(self) -> Mapping[str, RowsOfVariable]:
        """The number of updates of every table with an optimizer, read and written as ``steps[name][...]``.

        A table with a row cache has its own, ``tables[name].step``.
        """
        sharing, steps = self.collection.sharing, getattr(self, "step", None)
        return Frozen({name: RowsOfVariable(steps, k) for k, name in enumerate(sharing)}, "table")

    @property
    def host_batch(self) -> Callable[..., Any]:
        """Prepares what data loaders give for a step: ``host_batch(batch, capacity=None, sharding=None, local=False)``.

        It calls `jax_tt.Collection.host_batch`. Ids out of range are treated as the ``bounds`` of every table say. As
        `TableEmbed.host_batch`, it has the descriptions of the tables and none of their arrays.
        """
        return functools.partial(self.collection.host_batch, bounds=bounds_of(self))

    def insert(
        self,
        batch: Any,
        *,
        scores: Mapping[str, Any] | None = None,
        epoch: Any = None,
        return_evicted: bool = False,
    ) -> dict[str, Inserted]:
        """Finds or inserts the keys of a batch in all hash tables; see `jax_tt.dynamic.insert`.

        A training call does so by itself. Call this before it, outside of the loss, for what `Inserted` tells, or for
        scores and epochs, and look up `jax_tt.dynamic.with_slots` of the batch.

        Returns:
            `Inserted` by hash table.
        """
        collection, state = self.collection, self.arrays()
        options = {"scores": scores, "epoch": epoch, "return_evicted": return_evicted}
        inserted, after = insert_collection_keys(
            collection, state, batch, bounds=bounds_of(self), **options
        )
        for name, layer in self._parts.items():
            write_state(layer, state[name], after[name])
        self._write_stacks(state, after, next(iter(inserted), ""))
        return inserted

    def grow_if_full(
        self,
        *,
        max_load: float = 0.75,
        opt: nnx.Optimizer[Any] | None = None,
        model: nnx.Module | None = None,
    ) -> tuple[str, ...]:
        """Doubles the capacity of hash tables whose load exceeds a limit; see `jax_tt.dynamic.grow_if_full`.

        Args:
            max_load: the share of occupied slots above which a table grows.
            opt, model: as in `jax_tt.TTEmbed.reorder`, for tables without a fused optimizer.

        Returns:
            The names of the tables that have grown.
        """
        model = self if model is None else model
        # Before the others: it may refuse, and changes nothing then.
        in_stacks = [n for n, (table, _) in (self._in_stacks or {}).items() if table.ids.takes_keys]
        grown = self._grow_in_stacks(in_stacks, max_load)
        for name, part in self._parts.items():
            if part.table.ids.takes_keys and part.grow_if_full(
                max_load=max_load, opt=opt, model=model
            ):
                grown.append(name)
        return tuple(name for name in self._names if name in grown)

    def _grow_in_stacks(self, names: Sequence[str], max_load: float) -> list[str]:
        before = self.collection
        after, arrays = grow_tables_if_full(before, self.arrays(), names, max_load, "auto")
        if after is not before:
            self._hold_stacks(after, arrays)
        return [name for name in names if after.tables[name] != before.tables[name]]

    def statistics(self) -> dict[str, TableStatistics]:
        """What training calls have looked up, by table. Blocks until the device is done.

        Raises:
            ValueError: the layer was built with ``statistics=False``.

        Example:
            >>> import jax.numpy as jnp, jax_tt
            >>> from flax import nnx
            >>> tables, features = {"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")}
            >>> embed = jax_tt.EmbedCollection(tables, features, statistics=True, rngs=nnx.Rngs(0))
            >>> rows = embed({"ad": jnp.array([[3, 3, 4]])})
            >>> embed.statistics()["ad"]
            TableStatistics(requests=3, unique=2, out_of_range=0, cache_hits=None)
        """
        if self.counts is None:
            raise mismatch("statistics", "a layer that counts nothing", "one with statistics=True")
        totals = {name: self.counts[name][...] for name in self._names}
        return read_totals(self.collection.tables, totals)

    def states(self) -> dict[str, dict[str, jax.Array]]:
        """The arrays of every table under the names of a layer of that table alone, e.g. for checkpoints.

        Example:
            >>> import jax_tt
            >>> from flax import nnx
            >>> table = jax_tt.dense_table(50, 8, optimizer=jax_tt.optimizers.SGD(0.1))
            >>> embed = jax_tt.EmbedCollection({"ad": table}, {"ad": jax_tt.Feature("ad")}, rngs=nnx.Rngs(0))
            >>> sorted(embed.states()["ad"])
            ['embedding', 'sentinel', 'step', 'used']
        """
        return self.collection.separated(self.arrays())

    def set_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Overwrites the arrays of all tables with the arrays of other layers or collections, as `states` returns them.

        Arrays are not copied: after a step that donates them, the other layer does not have them any more.

        Raises:
            TypeError, ValueError: ``states`` lack a table or an array, or its shape is another. The variables are
                unchanged then.
        """
        state = self.collection.joined(states)
        for name, layer in self._parts.items():
            check_state(layer.table, state[name])
            check_like(f"states[{name!r}]", state[name], read_state(layer))
        write_arrays(self, state)

    def replaced(self, tables: Mapping[str, Any]) -> EmbedCollection:
        """The layer with other tables in place of some, e.g. compressed ones for serving.

        The other tables share their variables with this layer, but for those of a stack that is not the same without
        the tables that are replaced: what trains one changes the other. A layer of its own is
        ``nnx.merge(graphdef, jax.tree.map(jnp.copy, state))``, where ``graphdef, state = nnx.split(layer)``. Those of
        ``nnx.clone`` share arrays, and a step that donates the arrays of one deletes those of the other.

        Args:
            tables: by name, each of them what `TableEmbed.from_pretrained` takes: the result of `compress`, a table
                with its state, or the path of a file with one table or one of this name. It has as many rows and
                columns as the table that it replaces, and no optimizer.

        Raises:
            FileError: a file cannot be read, or holds no such table.
            TypeError, ValueError: a table does not exist, or does not fit.

        Example:
            >>> import jax.numpy as jnp, jax_tt
            >>> from flax import nnx
            >>> tables, features = {"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")}
            >>> embed = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
            >>> result = jax_tt.compress(
            ...     embed.arrays()["ad"]["embedding"], kind="quantized", max_bytes=600, progress=False
            ... )
            >>> served = embed.replaced({"ad": result})
            >>> served.tables["ad"].table.bits, served({"ad": jnp.array([[3, 4]])})["ad"].shape
            (8, (1, 8))
        """
        before = self.collection
        pairs = replacements(before.tables, tables)
        after, arrays = before.with_tables(self.arrays(), pairs)
        layer: Any = nnx.merge(*nnx.split(self))
        alone, lookups, hyperparameters = TablesByName(), {}, {}
        for name, old in layer.tables.items():
            if name not in pairs:
                hyperparameters[name] = old.hyperparameters
            if name in after.stack_of:
                lookups[name] = old.lookup
            elif name in pairs or name in before.stack_of:
                own = {"given": GivenState(arrays[name]), "rngs": nnx.Rngs(0)}
                own["hyperparameters"] = hyperparameters.get(name, {})
                alone[name] = CollectedTable(after.tables[name], old.lookup, **own)
                alone[name].deterministic = old.deterministic
            else:
                alone[name] = old
        layer._hold_stacks(after, arrays, alone, lookups, hyperparameters)
        if not after.sharing and before.sharing:
            for name in SHARED:
                delattr(layer, name)
        elif after.sharing != before.sharing:
            layer.step = FusedParam(arrays[UPDATES]["step"])
        return layer

    def arrays(self) -> dict[str, dict[str, jax.Array]]:
        """The arrays by table and name: the state that ``collection`` and functions of a collection take."""
        state: dict[str, Any] = {
            name: {array: variable[...] for array, variable in held.items()}
            for name, held in (self.stacks.items() if self._in_stacks is not None else ())
        }
        parts = self._parts
        state |= {name: read_state(parts[name]) for name in self._names if name in parts}
        return state | self._shared({})

    _inserts = True

    @property
    def _parts(self) -> dict[str, CollectedTable]:
        return self.tables if self._in_stacks is None else self.alone

    def _begin_stacks(self, arguments: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        state: dict[str, Any] = {}
        lookups: dict[str, Lookup] = {}
        inputs: dict[str, Any] = {}
        if self._in_stacks is None:
            return state, lookups, inputs
        collection, arrays = self.collection, self.arrays()
        for k, (name, (table, lookup)) in enumerate(self._in_stacks.items()):
            variables = self.hyperparameters.get(name, {})
            fields = {field: variable.get_value() for field, variable in variables.items()}
            grad_scale, given = arguments[name]
            inputs[name] = step_inputs(table, grad_scale, given, fields)
            lookups[name] = for_evaluation(lookup) if self.deterministic else lookup
            state[name] = collection.rows_of(arrays, name)
            if lookups[name].train and lookup.bounds == "warn":
                state[name][OUT_OF_RANGE] = self.out_of_range[...][k]
        return state, lookups, inputs

    def _write_stacks(
        self, before: Mapping[str, Any], after: Mapping[str, Any], table: str
    ) -> None:
        """Sets the variables of stacks whose arrays differ between two states; errors name a table."""
        for name, held in self.stacks.items() if self._in_stacks is not None else ():
            for array, variable in held.items():
                if after[name][array] is not before[name][array]:
                    set_in_call(f"{table}: {array}", variable, after[name][array])

    def _finish_stacks(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        held = [*(self._in_stacks or ())]
        inserted = [n for n in held if _changed(before[n].get(KEYS[2]), after[n].get(KEYS[2]))]
        if inserted:
            arrays = changed = self.arrays()
            for stack in self.collection.stacks.values():
                if not stack.tables.keys().isdisjoint(inserted):
                    own = {n: {name: after[n][name] for name in stack.arrays} for n in stack.tables}
                    changed = {**changed, stack.name: stack.joined(own)}
            self._write_stacks(arrays, changed, inserted[0])
        counted = [OUT_OF_RANGE in before[name] for name in held]
        if not any(counted):
            return
        with WHERE_FLAX_ALLOWS:
            old = self.out_of_range[...]
            new = [
                after[name][OUT_OF_RANGE] if counts else old[k]
                for k, (name, counts) in enumerate(zip(held, counted, strict=True))
            ]
            self.out_of_range.set_value(jnp.stack(new))

    def _shared(self, lookups: Mapping[str, Lookup]) -> dict[str, dict[str, Any]]:
        """What a state has beside the tables in a call with these options."""
        shared: dict[str, Any] = {}
        if hasattr(self, "step"):
            shared[UPDATES] = {name: getattr(self, name)[...] for name in SHARED}
        if self.counts is not None and any(lookup.train for lookup in lookups.values()):
            shared[STATISTICS] = {TOTALS: {name: self.counts[name][...] for name in self._names}}
        return shared

    def _count(self, totals: Mapping[str, jax.Array]) -> None:
        with WHERE_FLAX_ALLOWS:
            for name, counts in (self.counts or {}).items():
                counts.set_value(totals[name])


def _changed(x: Any, y: Any) -> bool:
    return x is not y and not (is_rows(x) and is_rows(y) and x.array is y.array)


def variables_of(
    stacks: Mapping[str, Stack], arrays: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, nnx.Variable[Any]]]:
    """The variables of stacks with these arrays."""
    firsts = {name: next(iter(stack.tables.values())) for name, stack in stacks.items()}
    return {
        name: {array: variable_type(table, array)(value) for array, value in arrays[name].items()}
        for name, table in firsts.items()
    }


def initial_rows(table: Table, rngs: nnx.Rngs) -> dict[str, jax.Array]:
    """The initial arrays of a table that is to be in a stack."""
    params = table.init_params(rngs.params())
    for name, value in params.items():
        check_value(name, value, table.spec.param_shapes[name])
    return {**params, **table.init_rest(params)}


def bounds_of(embed: EmbedCollection) -> dict[str, str]:
    """The ``bounds`` of every table."""
    return {name: table.lookup.bounds for name, table in embed.tables.items()}


def write_arrays(embed: EmbedCollection, arrays: Mapping[str, Mapping[str, Any]]) -> None:
    """Overwrites all arrays of a layer with such arrays as `EmbedCollection.arrays` returns, without a copy."""
    for name, table in embed._parts.items():
        for array in read_state(table):
            getattr(table, array).set_value(arrays[name][array])
    for name, held in embed.stacks.items() if embed._in_stacks is not None else ():
        for array, variable in held.items():
            variable.set_value(arrays[name][array])
    for name, value in arrays.get(UPDATES, {}).items():
        getattr(embed, name).set_value(value)


@described_layer.register
def _(layer: EmbedCollection) -> Described:
    return described_stacks(layer)


def _hoisted(tables: Any) -> tuple[Any, dict[str, dict[str, nnx.Variable[Any]]]]:
    """The tables with static optimizers, and the variables that were fields of these, by table and name."""
    if not isinstance(tables, Mapping):
        return tables, {}  # which `Collection` refuses, as it does other values than tables
    static = dict(tables)
    variables: dict[str, dict[str, nnx.Variable[Any]]] = {name: {} for name in tables}
    for name, table in tables.items():
        if not isinstance(table, Table):
            return tables, {}
        old = table.update
        if old is not None:
            optimizer, variables[name] = hoisted_optimizer(old.optimizer)
            static[name] = with_update(table, dataclasses.replace(old, optimizer=optimizer))
    return static, variables


@functools.lru_cache(maxsize=64)
def _collection(
    tables: tuple[tuple[str, Table], ...], features: Any, stack: bool | None
) -> Collection:
    return Collection(dict(tables), features, stack)
