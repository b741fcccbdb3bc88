"""`Collection`: the description of many tables and of the features that are looked up in them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.arguments import as_scalar, expect, instance_of, mismatch
from jax_tt._base.keywords import expect_names
from jax_tt._base.storage import require_arrays
from jax_tt._collection.feature import Feature
from jax_tt._collection.frozen import Frozen
from jax_tt._collection.host_batch import host_features
from jax_tt._collection.host_ids import Bounds
from jax_tt._collection.listing import listing
from jax_tt._collection.next_values import next_values
from jax_tt._collection.stacks import Stack, stacks_of
from jax_tt._collection.states import (
    UPDATES,
    bounds_by_table,
    check_arrays,
    check_replacements,
    check_shared,
    check_states,
    check_statistics,
    check_tables,
    initial_states,
    listed,
)
from jax_tt._collection.statistics import (
    STATISTICS,
    TOTALS,
    TableStatistics,
    check_countable,
    init_totals,
    read_totals,
)
from jax_tt._kinds.hashed.table import HashTable, unsharded_hash_table
from jax_tt._lookup.shared import SHARED, Shared, init_shared, is_shared
from jax_tt._table import checkpoint
from jax_tt._table.change import has_cache, maintain
from jax_tt._table.copies import freeze, with_name, with_update, without_values
from jax_tt._table.options import DEFAULT_BOUNDS, check_static
from jax_tt._table.parts_of_arrays import StackRows, taken
from jax_tt._table.sizes import sizes
from jax_tt._table.table import Table

# Bytes of the step of a table, and of each scalar that tables share.
_SCALAR = 4

# Arrays by table and name.
States = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Collection:
    """Tables of any kinds and sizes, and the features that are looked up in them in one call.

    It holds no arrays and can be a static argument of ``jit``. Its arrays are a dict of arrays by table or stack and
    name, as `init` returns them. The tables with an optimizer share one sentinel, one flag ``used`` and one array of
    step counts, which are in ``state["updates"]``; tables with a row cache keep theirs.

    Attributes:
        tables: `Table` by name, e.g. of `dense_table` and `tt_table`. A table with an optimizer is updated in the
            backward pass; the others have ordinary gradients.
        features: `Feature` by name. Features that share a table are looked up in it together, as one batch.
        stack: which tables share their arrays, one after another along the first axis. These are dense tables with the
            same width, types and class of optimizer, and hash tables that also have the same ways and policy. By
            default, tables without an optimizer share none; with True they do, and are one parameter together for optax
            then. With False, no table shares arrays. A program then has the arrays of a few tables,
            and costs less to call and to compile. ``stacks`` names the tables of each. The state has the arrays of a
            stack under its name; `of` returns the arrays of a table. What is computed is the same. The tables share in
            the order of their names, so that a state fits whatever order they are given in, and the name of a stack
            depends on the names and sizes of its tables, so that no state of others does.

    Raises:
        TypeError, ValueError: a feature has an unknown table, or a table has no feature.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> rule = jax_tt.optimizers.RowWiseAdagrad(0.05)
    >>> collection = jax_tt.Collection(
    ...     {"user": jax_tt.dense_table(1000, 16, optimizer=rule), "ad": jax_tt.dense_table(50, 8)},
    ...     {"user_id": jax_tt.Feature("user"), "shown": jax_tt.Feature("ad", combiner=None)},
    ... )
    >>> state = collection.init(jax.random.key(0))
    >>> state["ad"]["embedding"].shape
    (50, 8)

    ``print`` lists the tables. Bytes are those that lookups need, of one copy of the rows; optimizer bytes are beside
    them.

    >>> print(collection)
    table     kind        optimizer        rows  columns   bytes  optimizer bytes
    user      DenseTable  RowWiseAdagrad  1,000       16  64,000            4,004
    ad        DenseTable                     50        8   1,600                0
    (shared)                                                   0                8
    all                                                   65,600            4,012
    >>> collection.nbytes, collection.optimizer_nbytes
    (65600, 4012)

    Many tables in few arrays:

    >>> tables = {name: jax_tt.dense_table(rows, 16, optimizer=rule) for name, rows in [("user", 1000), ("ad", 50)]}
    >>> features = {name: jax_tt.Feature(name) for name in tables}
    >>> collection = jax_tt.Collection(tables, features)
    >>> state = collection.init(jax.random.key(0))
    >>> [name] = collection.stacks
    >>> jax.tree.map(jnp.shape, state[name])
    {'embedding': (1050, 16), 'slot_sum_0': (1050,)}
    >>> collection.of(state, "ad")["embedding"].shape
    (50, 16)
    """

    tables: Mapping[str, Table]
    features: Mapping[str, Feature]
    stack: bool | None = None

    def __post_init__(self) -> None:
        tables = _checked("tables", self.tables, Table, "jax_tt.dense_table(1000, 16)")
        features = _checked("features", self.features, Feature, 'jax_tt.Feature("item")')
        for name, feature in features.items():
            if feature.table not in tables:
                got = f"the table {feature.table!r}, which does not exist"
                raise mismatch(f"features[{name!r}]", got, f"one of {listed(tables)}")
        unused = tables.keys() - {feature.table for feature in features.values()}
        if unused:
            names = [name for name in tables if name in unused]
            raise ValueError(
                f"tables: no feature uses {listed(names)}; add one, e.g. features={{..., "
                f"{names[0]!r}: jax_tt.Feature({names[0]!r})}}, or leave the table out."
            )
        for name, table in tables.items():
            if table.update is not None:
                check_static(f"tables[{name!r}]: optimizer", table.update.optimizer)
        for name in (UPDATES, STATISTICS, *SHARED):
            if name in tables:
                got = f"the name {name!r}, which is reserved for arrays that all tables share"
                raise mismatch("tables", got, "another name")
        named = {name: with_name(_sharing(table), name) for name, table in tables.items()}
        if self.stack is not None:
            instance_of("stack", self.stack, bool, "True, False or None")
        object.__setattr__(self, "tables", Frozen(named, "table"))
        object.__setattr__(self, "features", Frozen(features, "feature"))

    def __str__(self) -> str:
        return listing(self.tables, self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables, as `Table` counts them: all that lookups need, without optimizer state."""
        return sum(size for size, _ in self._sizes.values())

    @property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer state of all tables."""
        return sum(size for _, size in self._sizes.values())

    @functools.cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        of_tables = {
            name: (table.nbytes, table.optimizer_nbytes + _SCALAR * (name in self.sharing))
            for name, table in self.tables.items()
        }
        return self._with_shared(of_tables)

    def _with_shared(self, of_tables: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        return of_tables | ({UPDATES: (0, _SCALAR * (len(SHARED) - 1))} if self.sharing else {})

    def sizes(self, state: States) -> dict[str, tuple[int, int]]:
        """Bytes of every table in a state and of its optimizer state, and of the scalars that tables share.

        >>> import jax, jax_tt
        >>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
        >>> collection.sizes(collection.init(jax.random.key(0)))
        {'ad': (1600, 0)}
        """
        states = self.rows_by_table(state)
        of_tables = {name: sizes(table.spec, states[name]) for name, table in self.tables.items()}
        for name in self.sharing:
            rows, steps = of_tables[name]
            of_tables[name] = rows, steps + _SCALAR
        return self._with_shared(of_tables)

    @functools.cached_property
    def stacks(self) -> Mapping[str, Stack]:
        """The tables that share arrays, by the name of the stack that has them."""
        if self.stack is False:
            return {}
        sharing = {n: t for n, t in self.tables.items() if self.stack or t.update is not None}
        return stacks_of(sharing)

    @functools.cached_property
    def stack_of(self) -> Mapping[str, Stack]:
        """The stack of each table that is in one."""
        return {name: stack for stack in self.stacks.values() for name in stack.tables}

    @functools.cached_property
    def alone(self) -> Mapping[str, Table]:
        """The tables with arrays of their own."""
        return {name: one for name, one in self.tables.items() if name not in self.stack_of}

    def of(self, state: States, table: str) -> dict[str, Any]:
        """The arrays of a table by name, and its step count if it has an optimizer; those in a stack are copied.

        Raises:
            TypeError, ValueError: ``state`` lacks an array, or there is no such table.
        """
        expect_names("table", "table", [table], self.tables)
        self.check(state)
        own = taken(self.rows_of(state, table))
        if table in self.sharing:
            own["step"] = state[UPDATES]["step"][..., self.sharing.index(table)]
        return own

    def rows_by_table(self, state: States) -> dict[str, dict[str, Any]]:
        """The arrays of every table by name, with `StackRows` in place of those in stacks."""
        self.check(state)
        return {name: self.rows_of(state, name) for name in self.tables}

    def rows_of(self, state: States, table: str) -> dict[str, Any]:
        """The arrays of one table, as `rows_by_table` has them; single entries of a stack on their own."""
        stack = self.stack_of.get(table)
        if stack is None:
            return dict(state[table])
        arrays, rows = state[stack.name], {}
        for name, shape in stack.shapes.items():
            array: Any = arrays.get(name)
            first, count = stack.places[name][table]
            # States of several models may be stacked along further axes.
            axis = getattr(array, "ndim", -1) - len(shape)
            if axis < 0 or array.shape[axis] != shape[0]:
                stack.check("state", arrays)
            rows[name] = (
                lax.index_in_dim(array, first, axis, keepdims=False)
                if count is None
                else StackRows(array, (stack.name, name), first, count, axis)
            )
        return rows

    def from_tables(self, states: States, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `rows_by_table`; ``shared`` is what the tables with an optimizer share, if there are any."""
        state: dict[str, Any] = {name: own.joined(states) for name, own in self.stacks.items()}
        state |= {name: taken(dict(states[name])) for name in self.alone}
        return state | ({UPDATES: dict(shared)} if self.sharing else {})

    def apart(self, state: States) -> dict[str, dict[str, Any]]:
        """`rows_by_table` with the step count of each table among its arrays, and the rest of a state beside them."""
        apart: dict[str, dict[str, Any]] = self.rows_by_table(state)
        apart |= {name: dict(state[name]) for name in (UPDATES, STATISTICS) if name in state}
        if self.sharing:
            steps = apart[UPDATES].pop("step")
            for k, name in enumerate(self.sharing):
                apart[name]["step"] = steps[..., k]
        return apart

    def together(self, apart: States) -> dict[str, dict[str, Any]]:
        """The inverse of `apart`."""
        shared = dict(apart.get(UPDATES, {}))
        if self.sharing:
            shared["step"] = jnp.stack([apart[name]["step"] for name in self.sharing], -1)
        counted = {name: dict(apart[name]) for name in apart if name == STATISTICS}
        return self.from_tables(self._without_scalars(apart), shared) | counted

    def host_batch(
        self,
        batch: Any,
        *,
        bounds: str | Mapping[str, str] = DEFAULT_BOUNDS,
        capacity: int | Mapping[str, int] | None = None,
        sharding: Any = None,
        local: bool = False,
    ) -> Any:
        """Prepares a batch, as a data loader gives it, for a compiled step; see `jax_tt.pipeline.host_batch`.

        It reads, checks and converts all features on the host, where 64-bit ids are still whole.

        Args:
            batch: a dict of all features, or `KeyedBags`. The value of a feature is what `pipeline.host_batch` takes:
                an array of integers ``[B, L]``, or ``[B]`` for one id per sample, nested lists, `Bags`, a dict such as
                ``{"ids": values, "lengths": lengths, "weights": weights}``, and strings where the table hashes. For a
                sequence it is integers of any shape, or bags.
            bounds: as in `jax_tt.pipeline.host_batch`, for all tables or by table.
            capacity: positions of the ragged bags, for all features or by feature, of `KeyedBags` for all together; by
                default the next power of two, of at least the number of bags.
            sharding, local: as in `jax_tt.pipeline.host_batch`; by default the mesh of the tables, if there is one.

        Returns:
            A dict by feature. `KeyedBags` stay `KeyedBags` where all ids are integers of one type.

        Raises:
            ImportError, RuntimeError, TypeError, ValueError: as `jax_tt.pipeline.host_batch`, or a feature is missing
                or unknown; the message names the feature, its table, and the first id out of range.

        >>> import jax_tt, numpy as np
        >>> collection = jax_tt.Collection(
        ...     {"item": jax_tt.hash_table(1024, 8), "ad": jax_tt.dense_table(50, 8)},
        ...     {"clicked": jax_tt.Feature("item"), "shown": jax_tt.Feature("ad")},
        ... )
        >>> batch = collection.host_batch({"clicked": [[2**40, 7], []], "shown": np.array([3, 4])})
        >>> batch["clicked"].ids.digits.tolist(), batch["shown"].tolist()
        ([[256, 0], [0, 7]], [[3], [4]])
        """
        named = {name: table.name for name, table in self.for_batches.items()}
        modes = bounds_by_table(bounds, named)
        how = {name: Bounds(modes[name], reported) for name, reported in named.items()}
        described = self.features, self.for_features, how
        return host_features(*described, batch, capacity, sharding, local)

    def init(self, key: jax.Array) -> dict[str, dict[str, Any]]:
        """Initial arrays by table and name, with a key of its own for every table."""
        states = initial_states(self.tables, jax.random.split(key, len(self.tables)))
        return self.from_tables(states, init_shared(len(self.sharing)))

    def trained(self, state: States) -> dict[str, dict[str, Any]]:
        """The arrays that a loss is differentiated with respect to.

        Raises:
            TypeError, ValueError: ``state`` lacks a table or an array.

        >>> import jax, jax_tt
        >>> tables, features = {"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")}
        >>> collection = jax_tt.Collection(tables, features)
        >>> sorted(collection.trained(collection.init(jax.random.key(0)))["ad"])
        ['embedding']
        """
        self.check(state)
        for name, table in self.alone.items():
            require_arrays(table, state[name], self._trained_names[name])
        return {
            name: {array: state[name][array] for array in names}
            for name, names in self._trained_names.items()
        }

    def replaced(self, state: States, arrays: States) -> dict[str, dict[str, Any]]:
        """``state`` with ``arrays``, of some or all tables, in place of its own.

        Args:
            state: the arrays before.
            arrays: by name of a table, or of a stack as in ``state``. An array of a table that is in a stack is written
                into a copy of the stack's, or into the stack in a program that donates it, and the step count of a
                table, which `of` returns, into one of all counts.

        Raises:
            TypeError, ValueError: ``arrays`` are not by table and name, or a table does not have them.

        >>> import jax, jax.numpy as jnp, jax_tt
        >>> tables = {"ad": jax_tt.dense_table(50, 8), "user": jax_tt.dense_table(90, 8)}
        >>> collection = jax_tt.Collection(tables, {"ad": jax_tt.Feature("ad"), "user": jax_tt.Feature("user")})
        >>> state = collection.init(jax.random.key(0))
        >>> state = collection.replaced(state, {"user": {"embedding": jnp.ones((90, 8))}})
        >>> float(collection.of(state, "user")["embedding"].sum())
        720.0
        """
        check_tables("state", state, state)
        check_tables("arrays", arrays, [*state, *self.stack_of])
        as_they_are, by_table = {}, {}
        for name, own in arrays.items():
            stack, steps = self.stack_of.get(name), ("step",) if name in self.sharing else ()
            known = stack.arrays if stack else (*self._trained_names.get(name, ()), *state[name])
            check_arrays(f"arrays[{name!r}]", own, dict.fromkeys((*known, *steps)))
            (by_table if stack or (steps and "step" in own) else as_they_are)[name] = own
        after = {name: {**own, **as_they_are.get(name, {})} for name, own in state.items()}
        if not by_table:
            return after
        apart = self.apart(after)
        return self.together(
            apart | {name: {**apart[name], **own} for name, own in by_table.items()}
        )

    def overwritten(
        self, state: States, gradients: States
    ) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
        """The state after a step of the tables with an optimizer, and the gradients of the others.

        Args:
            state: the arrays before the step.
            gradients: with respect to `trained` of this ``state``, as `jax.grad` returns them. The gradients of a table
                with an optimizer are its next values, which overwrite it; a table that the loss did not use stays as it
                is. Next values of an earlier state undo the updates since then, which is not checked.

        Returns:
            The new state, and the gradients of the tables without an optimizer by table and name, e.g. for optax.

        Raises:
            TypeError, ValueError: a table or an array of it is missing, or unknown; or, outside ``jit``, the gradients
                of a table are not its next values, because they were summed, scaled or clipped.

        >>> import jax, jax_tt
        >>> table = jax_tt.dense_table(50, 8, optimizer=jax_tt.optimizers.SGD(0.1))
        >>> collection = jax_tt.Collection({"ad": table}, {"ad": jax_tt.Feature("ad")})
        >>> state = collection.init(jax.random.key(0))
        >>> def loss(trained, batch):
        ...     arrays = collection.replaced(state, trained)
        ...     return jax_tt.lookup_features(collection, arrays, batch)[0]["ad"].sum()
        >>> gradients = jax.grad(loss)(collection.trained(state), {"ad": jax.numpy.array([[1, 2]])})
        >>> state, others = collection.overwritten(state, gradients)
        >>> float(collection.of(state, "ad")["step"]), others
        (1.0, {})
        """
        fused = [name for name in self._trained_names if self._is_fused(name)]
        self.check(state)
        check_tables("gradients", gradients, self._trained_names)
        for name in fused:
            trained = self._trained_names[name]
            expected = "all tables and their arrays that Collection.trained returns"
            expect(name in gradients, "gradients", f"no table {name!r}", expected)
            check_arrays(f"gradients[{name!r}]", gradients[name], trained)
            missing = [array for array in trained if array not in gradients[name]]
            expect(not missing, f"gradients[{name!r}]", f"no {listed(missing)}", expected)
        old, new = (_by_path(fused, arrays) for arrays in (state, gradients))
        after: dict[str, dict[str, Any]] = {}
        for (*name, array), value in next_values("Collection.overwritten", old, new).items():
            after.setdefault(name[0] if name else UPDATES, {})[array] = value
        others = {name: dict(own) for name, own in gradients.items() if name not in fused}
        return self.replaced(state, after), others

    def maintain(self, state: States, method: str = "auto") -> dict[str, dict[str, Any]]:
        """Maintains every table between two steps, such as row caches that are due; returns the state."""
        self.check(state)
        after = {name: maintain(table, state[name], method) for name, table in self.alone.items()}
        return {name: after.get(name, dict(own)) for name, own in state.items()}

    @functools.cached_property
    def separated_tables(self) -> dict[str, Table]:
        """Every table as it is on its own, which `separated` states are for."""
        whole = {name: checkpoint.unsharded(table) for name, table in self.tables.items()}
        return {
            name: with_update(table, dataclasses.replace(table.update, shared=False))
            if table.update is not None
            else table
            for name, table in whole.items()
        }

    def separated(self, state: States) -> dict[str, dict[str, Any]]:
        """The state of every table on its own, e.g. for a checkpoint that single layers can read.

        Rows of a `ShardedTable` are in their order, so that a collection on other devices can read it as well.

        Raises:
            TypeError, ValueError: ``state`` lacks a table or the shared scalars.

        >>> import jax, jax_tt
        >>> table = jax_tt.dense_table(50, 8, optimizer=jax_tt.optimizers.SGD(0.1))
        >>> collection = jax_tt.Collection({"ad": table}, {"ad": jax_tt.Feature("ad")})
        >>> states = collection.separated(collection.init(jax.random.key(0)))
        >>> sorted(states["ad"]), sorted(collection.joined(states))
        (['embedding', 'sentinel', 'step', 'used'], ['ad', 'updates'])
        """
        states = {
            name: checkpoint.by_row(self.tables[name], own)
            for name, own in taken(self.rows_by_table(state)).items()
        }
        for k, name in enumerate(self.sharing):
            states[name] |= {**state[UPDATES], "step": state[UPDATES]["step"][..., k]}
        return states

    def joined(self, states: States) -> dict[str, dict[str, Any]]:
        """The inverse of `separated`: the state of the collection from the states of its tables.

        Raises:
            TypeError, ValueError: ``states`` lack a table or its step count.
        """
        check_states("states", states, self.tables)
        scalars: dict[str, dict[str, jax.Array]] = {"step": {}, "sentinel": {}}
        for name in self.sharing:
            require_arrays(self.separated_tables[name], states[name], tuple(scalars))
            for scalar, values in scalars.items():
                value = as_scalar(f"states[{name!r}][{scalar!r}]", states[name][scalar])
                values[name] = jnp.asarray(value, jnp.float32)
        rows = {
            name: checkpoint.of_rows(self.tables[name], own)
            for name, own in self._without_scalars(states).items()
        }
        shared = init_shared(len(self.sharing))
        if self.sharing:
            shared["step"], sentinels = (jnp.stack(list(own.values())) for own in scalars.values())
            # The worst, so that a table that has been destroyed is still noticed.
            shared["sentinel"] = sentinels[jnp.argmax(jnp.abs(sentinels - 1))]
        return self.from_tables(rows, shared)

    def frozen(self, state: States) -> tuple[Collection, dict[str, dict[str, Any]]]:
        """The read-only collection with the same rows, e.g. for serving, and its state without optimizer state.

        Quantized tables that were trained have bytes again. Rows of a `ShardedTable` are gathered on one device, in
        their order.

        Raises:
            TypeError, ValueError: ``state`` lacks a table or the shared scalars.

        >>> import jax, jax_tt
        >>> table = jax_tt.dense_table(50, 8, optimizer=jax_tt.optimizers.Adam(0.1))
        >>> collection = jax_tt.Collection({"ad": table}, {"ad": jax_tt.Feature("ad")})
        >>> served, arrays = collection.frozen(collection.init(jax.random.key(0)))
        >>> served.tables["ad"].update, {name: sorted(own) for name, own in arrays.items()}
        (None, {'ad': ['embedding']})
        """
        tables, states = {}, {}
        for name, own in self.separated(state).items():
            if name in self.tables:
                table = self.separated_tables[name]
                tables[name], states[name] = freeze(table, checkpoint.of_rows(table, own))
        # What optax would train as one parameter is only read.
        frozen = dataclasses.replace(self, tables=tables, stack=self.stack is not False)
        return frozen, frozen.from_tables(states, {})

    def with_tables(
        self, state: States, tables: Mapping[str, tuple[Table, Mapping[str, Any]]]
    ) -> tuple[Collection, dict[str, dict[str, Any]]]:
        """The collection with other tables in place of some, e.g. compressed ones for serving, and its state.

        Args:
            state: the arrays of the collection; the other tables keep theirs.
            tables: read-only tables with their states by name, as `quantize` and `files.load` return them, with as many
                rows and columns as those that they replace.

        Raises:
            TypeError, ValueError: ``state`` lacks a table or the shared scalars, or a table does not fit.

        >>> import jax, jax.numpy as jnp, jax_tt
        >>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
        >>> state = collection.init(jax.random.key(0))
        >>> small = jax_tt.quantize(state["ad"]["embedding"], bits=4)
        >>> served, arrays = collection.with_tables(state, {"ad": small})
        >>> rows, _ = jax_tt.lookup_features(served, arrays, {"ad": jnp.array([[3, 4]])})
        >>> served.tables["ad"].bits, rows["ad"].shape
        (4, (1, 8))
        """
        self.check(state)
        check_replacements(self.tables, tables)
        replaced = {name: table for name, (table, _) in tables.items()}
        after = dataclasses.replace(self, tables={**self.tables, **replaced})
        by_table = self.rows_by_table(state) | {name: own for name, (_, own) in tables.items()}
        shared = dict(state.get(UPDATES, {}))
        if after.sharing != self.sharing:
            kept = [self.sharing.index(name) for name in after.sharing]
            shared["step"] = shared["step"][..., np.array(kept, int)]
        counted = {name: dict(state[name]) for name in state if name == STATISTICS}
        return after, after.from_tables(by_table, shared) | counted

    def with_statistics(self, state: States) -> dict[str, dict[str, Any]]:
        """``state`` with statistics that start at 0; training calls of `lookup_features` add to them from then on.

        They are a small array for each table, and are neither trained nor part of `separated` states.

        Raises:
            TypeError, ValueError: ``state`` lacks a table or the shared scalars.
        """
        self.check(state)
        check_countable(self.tables)
        kept = {name: dict(own) for name, own in state.items()}
        return kept | {STATISTICS: {TOTALS: init_totals(self.tables)}}

    def statistics(self, state: States) -> dict[str, TableStatistics]:
        """Reads the counts since `with_statistics`, by table. Blocks until the device is done.

        Args:
            state: the arrays after a call, or only the entry ``"statistics"``, which linen's collection of that name
                holds as well.

        Raises:
            TypeError, ValueError: ``state`` has no statistics, or has the statistics of another collection.

        >>> import jax, jax.numpy as jnp, jax_tt
        >>> tables, features = {"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")}
        >>> collection = jax_tt.Collection(tables, features)
        >>> state = collection.with_statistics(collection.init(jax.random.key(0)))
        >>> rows, state = jax_tt.lookup_features(collection, state, {"ad": jnp.array([[3, 3, 4]])})
        >>> collection.statistics(state)["ad"]
        TableStatistics(requests=3, unique=2, out_of_range=0, cache_hits=None)
        """
        check_statistics("state", state, self.tables)
        expected = "statistics, as Collection.with_statistics(state) begins them"
        expect(STATISTICS in state, "state", "no statistics", expected)
        totals = state[STATISTICS][TOTALS]
        for own in totals.values():
            if own.ndim > 2:
                got = f"the statistics of several models, of shape {own.shape}"
                expected = "those of one model, e.g. jax.tree.map(lambda array: array[0], state)"
                raise mismatch("state", got, expected)
        return read_totals(self.tables, totals)

    def check(self, state: Any, argument: str = "state") -> None:
        """Raises unless a state has arrays by name of all tables, and the scalars that they share."""
        given = state.keys() if isinstance(state, Mapping) else ()
        for name, stack in self.stacks.items():
            if name not in given and not stack.tables.keys().isdisjoint(given):
                fix = (
                    "Collection.joined takes what Collection.separated of that collection returns."
                )
                got = "the state of a collection without stacks"
                raise mismatch(argument, got, f"the arrays of the stack {name!r}", fix)
        check_states(argument, state, [*self.stacks, *self.alone])
        for name, stack in self.stacks.items():
            stack.check(argument, state[name])
        if self.sharing:
            check_shared(argument, state, self.sharing)
        check_statistics(argument, state, self.tables)

    @functools.cached_property
    def sharing(self) -> tuple[str, ...]:
        """The tables with an optimizer that share the scalars in ``state["updates"]``, in the order of their steps."""
        names = [name for name, table in self.tables.items() if is_shared(table)]
        # Of tables in another order, the array of the steps would have the same shape.
        return tuple(sorted(names))

    @functools.cached_property
    def _trained_names(self) -> dict[str, tuple[str, ...]]:
        """The arrays that a loss is differentiated with respect to, by table, and the shared scalars."""
        names = {name: stack.trained_names for name, stack in self.stacks.items()}
        names |= {name: table.spec.trained_names for name, table in self.alone.items()}
        return names | ({UPDATES: SHARED} if self.sharing else {})

    def _is_fused(self, name: str) -> bool:
        if name in self.stacks:
            return self.stacks[name].is_fused
        return name == UPDATES or self.tables[name].update is not None

    def _without_scalars(self, states: States) -> dict[str, dict[str, Any]]:
        """The states of the tables, without what they share."""
        return {
            name: {
                array: value
                for array, value in states[name].items()
                if name not in self.sharing or array not in SHARED
            }
            for name in self.tables
        }

    def shared(self, state: States) -> Shared | None:
        """The scalars of the tables in `sharing`, if there are any."""
        if not self.sharing:
            return None
        updates = state[UPDATES]
        if updates["step"].shape != (len(self.sharing),):
            raise mismatch("state['updates']['step']", updates["step"], (len(self.sharing),))
        places = [self.sharing.index(name) for name in self.tables if name in self.sharing]
        steps = updates["step"]
        if isinstance(steps, np.ndarray):
            steps = jnp.asarray(steps)
        if places != sorted(places):
            steps = steps[np.array(places)]
        return Shared(steps, updates["sentinel"], updates["used"])

    @functools.cached_property
    def features_of(self) -> dict[str, tuple[str, ...]]:
        """The names of the features of every table."""
        return {
            name: tuple(
                feature for feature, described in self.features.items() if described.table == name
            )
            for name in self.tables
        }

    @functools.cached_property
    def hashed(self) -> dict[str, HashTable]:
        """The hash tables by name; of sharded ones what is sharded."""
        return {
            name: unsharded_hash_table(table)
            for name, table in self.for_batches.items()
            if table.ids.takes_keys
        }

    @functools.cached_property
    def for_features(self) -> dict[str, Table]:
        """The table of every feature, named as errors about the input of the feature are to name it."""
        return {
            name: _for_calls(self.tables[feature.table], f"feature {name!r} of {feature.table!r}")
            for name, feature in self.features.items()
        }

    @functools.cached_property
    def for_batches(self) -> dict[str, Table]:
        """Every table, named as reports about ids of all its features are to name it."""
        return {
            name: _for_calls(self.tables[name], f"{name} (features {', '.join(features)})")
            for name, features in self.features_of.items()
        }


