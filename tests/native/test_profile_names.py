"""Profiles name the table and the operation of every native call."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import optimizers

RULE = optimizers.SGD(0.1)
TABLES = {
    "dense": jax_tt.dense_table(64, 8, optimizer=RULE, name="items"),
    "train": jax_tt.tt_table(64, 8, tt_ranks=2, optimizer=RULE, name="items"),
    "cached": jax_tt.tt_table(
        64, 8, tt_ranks=2, optimizer=RULE, cache=jax_tt.RowCache(10, ways=5), name="items"
    ),
    "nameless": jax_tt.dense_table(64, 8, optimizer=RULE),
}


def native_calls(function: Any, *args: Any) -> dict[str, str]:
    """The name in profiles of every native call of a program, by target."""
    text = jax.jit(function).lower(*args).compile().as_text()
    lines = [line for line in text.splitlines() if 'custom_call_target="jax_tt_' in line]
    return {
        re.findall(r'custom_call_target="jax_tt_(\w+)_v\d+"', line)[0]: re.findall(
            r'op_name="([^"]*)"', line
        )[0]
        for line in lines
    }


@pytest.mark.parametrize("kind", TABLES)
def test_forward_and_backward(kind: str) -> None:
    table = TABLES[kind]
    state = table.init(jax.random.key(0))
    trained = {name: state[name] for name in table.spec.trained_names}
    rest = {name: x for name, x in state.items() if name not in trained}

    def loss(trained: Any, ids: jax.Array) -> jax.Array:
        return jax_tt.lookup(table, {**rest, **trained}, ids, method="native")[0].sum()

    calls = native_calls(jax.grad(loss), trained, jnp.arange(8))
    assert any("forward" in target for target in calls)
    assert any("update" in target for target in calls)
    for target, name in calls.items():
        assert f"({table.name or 'DenseTable'})" in name and f"/{target}/" in name
        assert ("transpose" in name) == ("update" in target)


def test_tables_of_one_call() -> None:
    tables = {name: jax_tt.dense_table(64, 8, optimizer=RULE) for name in "abcde"}
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})
    state = collection.init(jax.random.key(0))
    batch = {name: jnp.array([[1], [2]]) for name in tables}

    def rows(state: Any) -> Any:
        return jax_tt.lookup_features(collection, state, batch, method="native")[0]

    ((target, name),) = native_calls(rows, state).items()
    assert (
        target == "dense_forward"
        and "/a (features a)+b (features b)+c (features c)+2 more/" in name
    )


def test_a_sharded_batch() -> None:
    table = TABLES["dense"]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = jax.device_put(table.init(jax.random.key(0)), NamedSharding(mesh, P()))
    ids = jax.device_put(jnp.arange(64), NamedSharding(mesh, P("data")))

    def loss(state: Any, ids: jax.Array) -> jax.Array:
        return jax_tt.lookup(table, state, ids, method="native")[0].sum()

    calls = native_calls(jax.grad(loss), state, ids)
    assert set(calls) == {"dense_forward", "dense_update"}
    assert all("(items)" in name for name in calls.values())


def test_insertion_and_maintenance() -> None:
    table = jax_tt.hash_table(64, 8, name="users")
    state = table.init(jax.random.key(0))

    def insert(state: Any, keys: Any) -> Any:
        return jax_tt.dynamic.insert(table, state, keys)[1]

    calls = native_calls(insert, state, jax_tt.dynamic.split_keys(np.arange(8)))
    assert calls and all("/users/" in name for name in calls.values())
    cached = TABLES["cached"]
    calls = native_calls(
        lambda state: jax_tt.cache.populate(cached, state), cached.init(jax.random.key(0))
    )
    assert any("/items/" in name and "populate" in name for name in calls.values())
