"""A fused step is taken as a whole or not at all, whether its gradients are not finite or ``bounds`` refuses an id."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.conftest import method_fixture
from tests.helpers import fused
from tests.kinds.cached import cache_parts

RULE = jax_tt.optimizers.Adagrad(0.1)
N, D = 60, 8
SHAPE = jax_tt.TTShape(N, D, 3, (3, 4, 5), (2, 2, 2))
CORES = jax_tt.tt.init(jax.random.key(0), SHAPE)
CACHE = jax_tt.RowCache(8, ways=8, write_back=None)
HOT = np.arange(8)
# In every half of a batch a bag of hits, one of misses and one of both.
IDS = np.array([[0, 1], [20, 21], [2, 22], [3, 4], [23, 24], [5, 25]], np.int32)
BAGS = {"hits": 0, "misses": 4, "nothing": None}
PLACES = ("one device", "replicated", "split", "split by hand")

method = method_fixture("reference", "native", "cuda_emulated")


def tt_table():
    return fused(CORES, RULE)[1]


def dense_table():
    return fused(jax_tt.tt.to_dense(CORES, N), RULE)[1]


@functools.cache
def cached_table():
    return jax.jit(_cached_table)()


def _cached_table():
    table = cache_parts.init_parts(tt_table(), CACHE, num_embeddings=N, optimizer=RULE)
    options = {"num_embeddings": N, "optimizer": RULE, "method": "reference"}
    _, directory = cache_parts.lookup(table, jnp.asarray(HOT), CACHE, **options)
    table = table._replace(directory=directory)
    return cache_parts.populate(table, CACHE, **options)


def pooled(state, bags, **options):
    if isinstance(state, cache_parts.Parts):
        options |= {"num_embeddings": N, "optimizer": RULE, "count": False}
        return cache_parts.embed_bag(state, bags, CACHE, **options)[0]
    start = (
        state["embedding"] if "embedding" in state else tuple(state[f"core_{k}"] for k in range(3))
    )
    return jax_tt.lookup_bags(fused(start, RULE, N)[0], state, bags, bounds="error", **options)[0]


def step_of(table, place, parts=("table", "rows"), **options):
    """A step of ids and gradients: the table after it, and the gradient of the weights.

    Of a cached table only ``parts`` are trained.
    """
    if place == "split by hand":
        options["axis_name"] = "data"

    def loss(trained, weights, ids, g):
        whole = table._replace(**trained) if cached else trained
        out = pooled(whole, jax_tt.Bags(ids, weights=weights), **options)
        return jnp.sum(jnp.where(jnp.isnan(out), 0, out) * g)

    cached = isinstance(table, cache_parts.Parts)
    trained = {part: getattr(table, part) for part in parts} if cached else table
    run = jax.grad(loss, (0, 1))
    if place != "one device":
        devices = jax.devices("cpu")[: 1 if place == "replicated" else 2]
        mesh = jax.sharding.Mesh(np.array(devices), ("data",))
        split = P() if place == "replicated" else P("data")
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P(), split, split, split),
            out_specs=(P(), split),
            check_vma=place == "split",
        )
    compiled = jax.jit(run)

    def step(ids, g):
        after, dweights = compiled(trained, np.ones(ids.shape, np.float32), ids, g)
        return table._replace(**after) if cached else after, dweights

    return step


def leaves(table):
    if isinstance(table, cache_parts.Parts):
        table = (table.table, table.rows)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(table)]


def changed(before, after):
    return [not np.array_equal(a, b) for a, b in zip(leaves(before), leaves(after), strict=True)]


@pytest.mark.parametrize(
    ("where", "place"),
    [
        *itertools.product(("hits", "misses"), PLACES),
        ("nothing", "one device"),
        ("nothing", "split"),
    ],
)
def test_cached_rows_and_cores_skip_together(method, place, where):
    table = cached_table()
    assert table.directory.statistics()["occupied"] == len(HOT)
    g = np.ones((len(IDS), D), np.float32)
    if where != "nothing":
        g[BAGS[where], 1] = np.inf
    after, _ = step_of(table, place, method=method, skip_nonfinite=True)(IDS, g)
    steps = float(after.table["step"]), float(after.rows["step"])
    if where == "nothing":
        assert steps == (1, 1)
        plain, _ = step_of(table, place, method=method)(IDS, g)
        assert not any(changed(plain, after))
    else:
        assert steps == (0, 0)
        assert not any(changed(table, after))


# On one device, native operations raise.
@pytest.mark.each_way
@pytest.mark.parametrize(
    "case",
    [
        (dense_table, (), "split"),
        (tt_table, (), "replicated"),
        (tt_table, (), "split"),
        (cached_table, ("table", "rows"), "split by hand"),
        (cached_table, ("rows",), "replicated"),
        (cached_table, ("table",), "split"),
    ],
    ids=lambda case: f"{case[0].__name__}-{'+'.join(case[1])}-{case[2]}",
)
def test_an_id_out_of_range_refuses_the_step(method, case):
    make, parts, place = case
    table = make()
    g = np.random.default_rng(0).normal(size=(len(IDS), D)).astype(np.float32)
    step = step_of(table, place, parts, method=method)
    good, dgood = step(IDS, g)
    assert any(changed(table, good))
    ids = IDS.copy()
    ids[4, 1] = N
    after, dweights = step(ids, g)
    assert not any(changed(table, after))
    # Weights of other bags have their gradient all the same.
    others = np.arange(len(IDS)) != 4
    np.testing.assert_allclose(dweights[others], dgood[others], rtol=1e-5, atol=1e-6)
    assert np.isnan(dweights[4, 1])
