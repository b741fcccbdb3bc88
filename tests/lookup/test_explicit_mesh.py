"""Meshes whose axes are explicit, which is what `jax.make_mesh` gives unless told otherwise."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.helpers import SHAPES, fused
from tests.kinds.cached import cache_parts

SHAPE = SHAPES["d3"]
RULE = jax_tt.optimizers.SGD(0.1)
CORES = jax_tt.tt.init(jax.random.key(0), SHAPE)
IDS = np.random.default_rng(0).integers(0, 120, (8, 3)).astype(np.int32)


def _mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))


def _check(function, table, ids, specs):
    """Values and gradients equal those without a mesh."""

    @jax.jit
    def both(table, ids):
        out, pullback = jax.vjp(lambda t: function(t, ids), table)
        return out, pullback(out)[0]

    mesh = _mesh()
    placed = jax.device_put(table, NamedSharding(mesh, P()))
    sharded = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), ids, specs)
    got = both(placed, sharded)
    _assert_close(got, both(table, ids))
    return got[0]


def _assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_keys_of_a_hash_table(method):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    table = jax_tt.hash_table(64, 4, safe_check="ignore")
    keys = jax_tt.dynamic.split_keys(np.arange(8, dtype=np.uint64)[:, None] << np.uint64(40))
    known = jax.tree.map(lambda words: words[:5], keys)
    _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), known)
    lookup = jax_tt.Lookup(method=method)
    step = jax.jit(lambda state, keys: jax_tt.lookup_bags(table, state, keys, lookup)[0])
    expected = step(state, keys)
    state = jax.device_put(state, NamedSharding(mesh, P()))
    keys = jax.device_put(keys, NamedSharding(mesh, P(("x", "y"))))
    np.testing.assert_array_equal(step(state, keys), expected)


def test_ids_out_of_range_over_two_axes():
    """Outside of a context with a mesh, and with more devices than there are first ids."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    table = jax_tt.dense_table(50, 4)
    state = jax.device_put(table.init(jax.random.key(0)), NamedSharding(mesh, P()))
    ids = jax.device_put(np.arange(8)[:, None] * 7, NamedSharding(mesh, P(("x", "y"))))
    lookup = jax_tt.Lookup(bounds="warn", method="reference")
    rows, _ = jax.jit(lambda state, ids: jax_tt.lookup_bags(table, state, ids, lookup))(state, ids)
    np.testing.assert_array_equal(rows, np.asarray(state["embedding"])[np.arange(8) * 7])


@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("combiner", ["mean", "max"])
@pytest.mark.parametrize("spec", [P("x"), P()])
def test_bags(method, combiner, spec):
    out = _check(
        lambda c, ids: jax_tt.tt.embed_bag(c, ids, combiner=combiner, method=method),
        CORES,
        IDS,
        spec,
    )
    assert out.sharding.spec[0] == (spec[0] if len(spec) else None)
    _check(
        lambda t, ids: jax_tt.functional.embed_bag(t, ids, combiner=combiner, method=method),
        np.random.default_rng(1).normal(size=(120, 4)).astype(np.float32),
        IDS,
        spec,
    )


@pytest.mark.parametrize("combiner", ["mean", "max"])
def test_ragged_bags(combiner):
    bags = jax_tt.Bags.from_lengths(IDS.ravel(), [5, 0, 12, 7])
    specs = jax_tt.Bags(P("x"), P())
    _check(
        lambda c, bags: jax_tt.tt.embed_bag(c, bags, combiner=combiner, method="auto"),
        CORES,
        bags,
        specs,
    )


@pytest.mark.parametrize("spec", [P("x"), P("x", None)])
def test_lookup(spec):
    ids = IDS[:, 0] if len(spec) == 1 else IDS
    out = _check(jax_tt.tt.lookup, CORES, ids, spec)
    assert out.sharding.spec[0] == "x"


@pytest.mark.parametrize("method", ["auto", "reference"])
def test_fused(method):
    table, state = fused(CORES, RULE)
    _check(
        lambda s, ids: jax_tt.lookup_bags(table, s, ids, combiner="mean", method=method)[0],
        state,
        IDS,
        P("x"),
    )


@pytest.mark.parametrize(("gradients", "optimizer"), [("rows", RULE), ("cores", None)])
def test_a_row_cache(gradients, optimizer):
    cache = jax_tt.RowCache(40, ways=4, gradients=gradients, write_back=None)
    start = CORES if optimizer is None else fused(CORES, RULE)[1]

    @jax.jit
    def populated(start):
        table = cache_parts.init_parts(start, cache, optimizer=optimizer)
        _, directory = cache_parts.embed_bag(table, IDS[:4], cache, optimizer=optimizer)
        table = table._replace(directory=directory)
        return cache_parts.populate(table, cache, optimizer=optimizer)

    @jax.jit
    def step(table, ids):
        def loss(trained):
            own = table._replace(table=trained[0], rows=trained[1])
            out, directory = cache_parts.embed_bag(own, ids, cache, optimizer=optimizer)
            return (out**2).sum(), (out, directory)

        return jax.value_and_grad(loss, has_aux=True)((table.table, table.rows))

    table, mesh = populated(start), _mesh()
    placed = jax.device_put(table, NamedSharding(mesh, P()))
    got = step(placed, jax.device_put(IDS, NamedSharding(mesh, P("x"))))
    _assert_close(got, step(table, IDS))
