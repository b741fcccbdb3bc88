"""`ShardedTable`: a table whose rows are divided over the devices of a mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._lookup._batch import Batch
from jax_tt._lookup._groups import Call, Use
from jax_tt._sharding.group import ShardedGroup, inside_shard_map
from jax_tt._sharding.pages import stored_rows
from jax_tt._sharding.placement import Layout, Placement
from jax_tt._sharding.requests import PAGES
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import State, Table
from jax_tt._tables.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class ShardedTable(Wrapper):
    """A table of which every device along an axis of a mesh holds some pages of rows.

    The arrays of its state have the pools of all devices one after the other and are sharded along their first axis;
    `page_table` in the state says where each page is. The devices along the other axes of the mesh hold the same rows,
    and each device looks up its own part of a batch.

    Attributes:
        table: a `DenseTable`.
        mesh: the devices.
        axis: the mesh axis, or a tuple of axes, that pages are divided over.
        placement: which devices hold which pages.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it and the fix.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> from jax_tt._sharding.placement import Placement
    >>> from jax_tt._sharding.table import ShardedTable
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> table = ShardedTable(jax_tt.dense_table(1000, 16), mesh, "model", Placement.round_robin(100))
    >>> state = table.init(jax.random.key(0))
    >>> rows, _ = jax_tt.lookup_rows(table, state, jnp.array([1, 999]), jax_tt.Lookup())
    >>> rows.shape
    (2, 16)
    """

    mesh: Mesh
    axis: Any
    placement: Placement

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table.row_names != self.table.param_names or self.table.cached is not None:
            raise TypeError(
                f"table: got a {type(self.table).__name__}; expected one with rows of its own, a DenseTable. The cores "
                "of a TTTable are small and are replicated."
            )
        unknown = [name for name in self.axes if name not in self.mesh.axis_names]
        if unknown:
            raise ValueError(
                f"axis: got {self.axis!r}; expected names of axes of the mesh, {self.mesh.axis_names}."
            )
        update = self.table.update
        if update is not None:
            if update.optimizer.changes_all(jnp.zeros(())) is not None:
                raise ValueError(
                    f"optimizer: {type(update.optimizer).__name__} changes all rows between steps; expected a rule "
                    "that changes the rows of a batch."
                )
            if any(slot.rows is not None for slot in update.optimizer.slots):
                raise ValueError(
                    f"optimizer: {type(update.optimizer).__name__} has state that is not divided by rows; expected a "
                    "rule with one entry per row or per element."
                )
        _ = self.layout  # raises unless the placement fits

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
    def local(self) -> Any:
        """The table that one device holds."""
        return dataclasses.replace(self.table, num_embeddings=self.layout.rows)

    # State

    @functools.cached_property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = self.layout.rows * self.layout.devices
        shapes: Mapping[str, tuple[int, ...]] = self.table.param_shapes
        return {name: (rows, *shape[1:]) for name, shape in shapes.items()}

    @functools.cached_property
    def trained_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.table.trained_names

    @functools.cached_property
    def buffers(self) -> dict[str, str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {**self.table.buffers, PAGES: "placement"}

    @functools.cached_property
    def constant_names(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (*self.table.constant_names, PAGES)

    def check(self, state: State) -> None:
        self.require(state, (PAGES,))
        if inside_shard_map():
            self.local.check(state)
        else:
            Table.check(self, state)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        return self.of_rows(self.table.init_params(key))

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, Any]:
        rest = jax.tree.map(self._placed, Table.init_rest(self, params))
        return {**rest, PAGES: jnp.asarray(self.layout.page_table)}

    def of_rows(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Stored arrays, with all replicas, from arrays of which entry k is that of row k."""
        rows = jnp.arange(self.num_embeddings)
        table = jnp.asarray(self.layout.page_table)
        found = {}
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
            found[name] = self._placed(stored)
        return found

    def by_row(self, state: State) -> dict[str, Any]:
        """The state as that of the wrapped table, whose entry k is that of row k, e.g. for a checkpoint."""
        rows = stored_rows(self.layout, state[PAGES], jnp.arange(self.num_embeddings))
        return {
            name: state[name][rows] if name in self.row_arrays else state[name]
            for name in self.trained_names
        }

    @functools.cached_property
    def row_arrays(self) -> dict[str, float | None]:
        return self.table.row_arrays

    def _placed(self, array: jax.Array) -> jax.Array:
        spec = P(self.axis) if array.ndim else P()
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))

    # Lookups

    def differentiates_itself(self, lookup: Lookup) -> bool:
        return False

    def group(self, lookup: Lookup) -> ShardedGroup:
        return ShardedGroup(self.mesh, self.axes)

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        call = Call(Use(self, lookup), state, batch, ())
        (sums,), residuals = self.group(lookup).forward([call], None)
        return sums, residuals

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self.step(state, batch, residuals, g, lookup, ())

    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        call = Call(Use(self, lookup), state, batch, values)
        return self.group(lookup).backward([call], residuals, [g], None)[0]

    def weights_gradient(
        self, state: State, batch: Batch, g: jax.Array, lookup: Lookup
    ) -> jax.Array:
        return Table.weights_gradient(self, state, batch, g, lookup)

    def rows(self, params: Any, digits: Any, precision: Any) -> jax.Array:
        raise TypeError(f"{self.label}a ShardedTable is looked up by its group.")

    def to_dense(self, state: State) -> jax.Array:
        return self.table.to_dense(self.by_row(state))

    def attend(self, state: State, query: jax.Array, precision: Any) -> jax.Array:
        return self.table.attend(self.by_row(state), query, precision)
