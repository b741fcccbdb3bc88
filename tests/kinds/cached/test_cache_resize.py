"""A row cache of another capacity, shape or policy: what stays, what leaves, and what the counts become."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import RowCache
from jax_tt._kinds.cached.change import placed
from tests.helpers import assert_close, assert_same_bits, dense_table, make_case
from tests.kinds.cached import cache_parts
from tests.kinds.cached.cache_case import SHAPE, D, N, trained, warm
from tests.kinds.cached.cache_model import SCORINGS, SIZES, Model, Sizes, Subject, compare

IDS = 90
SMALL, LARGE = SIZES["odd"], Sizes(5, 4, 2, 5, IDS)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _placed(directory, old, new, layout):
    return placed(directory, old, new, layout, jnp.int32)


@pytest.mark.parametrize("new", SCORINGS)
@pytest.mark.parametrize("old", SCORINGS)
def test_the_directory_is_that_of_the_model(old, new):
    """Over batches, from one size and policy to another and back."""
    rng = np.random.default_rng(0)
    old, new = SCORINGS[old], SCORINGS[new]
    model, subject = Model(SMALL, old), Subject(SMALL, old, "auto")

    def batches(count):
        for _ in range(count):
            keys = ((IDS ** rng.random(48)).astype(int) - 1).tolist()
            for one in (model, subject):
                one.observe(keys)
                one.populate()
            keys = rng.integers(0, IDS, 48).tolist()
            model.observe(keys)
            subject.observe(keys)

    batches(4)
    for sizes, scoring in ((LARGE, new), (SMALL, old)):
        cached = set(model.rows)
        model.resize(sizes, scoring)
        layout = (sizes.sets, sizes.ways, sizes.sets * sizes.buckets, sizes.room)
        was = subject.directory.tags.reshape(-1)
        directory, slots = _placed(subject.directory, subject.scoring, scoring, layout)
        subject.sizes, subject.scoring, subject.directory = sizes, scoring, directory
        model.check_promises()
        compare(model, directory)
        stay = slots < directory.slots
        np.testing.assert_array_equal(directory.tags.reshape(-1)[slots[stay]], was[stay])
        assert set(was[stay].tolist()) == set(model.rows) <= cached
        batches(3)
        model.check_promises()
        compare(model, subject.directory)


@pytest.mark.parametrize("gradients", ["rows", "cores"])
def test_rows_that_stay_are_the_same_and_others_are_written_back(gradients):
    rule = jax_tt.optimizers.Adam(0.1)
    old = RowCache(24, ways=4, counters=64, gradients=gradients)
    new = RowCache(4, ways=4, counters=32, gradients=gradients)
    hot = np.repeat(np.arange(0, 60, 3), np.arange(1, 21))  # the larger the hotter
    table = warm(make_case(SHAPE, "float32", False).cores, old, "auto", hot, optimizer=rule)
    if gradients == "rows":
        table = trained(table)
        noise = np.random.default_rng(0).normal(size=table.values.shape).astype(np.float32)
        slots = {"slot_mu_0": noise, "slot_nu_0": noise + 1}
        table = table._replace(rows=table.rows | slots)
    resize = jax.jit(
        partial(cache_parts.resize, num_embeddings=N, optimizer=rule), static_argnums=(1, 2)
    )
    small = resize(table, old, new)
    assert small.directory.tags.tolist() == [[57, 54, 51, 48]]
    was = np.asarray(table.directory.tags).reshape(-1)
    at = [int(np.flatnonzero(was == row)[0]) for row in (57, 54, 51, 48)]
    np.testing.assert_array_equal(small.values, table.values[np.array(at)])
    figures = small.directory.statistics()
    left = len(was[was >= 0]) - 4
    assert left > 10 and figures["evicted"] == left
    assert set(small.directory.ghost_tags.reshape(-1).tolist()) > {0, 3, 45}
    if gradients == "rows":
        for slot, kept in zip(table.slots, small.slots, strict=True):
            np.testing.assert_array_equal(kept, slot[np.array(at)])
        assert figures["written_back"] == left
        gone = np.array([i for i, row in enumerate(was) if row >= 0 and i not in at])
        before, after = (dense_table(t.cores, N)[was[gone]] for t in (table, small))
        wanted = np.asarray(table.values)[gone]
        assert np.sum((wanted - after) ** 2) < 0.9 * np.sum((wanted - before) ** 2)
    # No row leaves, which needs no write-back.
    new, old = (dataclasses.replace(cache, write_back=None) for cache in (new, old))
    large = resize(small, new, old)
    assert large.values.shape == (24, D)
    tags = large.directory.tags.reshape(-1).tolist()
    for way, row in enumerate((57, 54, 51, 48)):
        np.testing.assert_array_equal(large.values[tags.index(row)], small.values[way])
    assert_close(large.cores[0], small.cores[0], 0)


class Tower(nnx.Module):
    def __init__(self, cache, optimizer=None):
        rngs = nnx.Rngs(0)
        self.items = jax_tt.TTEmbedBag(
            1000, 8, tt_ranks=4, optimizer=optimizer, cache=cache, rngs=rngs
        )
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.items(ids))


@nnx.jit
def step(model, opt, ids):
    loss, grads = jax_tt.value_and_grad(lambda m: jnp.mean((m(ids) - 1) ** 2))(model)
    opt.update(model, grads)
    return loss


OLD = RowCache(60, ways=4, refresh_every=2, write_back=None)
NEW = dataclasses.replace(OLD, capacity=100, policy="lru")


def make(cache, rule):
    model = Tower(cache, rule)
    return model, jax_tt.FusedOptimizer(model, optax.sgd(0.1, momentum=0.9))


def batches(count, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.zipf(1.3, (32, 4)) % 1000) for _ in range(count)]


@pytest.mark.parametrize("rule", [None, jax_tt.optimizers.Adagrad(0.1)], ids=["optax", "fused"])
def test_a_layer_in_memory_and_from_a_checkpoint(rule, tmp_path):
    model, opt = make(OLD, rule)
    for ids in batches(4):
        step(model, opt, ids)
    before, tags = (
        np.asarray(array[...]) for array in (model.items.cache_rows, model.items.cache_tags)
    )

    def moments():
        return np.asarray(opt.opt_state[0].trace["items"]["cache_rows"][...])

    old_moments = None if rule else moments()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path.absolute() / "state", nnx.to_pure_dict(nnx.state((model, opt))))
        checkpointer.wait_until_finished()
        again = make(OLD, rule)
        state = nnx.state(again)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        restored = checkpointer.restore(tmp_path.absolute() / "state", like)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(again, state)
    for one, its_opt in ((model, opt), again):
        one.items.resize_cache(NEW, opt=its_opt, model=one)
        assert one.items.cache == NEW
    rows, now = np.asarray(model.items.cache_rows[...]), model.items.cache_tags[...].reshape(-1)
    slots = np.flatnonzero(now >= 0)
    was = [tags.reshape(-1).tolist().index(row) for row in now[slots]]
    np.testing.assert_array_equal(rows[slots], before[was])
    assert not np.delete(rows, slots, axis=0).any()
    if old_moments is not None:
        np.testing.assert_array_equal(moments()[slots], old_moments[was])
    assert len(slots) > 20 and rows.shape == (100, 8)
    losses = [float(step(model, opt, ids)) for ids in batches(4, 1)]
    others = [float(step(*again, ids)) for ids in batches(4, 1)]
    assert losses == others and losses[-1] < losses[0]
    assert_same_bits(nnx.state(model), nnx.state(again[0]))


@pytest.mark.slow
def test_linen():
    tables = (jax_tt.tt_table(1000, 8, cache=cache) for cache in (OLD, NEW))
    layer, bigger = map(jax_tt.linen.TableEmbed, tables)
    ids = batches(1)[0]
    variables = layer.init(jax.random.key(0), ids)
    _, counted = layer.apply(variables, ids, mutable=["row_cache"])
    update = partial(jax_tt.linen.update_table, layer)
    _, variables = update({**variables, **counted}, jax_tt.cache.populate)
    tx = optax.adam(0.1)
    state = tx.init(variables["params"])
    changed, after = update(variables, partial(jax_tt.cache.resize, cache=NEW))
    assert changed.layer.table.cache == NEW
    shapes = jax.eval_shape(bigger.init, jax.random.key(0), ids)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, shapes)
    assert changed.opt_state(tx, state, after)[0].mu["cache_rows"].shape == (100, 8)
    assert_close(bigger.apply(after, ids), layer.apply(variables, ids), 1e-6)


def test_what_does_not_fit_is_named():
    parts = warm(make_case(SHAPE, "float32", False).cores, OLD, "auto")
    with pytest.raises(ValueError, match=r"cache_tags: .* expected int32 of shape \(25, 4\)"):
        cache_parts.resize(parts, NEW, OLD, num_embeddings=N)
    copies = dataclasses.replace(NEW, gradients="cores")
    with pytest.raises(ValueError, match=r"cache: got gradients='cores' for a cache of gradients"):
        cache_parts.resize(parts, OLD, copies, num_embeddings=N)
    train = jax_tt.tables.TTTable.of_shape(SHAPE)
    for change in (jax_tt.cache.populate, jax_tt.cache.refresh, jax_tt.cache.statistics):
        with pytest.raises(ValueError, match=r"table: has no row cache; build it with cache="):
            change(train, {})
    layer = jax_tt.TTEmbed(1000, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"cache: the layer has no row cache to resize"):
        layer.resize_cache(NEW)


def test_states_of_another_layout_are_refused():
    table = jax_tt.tt_table(1000, 8, tt_ranks=4, cache=jax_tt.RowCache(20, ways=4))
    state = table.init(jax.random.key(0))
    other = dataclasses.replace(table, cache=jax_tt.RowCache(20, ways=5))
    message = (
        r"cache_tags: got int32 of shape \(5, 4\); expected int32 of shape \(4, 5\), .* Its cache has 4 sets of 5 "
        "ways, .* jax_tt.cache.resize changes"
    )
    cache = jax_tt.cache
    for call in (
        *(cache.populate, cache.refresh, cache.flush, cache.reset, cache.statistics),
        partial(cache.fill, ids=[1]),
        partial(cache.resize, cache=table.cache),
        lambda *given: jax_tt.lookup(*given, jnp.array([1])),
        jax_tt.extension.freeze,
    ):
        with pytest.raises(ValueError, match=message):
            call(other, state)
        with pytest.raises(ValueError, match="cache_tags"):
            call(table, {key: value for key, value in state.items() if key != "cache_tags"})


def test_every_resize_runs_as_the_environment_says(monkeypatch):
    cache = RowCache(20, ways=5, write_back=None)
    table, smaller = (
        jax_tt.tt_table(N, D, tt_ranks=2, cache=cache),
        dataclasses.replace(cache, capacity=10),
    )
    state = table.init(jax.random.key(0))
    jax_tt.cache.resize(table, state, smaller)
    monkeypatch.setenv("JAX_TT_METHOD", "unknown")
    with pytest.raises(ValueError, match="JAX_TT_METHOD: got 'unknown'"):
        jax_tt.cache.resize(table, state, smaller)
