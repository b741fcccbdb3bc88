"""Counts the bytes that devices exchange in a step, in the traced program, for any number of devices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType

from jax_tt._collection.collection import Collection
from jax_tt._collection.feature import Feature
from jax_tt._collection.lookup_features import lookup_features
from jax_tt._collection.states import UPDATES
from jax_tt._ids.batch import Batch
from jax_tt._ids.placement import Placement
from jax_tt._kinds.sharded.group import ShardedGroup
from jax_tt._kinds.sharded.sharding import PAGES
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._kinds.sharded.travels import sums_travel
from jax_tt._lookup.shared import init_shared
from jax_tt._table.groups import BoundTable, Call
from jax_tt._table.options import Lookup, NeededCotangents
from jax_tt._table.table import Table

_AXIS = "devices"
_COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_to_all",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum_scatter",
        "ragged_all_to_all",
        "reduce_scatter",
    }
)


class ExchangeBytes(NamedTuple):
    """Operands of the collectives of one device, in bytes per step; an operand of an all-gather counts once per device.

    Attributes:
        forward, backward: of the first round, as a rule the only one.
        further: of every further round, or of another attempt, forward and backward.
        collectives: how many there are in the first round.
        summed: the names of the tables whose sums travel.
    """

    forward: int
    backward: int
    further: int
    collectives: int
    summed: frozenset[str] = frozenset()


def traced_exchange(
    tables: Mapping[str, tuple[Table, Placement, tuple[int, int]]], devices: int
) -> ExchangeBytes:
    """The exchange of a training step that looks up all tables as one collection, on devices that need not exist.

    With each table come its placement, the number of bags of a device, and of ids of each.
    """
    # Traced only, so that no devices are needed.
    mesh: Any = AbstractMesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,))
    described = {
        name: _Described(table, mesh, _AXIS, placement)
        for name, (table, placement, _) in tables.items()
    }
    collection = Collection(described, {name: Feature(name) for name in tables})
    state = _state(collection)
    wide = {name: table.num_embeddings >= 2**31 for name, (table, _, _) in tables.items()}
    batch = {
        name: jax.ShapeDtypeStruct((devices * bags, length), np.int64 if wide[name] else np.int32)
        for name, (_, _, (bags, length)) in tables.items()
    }

    def forward(state: Any, batch: Any) -> Any:
        return lookup_features(collection, state, batch, Lookup(bounds="zero"))[0]

    def step(state: Any, batch: Any) -> Any:
        def loss(trained: Any) -> jax.Array:
            rows = forward(collection.replaced(state, trained), batch)
            return jnp.sum(jnp.stack([jnp.sum(array) for array in rows.values()]))

        return jax.grad(loss)(collection.trained(state))

    with jax.enable_x64(True) if any(wide.values()) else contextlib.nullcontext():
        counts = [
            list(_operands(jax.make_jaxpr(run)(state, batch).jaxpr)) for run in (forward, step)
        ]
    first, further = (
        [sum(nbytes for nbytes, repeated in operands if repeated is again) for operands in counts]
        for again in (False, True)
    )
    once = sum(not repeated for _, repeated in counts[1])
    summed = frozenset(
        name
        for name, (_, _, sizes) in tables.items()
        if _sums_travel(described[name], state[name], sizes)
    )
    return ExchangeBytes(first[0], first[1] - first[0], further[1], once, summed)


def _sums_travel(table: ShardedTable, state: Any, sizes: tuple[int, int]) -> bool:
    bags, length = sizes
    segments = bags * table.layout.columns
    ids, ends = (jax.ShapeDtypeStruct((segments, n), jnp.int32) for n in (length, 2))
    lookup = Lookup(bounds="zero", wanted=NeededCotangents(frozenset(table.spec.trained_names)))
    batch = Batch(ids, ends, None, rectangular=True)
    return sums_travel(Call(BoundTable(table, lookup), state, batch, ()))


class _Described(ShardedTable):
    """A table on devices that are only described."""

    def _check(self) -> None:
        pass

    @functools.cached_property
    def group(self) -> ShardedGroup:
        return ShardedGroup(self.mesh, self.axes)


def _state(collection: Collection) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {}
    for name, table in collection.tables.items():
        assert isinstance(table, ShardedTable)
        layout = table.layout
        arrays = jax.eval_shape(table.sharding.rows.init, jax.random.key(0))
        for array in table.row_arrays:
            shape = (layout.rows * layout.devices, *arrays[array].shape[1:])
            arrays[array] = jax.ShapeDtypeStruct(shape, arrays[array].dtype)
        pages = jax.ShapeDtypeStruct((layout.num_pages, layout.replicas), jnp.int32)
        state[name] = {**arrays, PAGES: pages}
    if collection.sharing:
        shared = functools.partial(init_shared, len(collection.sharing))
        state[UPDATES] = jax.eval_shape(shared)
    return state


def _operands(jaxpr: Jaxpr, repeated: bool = False) -> Iterator[tuple[int, bool]]:
    """Bytes of the operands of every collective, and whether it is in a loop."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _COLLECTIVES:
            # A gathered operand goes to all devices.
            gathers = equation.primitive.name == "all_gather"
            sent: list[Any] = [x.aval for x in (equation.outvars if gathers else equation.invars)]
            yield sum(aval.size * aval.dtype.itemsize for aval in sent), repeated
        for inner in _inner(equation.params):
            yield from _operands(inner, repeated or equation.primitive.name == "while")


def _inner(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            one = getattr(one, "jaxpr", one)
            if isinstance(one, Jaxpr):
                yield one
