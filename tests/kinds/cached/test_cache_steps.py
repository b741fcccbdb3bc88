"""Steps through a row cache: fused updates, edges, and JAX's transformations."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import RowCache, optimizers
from tests.helpers import assert_close, dense_table, fused, make_case, on_gpu
from tests.kinds.cached import cache_parts
from tests.kinds.cached.cache_case import (
    SHAPE,
    D,
    N,
    both,
    close,
    effective,
    lookup,
    on_kernels,
    same,
    small_cache,
    trained,
    warm,
)

RULES = {
    "sgd": optimizers.SGD(0.1),
    "rowwise": optimizers.RowWiseAdagrad(0.1),
    "adam": optimizers.Adam(0.1),
}


@both
@pytest.mark.parametrize("rule", ["rowwise", "adam"])
def test_a_fused_step_is_that_of_the_parts(rule, gradients, method):
    """Hits step the rows and misses the cores as fused tables of their own do."""
    if rule == "adam" and gradients == "rows":
        pytest.skip("Adam moves rows of gradient 0, which cannot be had apart here")
    rule = RULES[rule]
    case = make_case(SHAPE, "float32", True)
    cache = small_cache(gradients)
    table = warm(case.cores, cache, method, optimizer=rule)
    if gradients == "rows":
        table = trained(table)
    bags = case.bags()
    _, tags, slots = effective(table)
    g = jnp.asarray(case.g, jnp.float32)

    def loss(values, rows, weights):
        out, _ = cache_parts.embed_bag(
            table._replace(table=values, rows=rows),
            dataclasses.replace(bags, weights=weights),
            cache,
            optimizer=rule,
            num_embeddings=N,
            method=method,
        )
        return jnp.sum(out * g)

    argnums = (0, 1, 2) if gradients == "rows" else (0, 2)
    new = jax.jit(jax.grad(loss, argnums))(table.table, table.rows, bags.weights)

    plain = fused(table.cores, rule, N)[0]

    def uncached(values, bags, weights):
        given = dataclasses.replace(bags, weights=weights)
        return jnp.sum(jax_tt.lookup_bags(plain, values, given, method=method)[0] * g)

    if gradients == "cores":
        want = jax.jit(jax.grad(uncached, (0, 2)))(table.table, bags, bags.weights)
        close(new, want, 2e-5)
        return
    ids = np.asarray(bags.ids)
    hit = np.isin(ids, tags[slots])
    places = {int(tag): int(slot) for slot, tag in enumerate(tags) if tag >= 0}
    # A miss has weight 0 in the one and a hit in the other; a row of weight 0 is stepped by nothing but Adam.
    missed = jax.jit(jax.grad(uncached))(table.table, bags, jnp.where(hit, 0, bags.weights))
    close(new[0], missed, 2e-5)
    of_slots = dataclasses.replace(
        bags, ids=jnp.asarray([places.get(int(i), 0) for i in ids], jnp.int32)
    )

    alone = fused(table.values, rule)[0]

    def dense(rows, weights):
        given = dataclasses.replace(of_slots, weights=weights)
        return jnp.sum(jax_tt.lookup_bags(alone, rows, given, method=method)[0] * g)

    hits = jax.jit(jax.grad(dense))(table.rows, jnp.where(hit, bags.weights, 0))
    held = np.asarray(table.directory.tags).reshape(-1) >= 0
    got, want = (rows["embedding"][held] for rows in (new[1], hits))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert new[1]["step"] == 1 == new[1]["sentinel"]


@on_kernels
@pytest.mark.parametrize(
    ("rule", "gradients"), [(None, "rows"), ("sgd", "rows"), ("adam", "cores")]
)
def test_an_empty_batch_changes_no_row(rule, gradients, method):
    rule = RULES.get(rule)
    cache, case = small_cache(gradients), make_case(SHAPE, "float32", True)
    table = warm(case.cores, cache, method, optimizer=rule)
    argnums = (0, 1) if rule is None or gradients == "rows" else 0

    @jax.jit
    @partial(jax.grad, argnums=argnums, has_aux=True)
    def step(values, rows, ids):
        own = table._replace(table=values, rows=rows)
        options = {"num_embeddings": N, "optimizer": rule, "method": method}
        sums, directory = cache_parts.embed_bag(own, ids, cache, **options)
        rows, _ = cache_parts.lookup(own, ids, cache, **options)
        return jnp.sum(sums), (sums, rows, directory)

    for shape in ((0, 3), (2, 0)):
        ids = np.zeros(shape, np.int32)
        new, (sums, rows, directory) = step(table.table, table.rows, ids)
        np.testing.assert_array_equal(sums, np.zeros((shape[0], D)))
        assert rows.shape == (*shape, D)
        assert directory.clock == table.directory.clock + 1
        same(directory._replace(clock=0, totals=0), table.directory._replace(clock=0, totals=0))
        if rule is None:
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(new))
            continue
        parts = new if gradients == "rows" else (new,)
        for got, want in zip(parts, (table.table, table.rows), strict=False):
            same(got | {"step": 0, "used": 0}, want | {"step": 0, "used": 0})


@on_kernels
@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        ({"capacity": 1, "ways": 32, "write_back": None}, "rows"),
        ({"capacity": 2, "ways": 2, "counters": 1}, "cores"),
        ({"capacity": 10 * N, "ways": 32}, "rows"),
    ],
    ids=str,
)
def test_more_hot_ids_than_places(options, gradients, method):
    case = make_case(SHAPE, "float32", False)
    policy = "lfu" if options["capacity"] % 2 else "lru"
    cache = RowCache(**options, policy=policy, gradients=gradients)
    table = warm(case.cores, cache, method)
    rng = np.random.default_rng(0)
    dense = dense_table(case.cores, N)
    populate = jax.jit(partial(cache_parts.populate, cache=cache, num_embeddings=N, method=method))
    for _ in range(5):
        ids = rng.integers(0, N, (40,)).astype(np.int32)
        rows, directory = lookup(table, ids, cache, num_embeddings=N, method=method)
        assert_close(rows, dense[ids], 1e-5)
        table = populate(table._replace(directory=directory))
        tags = np.asarray(table.directory.tags).reshape(-1)
        held = tags[tags >= 0]
        assert len(held) == len(np.unique(held)) <= tags.size
        assert tags.size < min(options["capacity"], N) + options["ways"]
        tolerance = 1e-5 if gradients == "cores" or cache.write_back is None else 1e-4
        dense = dense_table(table.cores, N)
        assert_close(np.asarray(table.values)[tags >= 0], dense[held], tolerance)
    assert len(held)


# Copies have no optimizer state, whatever trains the cores.
@on_kernels
@pytest.mark.slow(but="native")
@pytest.mark.parametrize("gradients", ["rows", "cores"])
def test_populate_flush_and_reset_under_jit(gradients, method):
    case = make_case(SHAPE, "float32", False)
    cache, rule = small_cache(gradients), RULES["rowwise"]
    options = {"num_embeddings": N, "optimizer": rule, "method": method}
    table = warm(case.cores, cache, method, optimizer=rule)
    if gradients == "rows":
        rows = np.where(np.asarray(table.directory.tags).reshape(-1, 1) >= 0, 0.01, 0.0)
        rows = (np.asarray(table.values) + rows).astype(np.float32)
        table = table._replace(rows=table.rows | {"embedding": jnp.asarray(rows)})
    populate, flush, reset = (
        jax.jit(partial(change, cache=cache, **options))
        for change in (cache_parts.populate, cache_parts.flush, cache_parts.reset)
    )
    for ids in ([40] * 30 + [50] * 20, [3] * 9 + [5]):
        table = populate(table)
        _, directory = lookup(table, jnp.asarray(ids), cache, **options)
        table = table._replace(directory=directory)
    table = populate(table)
    flushed = flush(table)
    tags = np.asarray(table.directory.tags).reshape(-1)
    assert_close(
        np.asarray(flushed.values)[tags >= 0], dense_table(flushed.cores, N)[tags[tags >= 0]], 1e-5
    )
    empty = reset(table)
    assert jax.tree.structure(empty) == jax.tree.structure(table)
    close(empty.table, flushed.table, 1e-5)
    for compiled in (populate, flush, reset):
        assert compiled._cache_size() == 1
    fresh = cache_parts.init_parts(empty.table, cache, num_embeddings=N, optimizer=rule)
    same(empty.directory, fresh.directory)
    same(empty.values, fresh.values)
    if gradients == "rows":
        same(empty.slots, fresh.slots)


@on_kernels
@pytest.mark.slow(but="native")
@both
def test_steps_in_a_scan(gradients, method):
    """A scan over batches ends where a loop of jitted steps ends."""
    case = make_case(SHAPE, "float32", False)
    cache = small_cache(gradients, refresh_every=2)
    rule = RULES["sgd"]
    options = {"num_embeddings": N, "optimizer": rule, "method": method}
    start = fused(case.cores, rule)[1]
    table = cache_parts.init_parts(start, cache, num_embeddings=N, optimizer=rule)
    batches = jnp.asarray(np.random.default_rng(0).zipf(1.4, (7, 6, 4)) % N, jnp.int32)

    def step(table, ids):
        table = _fused_step(table, ids, cache, rule, method)
        return cache_parts.refresh(table, cache, **options), table.directory.totals

    one_by_one = jax.jit(step)  # traced once for both
    together, totals = jax.jit(lambda table: jax.lax.scan(one_by_one, table, batches))(table)
    for t, ids in enumerate(batches):
        table, after = one_by_one(table, ids)
        same(totals[t], after)
    same(together.directory, table.directory)
    close(together, table, 1e-5)
    assert table.directory.statistics()["refreshes"] == 3


def _loss(table, ids, cache, **options):
    options |= {"combiner": "mean"}

    def loss(values, rows):
        own = table._replace(table=values, rows=rows)
        out, directory = cache_parts.embed_bag(own, ids, cache, **options)
        return jnp.sum(jnp.sin(out)), directory

    return loss


def _fused_step(table, ids, cache, rule, method, axis_name=None):
    loss = _loss(table, ids, cache, optimizer=rule, method=method, axis_name=axis_name)
    if cache.gradients == "rows":
        (values, rows), directory = jax.grad(loss, (0, 1), has_aux=True)(table.table, table.rows)
        return cache_parts.Parts(values, rows, directory)
    values, directory = jax.grad(loss, has_aux=True)(table.table, table.rows)
    return cache_parts.Parts(values, table.rows, directory)


def _optax_step(table, ids, cache, method, axis_name=None):
    loss = _loss(table, ids, cache, method=method, axis_name=axis_name)
    grads, directory = jax.grad(loss, (0, 1), has_aux=True)(table.table, table.rows)
    values, rows = jax.tree.map(lambda x, g: x - 0.1 * g, (table.table, table.rows), grads)
    return cache_parts.Parts(values, rows, directory)


@pytest.mark.slow(but="native")
@pytest.mark.optimized
@both
def test_a_donated_fused_step_stays_in_place(gradients, method):
    """Neither the rows nor the directory are copied: their buffers keep their addresses."""
    if method == "cuda_emulated":
        pytest.skip("the emulator's launches are those of the GPU, its memory is not")
    shape = jax_tt.TTShape.suggest(20_000, 16, ranks=4)
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    cache = RowCache(2048, ways=32, counters=4096, gradients=gradients)
    rule = RULES["rowwise"]
    table = warm(cores, cache, "auto", np.arange(500), optimizer=rule, n=20_000)
    table = jax.tree.map(jnp.copy, table)
    ids = np.arange(64, dtype=np.int32).reshape(16, 4) * 100

    @partial(jax.jit, donate_argnums=0)
    def step(table, ids):
        return _fused_step(table, ids, cache, rule, method)

    compiled = step.lower(table, ids).compile()
    watched = {
        "rows": lambda t: t.values,
        "scores": lambda t: t.directory.scores,
        "ghosts": lambda t: t.directory.ghost_scores,
        "tags": lambda t: t.directory.tags,
    }
    before = {name: leaf(table).unsafe_buffer_pointer() for name, leaf in watched.items()}
    before |= {k: core.unsafe_buffer_pointer() for k, core in enumerate(table.cores)}
    table = compiled(table, ids)
    after = {name: leaf(table).unsafe_buffer_pointer() for name, leaf in watched.items()}
    after |= {k: core.unsafe_buffer_pointer() for k, core in enumerate(table.cores)}
    if method == "native":
        assert before == after
        lines = compiled.as_text().splitlines()
        copied = [line for line in lines if " copy(" in line and "2048,16" in line]
        assert not copied
    else:
        assert before["rows"] == after["rows"]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def _identical_replicas(tree):
    for leaf in jax.tree.leaves(tree):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(others) == 3 and first.shape == leaf.shape
        for other in others:
            np.testing.assert_array_equal(first, other)


@on_kernels
@pytest.mark.parametrize(
    ("steps", "way", "gradients"),
    [
        ("optax", "jit", "rows"),
        ("fused", "shard_map", "rows"),
        ("fused", "unchecked shard_map", "cores"),
    ],
)
def test_a_sharded_batch(steps, way, gradients, method, mesh):
    """Replicas stay identical, and equal to one device, over steps and refreshes."""
    if on_gpu():
        pytest.skip("one GPU has nothing to shard over")
    case = make_case(SHAPE, "float32", False)
    cache = small_cache(gradients, capacity=12, refresh_every=2, write_back=None)
    rule = RULES["sgd"] if steps == "fused" else None
    options = {"num_embeddings": N, "optimizer": rule, "method": method}
    start = fused(case.cores, rule)[1] if rule else case.cores
    table = cache_parts.init_parts(start, cache, num_embeddings=N, optimizer=rule)
    batches = np.random.default_rng(0).zipf(1.3, (5, 8, 3)).astype(np.int32) % N

    def step(table, ids, axis_name=None):
        if rule:
            return _fused_step(table, ids, cache, rule, method, axis_name)
        return _optax_step(table, ids, cache, method, axis_name)

    def whole(table, ids):
        return cache_parts.refresh(step(table, ids), cache, **options)

    def spread(table, ids):
        if way == "jit":
            return whole(table, ids)
        checked = way == "shard_map"
        run = jax.shard_map(
            lambda table, ids: step(table, ids, None if checked else "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=checked,
        )
        return cache_parts.refresh(run(table, ids), cache, **options)

    one, many = jax.jit(whole), jax.jit(spread)
    replicated = jax.device_put(table, NamedSharding(mesh, P()))
    for ids in batches:
        table = one(table, jnp.asarray(ids))
        replicated = many(replicated, jax.device_put(ids, NamedSharding(mesh, P("data"))))
        _identical_replicas(replicated)
        same(replicated.directory, table.directory)
        close((replicated.table, replicated.rows), (table.table, table.rows), 2e-5)
    figures = table.directory.statistics()
    assert figures["misses"] < figures["requested"] == batches.size
