"""Hash tables whose arrays a user shards: looked up shard by shard, and refused where keys are inserted or removed."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.lookup.table_shards import largest_message, mesh_of, placed

ROWS, WIDTH = 512, 8
KINDS = [AxisType.Auto, AxisType.Explicit]
REFUSED = r"words: embedding: is sharded as .*jax_tt\.shard_tables"


def _table():
    table = jax_tt.hash_table(
        ROWS, WIDTH, name="words", optimizer=jax_tt.optimizers.RowWiseAdagrad(0.5)
    )
    keys = np.random.default_rng(0).integers(0, 300, (16, 3))
    return table, _started(table, jax_tt.dynamic.split_keys(keys)), keys


@functools.partial(jax.jit, static_argnums=0)
def _started(table, keys):
    return jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), keys)[1]


def _on(mesh, keys):
    over = NamedSharding(mesh, P("data"))
    return jax.device_put(jax_tt.dynamic.split_keys(keys), over)


def _with_mesh(mesh, kind):
    return jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("change", ["insert", "remove"])
def test_changes_are_refused(kind, jit, change):
    table, state, keys = _table()
    mesh = mesh_of((2, 2), kind)
    shards = placed(table, state, mesh, P("model", None))
    keys = _on(mesh, keys)

    def call(state, keys):
        return getattr(jax_tt.dynamic, change)(table, state, keys)[1]

    with (
        _with_mesh(mesh, kind),
        pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=REFUSED),
    ):
        (jax.jit(call) if jit else call)(shards, keys)


def test_arrays_of_the_host_are_not():
    table, state, keys = _table()
    inserted, _ = jax_tt.dynamic.insert(table, jax.device_get(state), keys)
    assert int(inserted.counts["hits"]) == keys.size


def test_whole_tables_are_not():
    table, state, keys = _table()
    mesh = mesh_of((2, 2), AxisType.Auto)
    whole = placed(table, state, mesh, P())

    call = jax.jit(lambda state, keys: jax_tt.dynamic.insert(table, state, keys)[1])
    got = call(whole, _on(mesh, keys + 100))
    wanted = call(state, jax_tt.dynamic.split_keys(keys + 100))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_looked_up_and_stepped_in_their_shards(kind):
    table, state, keys = _table()
    mesh = mesh_of((2, 2), kind)
    rows = set(table.table.spec.row_arrays)
    over = {name: P("model", None) if name in rows else P() for name in state}
    shards = {
        name: jax.device_put(x, NamedSharding(mesh, P(*over[name][: x.ndim])))
        for name, x in state.items()
    }

    def step(state, keys):
        def loss(trained):
            options = jax_tt.Lookup(train=False)
            rows, _ = jax_tt.lookup(table, {**state, **trained}, keys, options)
            return jnp.sum(rows), rows

        trained = {name: state[name] for name in table.spec.trained_names}
        new, rows = jax.grad(loss, has_aux=True)(trained)
        return rows, {**state, **new}

    step = jax.jit(step)
    compiled = step.lower(shards, _on(mesh, keys)).compile()
    assert largest_message(compiled) < ROWS * WIDTH // 2
    found, after = compiled(shards, _on(mesh, keys))
    wanted, alone = step(state, jax_tt.dynamic.split_keys(keys))
    jax.tree.map(np.testing.assert_array_equal, (found, after), (wanted, alone))
    for name in rows:
        assert after[name].sharding.is_equivalent_to(shards[name].sharding, after[name].ndim)