def _sharing(table: Table) -> Table:
    """The table with scalars in ``state["updates"]``, unless it has a row cache, which has scalars as well."""
    update = table.update
    if update is None:
        return table
    return with_update(table, dataclasses.replace(update, shared=not has_cache(table)))


def _by_path(names: Sequence[str], arrays: States) -> dict[tuple[str, ...], Any]:
    """Arrays by path as `next_values` takes them: the shared scalars are outside the tables that they belong to."""
    return {
        (array,) if name == UPDATES else (name, array): value
        for name in names
        for array, value in arrays[name].items()
    }


def _for_calls(table: Table, name: str) -> Table:
    return with_name(without_values(table), name)


def _checked(argument: str, given: Any, kind: type, example: str) -> dict[str, Any]:
    """A mapping from names to values of this type."""
    if not isinstance(given, Mapping) or not given:
        expected = f"a mapping from names, e.g. {{'item': {example}}}"
        raise mismatch(argument, repr(given), expected, error=TypeError)
    for name, value in given.items():
        if not isinstance(name, str):
            raise mismatch(argument, f"the name {name!r}", "strings", error=TypeError)
        expected = f"a jax_tt.{kind.__name__}, e.g. {example}"
        instance_of(f"{argument}[{name!r}]", value, kind, expected)
    return dict(given)
