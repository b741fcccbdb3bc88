"""Calls of every kind under the switches of JAX and Flax that users turn on to find faults in their programs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt

RULE = jax_tt.optimizers.Adagrad(0.1)
IDS = np.array([[3, 1], [0, 39], [3, 3]], np.int32)
BAGS = jax_tt.Bags.from_ragged([[3, 1], [], [39]])
TABLES = {
    "dense": jax_tt.dense_table(40, 8, optimizer=RULE),
    "train": jax_tt.tt_table(40, 8, tt_ranks=2, optimizer=RULE),
    "plain": jax_tt.dense_table(40, 8),
}
FEATURES = {
    "pooled": jax_tt.Feature("dense", combiner="mean"),
    "again": jax_tt.Feature("dense"),
    "train": jax_tt.Feature("train"),
    "plain": jax_tt.Feature("plain", combiner="max"),
}
COLLECTION = jax_tt.Collection(TABLES, FEATURES)
# Strict promotion of types, another one, is on in all tests.
SWITCHES = {
    "checking_leaks": jax.checking_leaks,
    "tree_mode": lambda: nnx.set_graph_updates(False),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "debug_nans": lambda: jax.debug_nans(True),
    "enable_x64": lambda: jax.enable_x64(True),
    "disable_jit": jax.disable_jit,
}
LAYERS = {
    "ordinary": lambda: (jax_tt.EmbedBag(40, 8, rngs=nnx.Rngs(0)), IDS),
    "fused": lambda: (jax_tt.EmbedBag(40, 8, optimizer=RULE, rngs=nnx.Rngs(0)), IDS),
    "collection": lambda: (
        jax_tt.EmbedCollection(TABLES, FEATURES, statistics=True, rngs=nnx.Rngs(0)),
        {**dict.fromkeys(FEATURES, IDS), "again": BAGS},
    ),
    "hashed": lambda: (
        jax_tt.TableEmbedBag(jax_tt.hash_table(16, 8, optimizer=RULE), rngs=nnx.Rngs(0)),
        jax_tt.dynamic.split_keys(IDS.astype(np.int64) + 2**40),
    ),
    "cached": lambda: (
        jax_tt.TTEmbedBag(
            40, 8, tt_ranks=2, optimizer=RULE, cache=jax_tt.RowCache(16, ways=4), rngs=nnx.Rngs(0)
        ),
        IDS,
    ),
}


KINDS = ("functions", *LAYERS)


def loss(call, batch):
    return sum(jnp.sum(jnp.sin(rows)) for rows in jax.tree.leaves(call(batch)))


def looked_up(state, batch):
    return jax_tt.lookup_features(COLLECTION, state, batch)[0]


def differentiated(state, batch):
    def of(trained):
        return loss(functools.partial(looked_up, COLLECTION.replaced(state, trained)), batch)

    return jax.value_and_grad(of)(COLLECTION.trained(state))


def called(layer, opt, batch):
    del opt
    return layer(batch)


def step(layer, opt, batch):
    value, grads = jax_tt.value_and_grad(loss)(layer, batch)
    opt.update(layer, grads)
    return value


def results(kind, compiled):
    """What a call and then a step return, and what they leave; the arrays are made where any transfer is allowed."""
    with jax.transfer_guard("allow"):
        if kind == "functions":
            batch = jax.tree.map(jnp.asarray, dict.fromkeys(FEATURES, IDS))
            call, change, given = (
                looked_up,
                differentiated,
                (COLLECTION.init(jax.random.key(0)), batch),
            )
        else:
            layer, batch = LAYERS[kind]()
            opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
            call, change, given = called, step, (layer, opt, jax.tree.map(jnp.asarray, batch))
    found = call(*given), compiled(change)(*given)
    return *found, [nnx.state(one) for one in given if isinstance(one, nnx.Module)]


@functools.cache
def usual(kind):
    return jax.tree.map(np.asarray, results(kind, lambda step: step))


@pytest.mark.parametrize("case", list(itertools.product(SWITCHES, KINDS)), ids="-".join)
def test_a_call_and_a_compiled_step(case):
    switch, kind = case
    want = usual(kind)
    with SWITCHES[switch]():
        got = results(kind, nnx.jit)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, got, want)


def test_gradients_of_flax_in_tree_mode():
    """They are those of all variables, of which one counts ids out of range."""

    def stepped(**options):
        layer = jax_tt.EmbedBag(40, 8, rngs=nnx.Rngs(0))
        opt = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
        grads = nnx.grad(loss, **options)(layer, jnp.asarray(IDS) + 2)
        opt.update(layer, grads)
        return nnx.state(layer)

    want = stepped()
    assert int(want["out_of_range"][...]) == 1
    with nnx.set_graph_updates(False):
        jax.tree.map(np.testing.assert_array_equal, stepped(allow_int=True), want)
