"""Eager calls on sharded collections compile their programs once."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

import jax_tt

COMPILED = "/jax/core/compile/backend_compile_duration"


def compilations(call: Callable[[], Any]) -> int:
    """Programs that are compiled, or taken from the cache on disk, during a call."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready(call())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return events.count(COMPILED)


@functools.cache
def sharded(kind: AxisType) -> Any:
    """A layer on four devices: keys, rows, and what counts out-of-range ids."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(kind,))
    rule = jax_tt.optimizers.Adagrad(0.1)
    tables = {
        "item": jax_tt.hash_table(64, 8, optimizer=rule, max_capacity=256),
        "ad": jax_tt.dense_table(32, 8, optimizer=rule),
    }
    features = {name: jax_tt.Feature(name) for name in tables}
    return jax_tt.EmbedCollection(tables, features, mesh=mesh, axis="model", rngs=nnx.Rngs(0))


def batch(first: int) -> dict[str, Any]:
    ids = np.arange(first, first + 16).reshape(8, 2)
    return {"item": jax_tt.dynamic.split_keys(ids), "ad": jnp.asarray(ids)}


def statistics(embed: Any) -> Any:
    table = embed.tables["item"]
    return jax_tt.dynamic.statistics(table.table, table.state())


def remove(embed: Any, first: int) -> Any:
    table = embed.tables["item"]
    return jax_tt.dynamic.remove(table.table, table.state(), batch(first)["item"])


def dump(embed: Any, folder: Path) -> None:
    table = embed.tables["item"]
    jax_tt.files.dump(table.table, table.state(), folder)


def restored(embed: Any) -> Any:
    arrays = jax_tt.checkpoint.save_args(embed.collection, state := embed.arrays())
    return jax_tt.checkpoint.restore(embed.collection, state, arrays)


def test_second_calls_compile_nothing(tmp_path: Path) -> None:
    embed = sharded(AxisType.Explicit)
    calls: dict[str, Callable[[int], Any]] = {
        "insert": lambda k: embed.insert(batch(k)),
        "lookup": lambda k: embed(batch(k)),
        "statistics": lambda k: statistics(embed),
        "growth check": lambda k: embed.grow_if_full(max_load=0.99),
        "removal": lambda k: remove(embed, k),
        "dump": lambda k: dump(embed, tmp_path / str(k)),
        "states": lambda k: embed.states(),
        "checkpoint": lambda k: jax_tt.checkpoint.save_args(embed.collection, embed.arrays()),
        "restored": lambda k: restored(embed),
    }
    assert compilations(lambda: calls["insert"](0)) > 0  # so that zeros below mean something
    for name, call in calls.items():
        call(1)
        assert compilations(lambda call=call: call(2)) == 0, name


def test_calls_within_a_mesh_that_is_set() -> None:
    """Arrays that a call makes are then on the mesh, with Explicit axes."""
    embed, alone = sharded(AxisType.Explicit), sharded(AxisType.Auto)
    ids = batch(64)
    expected = alone(ids)
    placed = embed.host_batch({name: np.arange(64, 80).reshape(8, 2) for name in ids})
    for name, rows in embed(placed).items():  # the ids are on the mesh, and no mesh is set
        np.testing.assert_array_equal(rows, expected[name])
    with jax.set_mesh(jax.make_mesh((4,), ("model",))):
        found = embed(ids)
        embed.grow_if_full(max_load=0.99)
        again = embed(ids)
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name], rows)
        np.testing.assert_array_equal(again[name], rows)


def test_equal_descriptions_share_programs() -> None:
    """Programs are found by what a table is, not by which object describes it."""
    embed = sharded(AxisType.Auto)
    embed(batch(0))
    sharded.cache_clear()
    again = sharded(AxisType.Auto)
    again.insert(batch(1))
    assert again.tables["ad"].table is not embed.tables["ad"].table
    assert compilations(lambda: again(batch(1))) == 0
