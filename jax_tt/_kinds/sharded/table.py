"""`ShardedTable`: a table whose rows are sharded over the devices of a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import type_of
from jax_tt._base.storage import require_arrays
from jax_tt._directories.hash_directory import CLOCK, KEYS, SEED, TOTALS, WAITING
from jax_tt._directories.relocate import by_device, relocated, stay_in_slots
from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._ids.placement import Layout, Placement, stored_rows
from jax_tt._jax.rounding import exactly
from jax_tt._kinds.sharded.columns import (
    columns_of_rows,
    rows_of_columns,
    rows_of_shards,
    rows_of_table,
)
from jax_tt._kinds.sharded.group import ShardedGroup, inside_shard_map
from jax_tt._kinds.sharded.initial import can_draw_rows, drawn_rows
from jax_tt._kinds.sharded.move import moved_rows, row_numbers
from jax_tt._kinds.sharded.options import DEFAULT, Exchange
from jax_tt._kinds.sharded.programs import Local
from jax_tt._kinds.sharded.sharding import PAGES, Sharding
from jax_tt._table.added import adds_rows
from jax_tt._table.check import check_arrays, check_state
from jax_tt._table.checkpoint import pieces
from jax_tt._table.groups import BoundTable, Call, weights_gradient
from jax_tt._table.initial_rows import init_param
from jax_tt._table.options import Lookup
from jax_tt._table.sharding import check_sharding, rows_to_shard, shard_of
from jax_tt._table.state import Array, State, StateSpec
from jax_tt._table.table import Execution, Table
from jax_tt._table.whole import attend, to_dense
from jax_tt._table.wrapper import Wrapper, is_sharded

# Larger tables are moved a block at a time, and no device has all of their rows; for others, what compiles fastest.
_WHOLE_BYTES = 2**28
_EXCHANGE = 'a jax_tt.planning.Exchange, e.g. jax_tt.planning.Exchange(dtype="bfloat16")'


@dataclasses.dataclass(frozen=True)
class ShardedTable(Wrapper):
    """A table whose rows are sharded, a page at a time, over the devices along an axis of a mesh.

    The arrays of its state have the pools of all devices one after the other and are sharded along their first axis;
    `page_table` in the state says where each page is. The devices along the other axes of the mesh hold the same rows,
    and each device looks up its part of a batch.

    Attributes:
        table: a `DenseTable`, a `QuantizedTable`, or a `HashTable` of a `DenseTable`, whose keys belong to devices by
            a hash; every device has a hash table of its share of the rows.
        mesh: the devices.
        axis: the mesh axis, or a tuple of axes, that pages are sharded over.
        placement: which devices hold which pages.
        exchange: how rows and gradients travel.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> placement = jax_tt.Placement.round_robin(page_size=100)
    >>> table = jax_tt.tables.ShardedTable(jax_tt.dense_table(1000, 16), mesh, "model", placement)
    >>> state = table.init(jax.random.key(0))
    >>> rows, _ = jax_tt.lookup(table, state, jnp.array([1, 999]))
    >>> rows.shape
    (2, 16)
    """

    mesh: Mesh
    axis: Any
    placement: Placement
    exchange: Exchange = DEFAULT

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check()

    def _check(self) -> None:
        label = self.table.ids.label
        rows_to_shard(self.table)  # raises
        for name, kind, example in (
            ("mesh", Mesh, 'a jax.sharding.Mesh, e.g. jax.make_mesh((8,), ("model",))'),
            ("placement", Placement, "a jax_tt.Placement, e.g. jax_tt.Placement.round_robin()"),
            ("exchange", Exchange, _EXCHANGE),
        ):
            if not isinstance(given := getattr(self, name), kind):
                raise TypeError(f"{label}{name}: got {type_of(given)}; expected {example}.")
        unknown = [name for name in self.axes if name not in self.mesh.axis_names]
        if unknown or not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(
                f"{label}axis: got {self.axis!r}; expected one or several different axes of the mesh, which has "
                f"{', '.join(map(repr, self.mesh.axis_names))}."
            )
        check_sharding(self.table, self.layout)

    def __getstate__(self) -> object:
        raise TypeError(
            f"{self.table.ids.label}mesh: got a ShardedTable to pickle; its devices exist in this process only. "
            "Pickle the table that it shards, its attribute `table`, or a Collection of such tables, and shard it in "
            "the other process with jax_tt.shard_tables. States are saved by orbax or jax_tt.files.dump."
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def axes(self) -> tuple[str, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    @property
    def parts(self) -> int:
        return 1 if inside_shard_map() else self.mesh.size

    @functools.cached_property
    def layout(self) -> Layout:
        devices = 1
        for name in self.axes:
            devices *= self.mesh.shape[name]
        return self.placement.layout(self.num_embeddings, devices)

    @functools.cached_property
    def sharding(self) -> Sharding:
        """What the program of one device needs to know."""
        keys = [name for name in (*KEYS, *WAITING) if name in self.table.spec.buffers]
        return Sharding(
            self.ids,
            self.axes,
            tuple(name for name in self.mesh.axis_names if name not in self.axes),
            self.layout,
            self.exchange,
            shard_of(self.table, self.layout.rows, self.features // self.layout.columns),
            frozenset([*self.row_arrays, *keys]),
        )

    @functools.cached_property
    def stored(self) -> Any:
        """The global view: a table of the arrays of all shards, concatenated."""
        if self.ids.takes_keys:
            return self.table
        rows = self.layout.rows * self.layout.devices
        return shard_of(self.table, rows, self.features // self.layout.columns)

    @property
    def num_stored(self) -> int:
        """Rows of all column shards."""
        return self.num_embeddings * self.layout.columns

    # State

    @functools.cached_property
    def spec(self) -> StateSpec:
        read = (*KEYS, SEED)
        arrays = (
            dataclasses.replace(array, role="constant") if array.name in read else array
            for array in self.stored.spec.without_rows().arrays
        )
        shape = self.layout.num_pages, self.layout.replicas
        pages = Array(PAGES, "constant", shape, jnp.dtype(jnp.int32), collection="placement")
        return StateSpec((*arrays, pages))

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        if self.ids.takes_keys:
            return {name: self._placed(x) for name, x in self.table.init_params(key).items()}
        drawn = self._drawn(key)
        return self._initial(self.table.init_params(key)) if drawn is None else drawn

    def _drawn(self, key: jax.Array) -> dict[str, jax.Array] | None:
        """The parameters of a large table, drawn where they are stored; None if they cannot be."""
        shapes = jax.eval_shape(self.table.init_params, key)
        nbytes = sum(like.size * like.dtype.itemsize for like in jax.tree.leaves(shapes))
        if nbytes <= _WHOLE_BYTES or self.layout.columns > 1 or not can_draw_rows(self.table, key):
            return None
        mesh = Mesh(self.mesh.devices, self.mesh.axis_names)

        def draw(inputs: Any) -> jax.Array:
            key, page_table = inputs
            return drawn_rows(self.table, self.layout, page_table, mesh, self.axes, key)

        (name,) = self.table.spec.param_names
        inputs = key, jnp.asarray(self.layout.page_table)
        return {name: self._placed(over_explicit_axes(draw, inputs, P(self.axis)))}

    def _initial(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        arrays = {name: rows_of_shards(a, self.layout.columns) for name, a in arrays.items()}
        whole = sum(array.nbytes for array in arrays.values()) <= _WHOLE_BYTES
        if whole or not all(isinstance(array, Tracer) for array in arrays.values()):
            return self._stored(arrays)
        # Inside of jit, every device computes the entries of neighbouring rows alone, which are then moved. The
        # initialiser is not known: it may depend on the shape of the table.
        spare = self._neighbours.rows * self._neighbours.devices - self.num_stored
        padded = {
            name: self._placed(jnp.pad(array, [(0, spare), *[(0, 0)] * (array.ndim - 1)]))
            for name, array in arrays.items()
        }
        layout, pages = self._neighbours, jnp.asarray(self._neighbours.page_table)
        return self._moved(self.num_stored, padded, layout, pages, self.layout)

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, Any]:
        rest = {
            name: self._on(array, P()) if name in (SEED, TOTALS) else self._placed(array)
            for name, array in self.stored.init_rest(params).items()
        }
        return {**rest, PAGES: self._pages()}

    def _stored(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Writes arrays, whose entry k belongs to row k, to the pools of all devices, replicas included."""
        self._check_numbers()
        rows = jnp.arange(self.num_stored)
        table = jnp.asarray(self.layout.page_table)
        pools = {}
        for name, array in arrays.items():
            stored = jnp.zeros(
                (self.layout.rows * self.layout.devices, *array.shape[1:]), array.dtype
            )
            for replica in range(self.layout.replicas):
                places = table[:, replica : replica + 1]
                at = stored_rows(self.layout, places, rows)
                # Pages with fewer replicas have -1, rows before the first one.
                at = jnp.where(at < 0, stored.shape[0], at)
                stored = stored.at[at].set(array, mode="drop", wrap_negative_indices=False)
            pools[name] = self._placed(stored)
        return pools

    def _check_numbers(self) -> None:
        rows = self.layout.rows * self.layout.devices
        if rows >= 2**31:
            raise ValueError(
                f"{self.ids.label}table: got {rows} rows of all devices outside of jax.jit; expected fewer than 2**31. "
                "Initialise larger tables inside of it, jax.jit(table.init)(key), where rows move between devices."
            )

    def of_rows(self, state: State) -> dict[str, Any]:
        """The inverse of `by_row`, e.g. of a checkpoint that other devices have written.

        Keys of a hash table that find no room on these devices are evicted, with a warning, as in `HashTable.of_rows`.

        Raises:
            ValueError: arrays do not fit, or there is no room for all keys of a hash table with the policy ``"none"``;
                the message has a capacity and ways that have.
            TypeError: keys get other slots, but the arrays are traced.
        """
        if self.ids.takes_keys:
            return self._of_keys(state)
        arrays = {name: state[name] for name in self.row_arrays}
        for name, shape in self.table.spec.shapes.items():
            if name in arrays and arrays[name].shape != shape:
                raise ValueError(
                    f"{self.ids.label}state[{name!r}]: got shape {arrays[name].shape}; expected {shape}, with an entry "
                    "for every row of the table."
                )
        arrays = {name: rows_of_shards(a, self.layout.columns) for name, a in arrays.items()}
        return {**state, **self._stored(arrays), PAGES: self._pages()}

    def _of_keys(self, state: State) -> dict[str, Any]:
        require_arrays(self, state, (CLOCK, *self.sharding.names))
        arrays = {name: state[name] for name in self.sharding.names}
        devices = self.layout.devices
        if stay_in_slots(self.table, arrays, devices):
            moved = over_explicit_axes(
                lambda shards: relocated(self.table, shards, devices), arrays, P(self.axis)
            )
        else:
            moved = relocated(self.table, {**arrays, CLOCK: state[CLOCK]}, devices)
        after = {name: self._in_place(name, x) for name, x in {**state, **moved}.items()}
        return after | {PAGES: self._pages()}

    def _keys_by_device(self, state: State) -> dict[str, Any]:
        keys = {name: x for name, x in state.items() if name in (*KEYS, *WAITING)}
        return {name: x for name, x in state.items() if name != PAGES} | by_device(
            keys, self.layout.devices
        )

    def moved(self, state: State, placement: Placement) -> tuple[ShardedTable, dict[str, Any]]:
        """Moves the table to another placement; returns it and its state.

        Rows move between the devices a block at a time; no device has the whole table.

        Args:
            state: the arrays under the present placement.
            placement: the new one.

        Raises:
            ValueError: the placement does not fit.

        >>> import jax, jax_tt
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> dense = jax_tt.dense_table(1000, 16)
        >>> table = jax_tt.tables.ShardedTable(dense, mesh, "model", jax_tt.Placement.contiguous())
        >>> state = table.init(jax.random.key(0))
        >>> table, state = table.moved(state, jax_tt.Placement.round_robin(page_size=100))
        >>> state["page_table"].shape
        (10, 1)
        """
        if self.ids.takes_keys:
            raise TypeError(
                f"{self.ids.label}table: a sharded HashTable cannot be moved; its keys are where "
                "their hashes say. For other devices, of_rows takes what by_row returns."
            )
        check_state(self, state)
        new = dataclasses.replace(self, placement=placement)
        if new.layout.columns != self.layout.columns:
            return new, new.of_pieces(self.in_pieces(state))
        arrays = {name: state[name] for name in self.row_arrays}
        moved = self._moved(self.num_stored, arrays, self.layout, state[PAGES], new.layout)
        return new, {**state, **moved, PAGES: new._pages()}

    def at_owners(
        self, function: Callable[..., Any], static: tuple[Any, ...], arrays: State, given: Any
    ) -> Any:
        """Runs ``function(*static, arrays, given)`` on each device, with its shards of arrays of keys and rows.

        Args:
            function: at module level. It returns a pair, shards and what is the same on all devices.
            static: hashable arguments.
            arrays: by name, with a first axis that is sharded over the devices.
            given: arrays that every device gets all of.
        """
        sharded, local = P(self.axes), Local(function, static)

        def call(inputs: tuple[Any, Any]) -> Any:
            run = self.group.on_devices(local, (sharded, P()), (sharded, P()))
            return run(*inputs)

        return over_explicit_axes(call, (arrays, given), (sharded, P()))

    def pieces(self) -> dict[str, jax.ShapeDtypeStruct]:
        whole = pieces(self.table)
        rows, types = self._whole_rows.rows * self._whole_rows.devices, {}
        for name, like in whole.items():
            padded = name in self.row_arrays and not self.ids.takes_keys
            shape = (rows, *like.shape[1:]) if padded else like.shape
            sharding = NamedSharding(self.mesh, self._spec_of(name))
            types[name] = jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)
        return types

    def in_pieces(self, state: State) -> dict[str, Any]:
        if self.ids.takes_keys:
            return {name: array for name, array in state.items() if name != PAGES}
        arrays = self._rows_in(state)
        pages = state[PAGES] if PAGES in state else jnp.asarray(self.layout.page_table)
        if self.layout.columns > 1:
            move = functools.partial(self._moved, self.num_embeddings)
            pieces = rows_of_columns(arrays, self.layout, pages, self._whole_rows, move)
        else:
            pieces = self._moved(self.num_stored, arrays, self.layout, pages, self._whole_rows)
        return {name: array for name, array in {**state, **pieces}.items() if name != PAGES}

    def _rows_in(self, state: State) -> dict[str, Any]:
        """The arrays of rows among those of a state, or of what is laid out like it."""
        return {name: state[name] for name in self.row_arrays if name in state}

    def of_pieces(self, state: State) -> dict[str, Any]:
        if self.ids.takes_keys:
            arrays = {name: self._in_place(name, array) for name, array in state.items()}
            return arrays | {PAGES: self._pages()}
        pieces = self._rows_in(state)
        layout, pages = self._whole_rows, jnp.asarray(self._whole_rows.page_table)
        if self.layout.columns > 1:
            move = functools.partial(self._moved, self.num_embeddings)
            arrays = columns_of_rows(pieces, self.layout, (layout, pages), move, self._placed)
        else:
            arrays = self._moved(self.num_stored, pieces, layout, pages, self.layout)
        return {**state, **arrays, PAGES: self._pages()}

    @functools.cached_property
    def _whole_rows(self) -> Layout:
        """The layout in which every device has neighbouring rows, all columns of them."""
        return Placement.contiguous().layout(self.num_embeddings, self.layout.devices)

    @functools.cached_property
    def _neighbours(self) -> Layout:
        """The layout in which every device has neighbouring rows of all column shards, stored in their order."""
        return Placement.contiguous().layout(self.num_stored, self.layout.devices)

    def _moved(
        self,
        count: int,
        arrays: Mapping[str, Any],
        before: Layout,
        pages: jax.Array,
        after: Layout,
    ) -> dict[str, jax.Array]:
        """Moves arrays of ``count`` rows, of all column shards or of one, to another layout."""
        if before == after or not arrays:
            return dict(arrays)
        layouts = (before, after)
        row_numbers(count)  # raises if there is no type for them
        mesh = Mesh(self.mesh.devices, self.mesh.axis_names)

        def move(inputs: tuple[Any, Any]) -> dict[str, jax.Array]:
            shards, tables = inputs
            return moved_rows(shards, tables, layouts, count, mesh, self.axes)

        inputs = dict(arrays), (pages, jnp.asarray(after.page_table))
        return over_explicit_axes(move, inputs, P(self.axis))

    def by_row(self, state: State) -> dict[str, Any]:
        """The state of the wrapped table, in which entry k of an array belongs to row k, e.g. for a checkpoint.

        The keys of a hash table and their rows stay in the slots that they have, and the arrays of keys get a first
        axis of devices: `HashTable.of_rows` places them in a table of one device.
        """
        require_arrays(self, state, (PAGES,))
        if self.ids.takes_keys:
            return over_explicit_axes(self._keys_by_device, dict(state), P())
        others = {name: state[name] for name in state if name != PAGES}
        columns = self.layout.columns
        if sum(state[name].nbytes for name in self.row_arrays) > _WHOLE_BYTES:
            check_state(self, state)
            arrays = {name: state[name] for name in self.row_arrays}
            layouts = self.layout, state[PAGES], self._neighbours
            moved = self._moved(self.num_stored, arrays, *layouts)
            cut = functools.partial(
                jax.tree.map, lambda array: rows_of_table(array[: self.num_stored], columns)
            )
            return others | over_explicit_axes(cut, moved, P())

        def gathered(state: Any) -> dict[str, Any]:
            rows = stored_rows(self.layout, state[PAGES], jnp.arange(self.num_stored))
            return {
                name: rows_of_table(exactly(lambda array: array[rows], state[name]), columns)
                for name in self.row_arrays
            }

        return others | over_explicit_axes(gathered, dict(state), P())

    @functools.cached_property
    def row_arrays(self) -> dict[str, float | None]:
        """The arrays of rows, and the entries of a new row; None for its values."""
        return rows_to_shard(self.table)

    def _pages(self) -> jax.Array:
        return self._on(jnp.asarray(self.layout.page_table), P())

    def _placed(self, array: jax.Array) -> jax.Array:
        """An array of rows on the devices that hold them, and a scalar on all of them."""
        return self._on(array, P(self.axis) if array.ndim else P())

    def _spec_of(self, name: str) -> P:
        return P(self.axis) if name in self.sharding.names else P()

    def _in_place(self, name: str, array: jax.Array) -> jax.Array:
        return self._on(array, self._spec_of(name))

    def _on(self, array: jax.Array, spec: P) -> jax.Array:
        sharding = NamedSharding(self.mesh, spec)
        if not isinstance(array, Tracer):
            return jax.device_put(array, sharding)
        explicit = AxisType.Explicit in self.mesh.axis_types
        constrain = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        return constrain(array, sharding)

    # Lookups

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        # The owners of keys look for them.
        return (
            (dict(state), batch)
            if self.ids.takes_keys
            else self.table.prepare(state, batch, lookup)
        )

    @functools.cached_property
    def group(self) -> ShardedGroup:
        """The operation that takes all tables that are sharded over the same devices."""
        # Lookups run in automatic mode, also where the mesh of the user has explicit axes.
        return ShardedGroup(Mesh(self.mesh.devices, self.mesh.axis_names), self.axes)

    def execution(self, lookup: Lookup, state: State) -> Execution:
        return Execution(self.table.execution(lookup, state).method, self.group, devices=self.parts)

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        call = Call(BoundTable(self, lookup), state, batch, ())
        (sums,), residuals = self.group.forward([call], None)
        return sums, residuals

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self.step(state, batch, residuals, g, lookup, ())

    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        call = Call(BoundTable(self, lookup), state, batch, values)
        return self.group.backward([call], residuals, [g], None)[0]


is_sharded.register(ShardedTable, lambda table: True)
# The devices that keys belong to add the initial rows of missing ones.
adds_rows.register(ShardedTable, lambda table, lookup: False)
# The rows of positions are looked up where they are.
weights_gradient.register(ShardedTable, weights_gradient.dispatch(Table))


@init_param.register(ShardedTable)
def init_placed(table: ShardedTable, name: str, key: jax.Array) -> Any:
    if table.ids.takes_keys:
        return table._placed(init_param(table.table, name, key))
    drawn = table._drawn(key)
    return (drawn or table._initial({name: init_param(table.table, name, key)}))[name]


@to_dense.register(ShardedTable)
def dense_by_row(table: ShardedTable, state: State) -> jax.Array:
    return to_dense(table.table, table.by_row(state))


@attend.register(ShardedTable)
def attend_by_row(table: ShardedTable, state: State, query: jax.Array, precision: Any) -> jax.Array:
    return attend(table.table, table.by_row(state), query, precision)


@check_state.register(ShardedTable)
def check_pages(table: ShardedTable, state: State) -> None:
    check_arrays(table, state, [x for x in table.spec.arrays if x.name == PAGES])
    held = table.sharding.shard if inside_shard_map() else table.stored
    check_state(held, state)
