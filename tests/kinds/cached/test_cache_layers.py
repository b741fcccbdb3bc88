"""The NNX layers with a row cache: optax and fused, both ways of training cached rows."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from tests.helpers import assert_same_bits

N, D = 1000, 16
RULES = {"optax": None, "fused": jax_tt.optimizers.Adagrad(0.1)}
both = pytest.mark.parametrize("gradients", ["rows", "cores"])
rules = pytest.mark.parametrize("rule", RULES)


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.zipf(1.3, (32, 4)) % N) for _ in range(count)]


class Tower(nnx.Module):
    def __init__(self, cache, optimizer, rngs):
        self.items = jax_tt.TTEmbedBag(
            N, D, tt_ranks=4, optimizer=optimizer, cache=cache, rngs=rngs
        )
        self.head = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.items(ids))


@nnx.jit
def nnx_step(model, opt, ids):
    loss, grads = jax_tt.value_and_grad(lambda m: jnp.mean((m(ids) - 1) ** 2))(model)
    opt.update(model, grads)
    return loss


def make(gradients, rule, **options):
    cache = jax_tt.RowCache(100, ways=4, refresh_every=3, gradients=gradients, **options)
    model = Tower(cache, RULES[rule], nnx.Rngs(0))
    return model, jax_tt.FusedOptimizer(model, optax.sgd(0.1))


@nnx.jit
def called(model, ids):
    return model(ids)


@partial(nnx.jit, static_argnums=1)
def changed(layer, method):
    getattr(layer, method)()


def cached_layer(gradients, rows=40, ranks=4, **options):
    """A layer whose cache holds its first rows, and the layer without a cache."""
    cache = jax_tt.RowCache(50, ways=50, gradients=gradients, **options)
    layer = jax_tt.TTEmbed(N, D, tt_ranks=ranks, cache=cache, rngs=nnx.Rngs(0))
    called(layer, jnp.arange(rows))
    changed(layer, "populate")
    return layer, jax_tt.TTEmbed(N, D, tt_ranks=ranks, rngs=nnx.Rngs(0))


@both
@rules
def test_training_counts_refreshes_and_learns(gradients, rule):
    """Also from a state that was saved in the middle: from there on bit for bit."""
    model, opt = make(gradients, rule)
    stream, losses = batches(10), []
    for number, ids in enumerate(stream):
        if number == 5:
            saved = jax.device_get(nnx.state((model, opt)))
        losses.append(float(nnx_step(model, opt, ids)))
    figures = model.items.cache_statistics()
    assert losses[-1] < losses[0]
    assert figures["calls"] == 10
    assert figures["requested"] == sum(ids.size for ids in stream)
    assert figures["unique"] == sum(len(np.unique(ids)) for ids in stream)
    assert figures["refreshes"] == 3
    assert 0 < figures["misses"] < figures["requested"]
    again = make(gradients, rule)
    nnx.update(again, saved)
    for ids in stream[5:]:
        nnx_step(*again, ids)
    assert_same_bits(nnx.state(again), nnx.state((model, opt)))


def test_evaluation_counts_nothing():
    model, opt = make("rows", "optax")
    ids, more = batches(2)
    nnx_step(model, opt, ids)
    before = jax.device_get(nnx.state(model))
    model.eval()
    called(model, more)
    model.train()
    assert_same_bits(nnx.state(model), before)
    called(model, more)
    assert model.items.cache_statistics()["calls"] == 2


@both
def test_attend_scores_cached_rows_by_their_own_values(gradients):
    layer, _ = cached_layer(gradients, write_back=None)
    layer.cache_rows[...] = layer.cache_rows[...] + 1
    layer.eval()
    query = np.random.default_rng(1).normal(size=(3, D)).astype(np.float32)
    scores = nnx.jit(lambda layer: layer.attend(query))(layer)
    np.testing.assert_allclose(scores[:, :60], query @ called(layer, jnp.arange(60)).T, 1e-4)


@pytest.mark.slow
@both
def test_attend_trains_every_row(gradients):
    layer, plain = cached_layer(gradients, write_back=None)
    query = np.random.default_rng(1).normal(size=(3, D)).astype(np.float32)

    @nnx.jit
    def gradient(layer):
        return jax_tt.grad(lambda layer: jnp.sum(layer.attend(query)[:, :20] ** 2))(layer)

    got, wanted = gradient(layer), gradient(plain)
    if gradients == "cores":
        for name in ("core_0", "core_1", "core_2"):
            np.testing.assert_allclose(got[name][...], wanted[name][...], 1e-4, 1e-6)
    else:
        assert np.any(np.asarray(got["cache_rows"][...]) != 0, axis=1).sum() == 20


def test_a_refresh_is_due_however_many_batches_a_step_counts():
    cache = jax_tt.RowCache(50, ways=5, refresh_every=2, write_back=None)
    layer = jax_tt.TTEmbed(N, D, tt_ranks=4, cache=cache, rngs=nnx.Rngs(0))
    refresh = nnx.jit(jax_tt.refresh_caches)
    ids = jnp.arange(4)
    called(layer, ids)
    for _ in range(3):
        called(layer, ids)
        called(layer, ids)
        refresh(layer)
    assert layer.cache_statistics()["refreshes"] == 3
    refresh(layer)  # nothing was counted since
    assert layer.cache_statistics()["refreshes"] == 3


def test_flush_puts_what_rows_learned_into_the_cores():
    layer, plain = cached_layer("rows", rows=10, ranks=8)
    layer.eval()
    ids = jnp.arange(10)
    first = called(layer, ids)
    held = layer.cache_tags[...].reshape(-1, 1) >= 0
    layer.cache_rows[...] = layer.cache_rows[...] + jnp.where(held, 0.01, 0)
    learned = called(layer, ids)
    changed(layer, "flush")
    for name in ("core_0", "core_1", "core_2"):
        getattr(plain, name)[...] = getattr(layer, name)[...]
    flushed = called(plain, ids)
    left = flushed - learned
    assert float(jnp.sum(left**2)) < 0.1 * float(jnp.sum((first - learned) ** 2))
    np.testing.assert_allclose(called(layer, ids), flushed, rtol=1e-5, atol=1e-7)
    changed(layer, "reset_cache")
    assert layer.cache_statistics()["occupied"] == 0 == layer.cache_statistics()["requested"]


def test_refresh_caches_serves_a_stock_optimizer():
    cache = jax_tt.RowCache(50, ways=5, refresh_every=2, write_back=None)
    model = Tower(cache, None, nnx.Rngs(0))
    opt = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, opt, ids):
        opt.update(model, jax_tt.grad(lambda m: jnp.mean(m(ids) ** 2))(model))
        jax_tt.refresh_caches(model)

    for ids in batches(4):
        step(model, opt, ids)
    assert model.items.cache_statistics()["refreshes"] == 2


def test_without_a_cache_there_is_nothing_to_populate():
    layer = jax_tt.TTEmbed(N, D, rngs=nnx.Rngs(0), name="items")
    with pytest.raises(ValueError, match=r"items: has no row cache; build it with cache="):
        layer.populate()


def test_what_is_no_cache_is_refused():
    for wrong, message in [
        (7, r"cache: got 7; expected None or a RowCache"),
        (jax_tt.RowCache, r"cache: got <class"),
    ]:
        with pytest.raises(TypeError, match=message):
            jax_tt.TTEmbed(N, D, cache=wrong, rngs=nnx.Rngs(0))


def test_options_that_do_not_fit_are_named():
    for options, error, message in [
        ({"capacity": 0}, ValueError, r"RowCache.capacity: got 0"),
        ({"capacity": 2.5}, TypeError, r"RowCache.capacity: got 2.5"),
        ({"capacity": 9, "ways": -1}, ValueError, r"RowCache.ways: got -1"),
        ({"capacity": 9, "policy": "fifo"}, ValueError, r"RowCache.policy: got 'fifo'"),
        ({"capacity": 9, "gradients": "both"}, ValueError, r"RowCache.gradients: got 'both'"),
        ({"capacity": 9, "refresh_every": 0}, ValueError, r"RowCache.refresh_every: got 0"),
        ({"capacity": 9, "write_back": True}, TypeError, r"RowCache.write_back: got True"),
        ({"capacity": 9, "dtype": jnp.int8}, ValueError, r"RowCache.dtype: got int8"),
    ]:
        with pytest.raises(error, match=message):
            jax_tt.RowCache(**options)


def test_ids_beyond_31_bits_need_64_bit_jax():
    cache = jax_tt.RowCache(50)
    with pytest.raises(
        ValueError, match=r"cache: got a table of 3000000000 rows, .* jax_enable_x64"
    ):
        jax_tt.TTEmbed(3_000_000_000, D, tt_ranks=2, cache=cache, rngs=nnx.Rngs(0))


def test_refresh_caches_refuses_what_is_no_nnx_model():
    for model in [{"params": {"kernel": np.ones(3)}}, nn.Dense(3), None]:
        message = r"model: got .*; expected an NNX module.*jax_tt\.linen\.refresh_caches\(model"
        with pytest.raises(TypeError, match=message):
            jax_tt.refresh_caches(model)


def test_caches_of_other_types_are_others():
    caches = [
        jax_tt.RowCache(24, dtype=dtype) for dtype in (None, "float64", "float32", "bfloat16")
    ]
    assert len(set(caches)) == len(caches)
    assert jax_tt.RowCache(24, dtype=jnp.float32) == jax_tt.RowCache(24, dtype="float32")
