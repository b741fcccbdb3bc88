"""Which changes of a fused table its sentinel notices, and which it takes for rounding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from jax_tt import optimizers
from jax_tt._table.state import SENTINEL_TOLERANCE as TOLERANCE
from tests.helpers import raises

RULE = optimizers.SGD(0.1)
IDS = np.array([[1, 2]], np.int32)
ONE = np.float32(1)


TABLES = {
    "tt": jax_tt.tt_table(12, 4, tt_ranks=2, optimizer=RULE),
    "dense": jax_tt.dense_table(12, 4, optimizer=RULE),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def loss(kind: str, method: str, state: dict[str, jax.Array]) -> jax.Array:
    return jnp.sum(jax_tt.lookup_bags(TABLES[kind], state, IDS, method=method)[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def stepped(kind: str, method: str, state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.grad(lambda state: loss(kind, method, state))(state)


def refused(kind: str, method: str, state: dict[str, Any]) -> bool:
    try:
        return bool(np.isnan(loss(kind, method, state)))
    except Exception as error:
        assert raises(method) and "was changed" in str(error)
        return True


@pytest.mark.parametrize("kind", ["tt", "dense"])
def test_the_tolerance_is_the_same_everywhere(kind, method):
    state = TABLES[kind].init(jax.random.key(0))
    edge = np.float32(1 + TOLERANCE), np.float32(1 - TOLERANCE)
    beyond = np.nextafter(edge[0], np.float32(2)), np.nextafter(edge[1], np.float32(0))
    for sentinel in (ONE, *edge):
        assert not refused(kind, method, state | {"sentinel": sentinel})
    for sentinel in (*beyond, np.nan, -ONE):
        assert refused(kind, method, state | {"sentinel": np.float32(sentinel)})


def test_what_rounding_did_does_not_add_up(method):
    state = TABLES["dense"].init(jax.random.key(0)) | {"sentinel": np.float32(1.0000001)}
    assert stepped("dense", method, state)["sentinel"] == 1


def ten_checkpoints(table):
    return jax.tree.map(lambda x: sum([np.float32(0.1) * np.asarray(x)] * 10), table)


def ema(table):
    average = optax.ema(0.999)
    mean, state = table, average.init(table)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(20):
            mean, state = jax.jit(average.update)(table, state)
    return mean


@pytest.mark.parametrize("average", [ten_checkpoints, ema])
def test_averages_of_tables_are_read(average, method):
    state = average(TABLES["tt"].init(jax.random.key(0)))
    assert not refused("tt", method, state)
    # They train on, and so do averages of next values.
    new = stepped("tt", method, state)
    assert new["sentinel"] == 1 and not refused("tt", method, average(new))


def stepped_by(tx):
    def change(table):
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = tx.update(table, tx.init(table), table)
        return optax.apply_updates(table, updates)

    return change


def scaled(factor):
    return lambda table: jax.tree.map(lambda x: np.asarray(x) * np.float32(factor), table)


CHANGES = {
    "twice": scaled(2.0),
    "nearly": scaled(0.999),
    "clip": lambda table: jax.tree.map(lambda x: x / optax.tree.norm(table), table),
    "slow adam": stepped_by(optax.adam(1e-4)),
    "sgd": stepped_by(optax.sgd(1e-3)),
    "adamw": stepped_by(optax.adamw(1e-4)),
    "lion": stepped_by(optax.lion(1e-4)),
}


def test_changes_are_noticed():
    state = TABLES["dense"].init(jax.random.key(0))
    for name, change in CHANGES.items():
        assert refused("dense", "reference", change(state)), name


def test_the_sentinel_is_printed_with_the_digits_that_tell_it_from_1():
    layer = jax_tt.EmbedBag(12, 4, optimizer=RULE, rngs=nnx.Rngs(0))
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    grads = jax_tt.grad(lambda m: jnp.sum(m(IDS)))(layer)
    moved = np.float32(1.0000623)
    grads.next_values.by_path["sentinel",] = jnp.asarray(moved)
    with pytest.raises(ValueError, match=r"sentinel is 1\.0000623, expected 1"):
        opt.update(layer, grads)
    if raises("native"):
        layer.sentinel[...] = jnp.asarray(moved)
        with pytest.raises(Exception, match=r"sentinel is 1\.0000623, expected 1"):
            jax.block_until_ready(layer(IDS))


def test_an_average_of_models_is_evaluated_and_trained():
    layer = jax_tt.EmbedBag(12, 4, optimizer=RULE, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # the whole state, counters of ids out of range and all
        nnx.update(layer, ema(nnx.to_pure_dict(nnx.state(layer))))
    assert np.isfinite(layer(IDS)).all()
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    opt.update(layer, jax_tt.grad(lambda m: jnp.sum(m(IDS)))(layer))
    assert layer.sentinel[...] == 1 and np.isfinite(layer(IDS)).all()
