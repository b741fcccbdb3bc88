"""The linen layers with a row cache: counted in training, refreshed by one line in the step, wherever they are."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import tt_table
from jax_tt._kinds.cached.table import cache_directory_of
from jax_tt.linen import TableEmbed

N, D = 1000, 16
RULES = {"optax": None, "fused": jax_tt.optimizers.Adagrad(0.1)}
STEPS = 10


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.zipf(1.3, (32, 4)) % N) for _ in range(count)]


class Tower(nn.Module):
    cache: jax_tt.RowCache
    optimizer: Any = None

    @nn.compact
    def __call__(self, ids):
        table = tt_table(N, D, tt_ranks=4, optimizer=self.optimizer, cache=self.cache)
        return TableEmbed(table, combiner="sum")(ids)


class Model(nn.Module):
    """Two tables, one of them in a module below, with caches that are due at different times."""

    gradients: str
    rule: str

    @nn.compact
    def __call__(self, ids, train=False):
        rule = RULES[self.rule]
        often = jax_tt.RowCache(100, ways=4, refresh_every=3, gradients=self.gradients)
        seldom = dataclasses.replace(often, refresh_every=5, write_back=None)
        users = Tower(seldom, rule, name="users")(ids)
        table = tt_table(N, D, tt_ranks=4, optimizer=rule, cache=often)
        items = TableEmbed(table, name="items")(ids)
        hidden = users + jnp.mean(items, axis=1)
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(hidden))


class State(jax_tt.linen.TrainState):
    row_cache: Any


@pytest.mark.parametrize(("gradients", "rule"), [("rows", "optax"), ("cores", "fused")])
def test_a_compact_model_with_a_train_state(gradients, rule):
    model = Model(gradients, rule)
    stream = batches(STEPS)
    variables = model.init(jax.random.key(0), stream[0])
    row_cache = variables.pop("row_cache")
    state = State.create(
        apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1), row_cache=row_cache
    )
    state = state.replace(step=jnp.int32(0))  # an int, at first, would be another program
    structure = jax.tree.structure(state)

    traces = []

    @partial(jax.jit, donate_argnums=0)
    def step(state, ids, key):
        traces.append(ids)
        given = {"train": True, "rngs": {"dropout": key}}

        def loss(variables):
            out, new = state.apply_fn(variables, ids, mutable=["row_cache"], **given)
            return jnp.mean((out - 1) ** 2), new["row_cache"]

        variables = {**state.variables, "row_cache": state.row_cache}
        (value, row_cache), grads = jax_tt.linen.value_and_grad(loss, has_aux=True)(variables)
        state = state.apply_gradients(grads=grads)
        variables = {**state.variables, "row_cache": row_cache}
        after = jax_tt.linen.refresh_caches(model, variables, ids, **given)
        fused = after.get("_overwrite_with_gradient", {})
        return state.replace(
            row_cache=after["row_cache"], params=after["params"], fused=fused
        ), value

    losses = []
    for n, ids in enumerate(stream):
        state, value = step(state, ids, jax.random.key(n))
        losses.append(float(value))
    assert jax.tree.structure(state) == structure and len(traces) == 1
    assert losses[-1] < losses[0]
    row_cache = state.row_cache
    for own, refreshes in ((row_cache["items"], 3), (row_cache["users"]["TableEmbed_0"], 2)):
        found = cache_directory_of(own).statistics()
        assert (found["calls"], found["refreshes"]) == (STEPS, refreshes)
        assert 0 < found["misses"] < found["requested"]
    # Applied without a mutable collection, nothing is counted.
    variables = {**state.variables, "row_cache": row_cache}
    assert model.apply(variables, stream[0]).shape == (32, 1)


def counted():
    """A tower and its variables after a batch."""
    model = Tower(jax_tt.RowCache(100, ways=4, write_back=None), RULES["fused"])
    ids = batches(1)[0]
    variables = model.init(jax.random.key(0), ids)
    _, row_cache = model.apply(variables, ids, mutable=["row_cache"])
    return model, {**variables, **row_cache}, ids


def test_they_do_what_the_nnx_layers_do():
    model, variables, ids = counted()
    layer = jax_tt.TTEmbedBag(
        N, D, tt_ranks=4, optimizer=model.optimizer, cache=model.cache, rngs=nnx.Rngs(0)
    )
    for path, value in jax.tree.leaves_with_path(variables):
        getattr(layer, path[-1].key)[...] = value
    ((name, found),) = jax_tt.linen.find_layers(model, variables, ids).items()
    for change, method in (
        (jax_tt.cache.populate, "populate"),
        (jax_tt.cache.flush, "flush"),
        (jax_tt.cache.reset, "reset_cache"),
    ):
        update = partial(jax_tt.linen.update_table, found, fn=change, path=name)
        _, variables = jax.jit(update)(variables)
        nnx.jit(getattr(type(layer), method))(layer)
        for path, value in jax.tree.leaves_with_path(variables):
            np.testing.assert_array_equal(value, getattr(layer, path[-1].key)[...])


def test_boxes_and_other_collections_stay():
    class Noted(nn.Module):
        @nn.compact
        def __call__(self, ids):
            boxed = partial(nn.with_partitioning, names=(None, None, "model", None))
            cache = jax_tt.RowCache(100, ways=4, write_back=None)
            self.variable("notes", "seen", lambda: jnp.ones(3))
            return TableEmbed(tt_table(N, D, tt_ranks=4, cache=cache), partitioning=boxed)(ids)

    model, ids = Noted(), batches(1)[0]
    _, variables = model.apply(model.init(jax.random.key(0), ids), ids, mutable=True)
    ((path, layer),) = jax_tt.linen.find_layers(model, variables, ids).items()
    _, changed = jax_tt.linen.update_table(layer, variables, jax_tt.cache.populate, path=path)
    assert jax.tree.structure(changed) == jax.tree.structure(variables)
    assert isinstance(changed["params"]["TableEmbed_0"]["core_0"], nn.Partitioned)


def test_what_does_not_fit_is_named():
    model, variables, ids = counted()
    refresh = jax_tt.linen.refresh_caches
    with pytest.raises(
        ValueError, match=r"model: got Dense, which calls no layer with a row cache"
    ):
        dense = nn.Dense(3)
        refresh(dense, dense.init(jax.random.key(0), jnp.ones(4)), jnp.ones(4))
    with pytest.raises(
        ValueError, match=r"variables: hold no cache_tags at TableEmbed_0 in the collection"
    ):
        refresh(model, {**variables, "row_cache": {}}, ids)
    with pytest.raises(TypeError, match=r"model: got a dict; expected a flax.linen module"):
        refresh(variables, ids)

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, ids):
            kind = nn.vmap(Tower, {"params": 0, "row_cache": 0}, split_rngs={"params": True})
            return kind(model.cache)(ids)

    stacked, ids = Stacked(), jnp.stack([ids, ids])
    with pytest.raises(ValueError, match=r"inside nn.scan or nn.vmap"):
        variables = jax.eval_shape(stacked.init, jax.random.key(0), ids)
        jax.eval_shape(partial(refresh, stacked), variables, ids)
