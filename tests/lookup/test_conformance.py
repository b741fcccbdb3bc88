"""Every op, shape, type, combiner and weighting of every implementation, judged by numpy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_tt
from tests.helpers import (
    COMBINERS,
    SHAPES,
    TOLERANCE,
    WEIGHTABLE,
    assert_close,
    bag_model,
    core_gradients,
    dense_table,
    flat,
    fused,
    make_case,
    on_gpu,
    raises,
    skip_unless_stored,
)
from tests.lookup.shard_ways import check_ways
from tests.lookup.table_shards import mesh_of

pytestmark = pytest.mark.each_way

WEIGHTED = (False, True)
# Of d3 every combiner, weighted or not, and every type. Of the other shapes three combiners each, half of them
# weighted, in turn, so that each combiner is weighted for some and not for others. Of d4 every other type.
OTHERS = ("bfloat16", "float16", "float64")
CASES = [("d3", "float32", c, w) for c in COMBINERS for w in WEIGHTED]
CASES += [("d3", dtype, combiner, True) for dtype in OTHERS for combiner in COMBINERS]
CASES += [
    (name, "float32", COMBINERS[(3 * i + k) % len(COMBINERS)], (i + k) % 2 == 0)
    for i, name in enumerate(name for name in SHAPES if name != "d3")
    for k in range(3)
]
CASES += [("d4", dtype, combiner, True) for dtype, combiner in zip(OTHERS, COMBINERS, strict=False)]
# A maximum takes no weights.
CASES = list(dict.fromkeys((n, t, c, w and c in WEIGHTABLE) for n, t, c, w in CASES))


def _x64_for(dtype):
    return jax.enable_x64(dtype == "float64")


@pytest.mark.parametrize(("name", "dtype", "combiner", "weighted"), CASES)
def test_tt_embed_bag(name, dtype, combiner, weighted, method):
    skip_unless_stored(dtype, method)
    with _x64_for(dtype):
        case = make_case(SHAPES[name], dtype, weighted)
        form = "rectangular" if combiner in ("mean", "max") else "ragged"
        bags = case.bags(form)
        n = case.shape.num_embeddings
        g = jnp.asarray(case.g).astype(jnp.float32 if dtype != "float64" else dtype)

        def loss(cores, weights):
            out = jax_tt.tt.embed_bag(
                cores,
                dataclasses.replace(bags, weights=weights),
                combiner=combiner,
                num_embeddings=n,
                method=method,
            )
            return jnp.sum(out.astype(g.dtype) * g), out

        # Without weights the argument is None, an empty tree, and its gradient None too.
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, out), (dcores, dweights) = step(case.cores, bags.weights)
        g64 = np.asarray(g, np.float64)
        table = dense_table(case.cores, n)
        want, dtable, want_weights = bag_model(table, case.rows, case.weights, combiner, g64)
        tolerance = TOLERANCE[dtype]
        assert out.dtype == jnp.dtype(dtype)
        assert_close(out, want, tolerance, "out")
        pairs = zip(dcores, core_gradients(case.cores, dtable), strict=True)
        for k, (got, expected) in enumerate(pairs):
            assert got.dtype == jnp.dtype(dtype)
            assert_close(got, expected, tolerance, f"core {k}")
        if weighted:
            tolerance = max(tolerance, TOLERANCE[str(dweights.dtype)])
            used = sum(map(len, case.rows))
            if form == "ragged":
                assert_close(dweights[:used], flat(want_weights), tolerance, "weights")
                assert not np.any(dweights[used:])
            else:
                got = [np.asarray(dweights)[b, : len(row)] for b, row in enumerate(case.rows)]
                assert_close(np.concatenate(got), flat(want_weights), tolerance, "weights")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("combiner", COMBINERS)
def test_embed_bag(dtype, combiner, method):
    skip_unless_stored(dtype, method)
    with _x64_for(dtype):
        weighted = combiner in WEIGHTABLE
        case = make_case(SHAPES["d3"], dtype, weighted)
        table = jax_tt.tt.to_dense(case.cores, case.shape.num_embeddings)
        bags = case.bags()
        g = jnp.asarray(case.g).astype(jnp.float32 if dtype != "float64" else dtype)

        def loss(table, weights):
            given = dataclasses.replace(bags, weights=weights)
            out = jax_tt.functional.embed_bag(table, given, combiner=combiner, method=method)
            return jnp.sum(out.astype(g.dtype) * g), out

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, out), (dtable, dweights) = step(table, bags.weights)
        wide = np.asarray(
            table.astype(jnp.float64 if dtype == "float64" else jnp.float32), np.float64
        )
        model = bag_model(wide, case.rows, case.weights, combiner, np.asarray(g, np.float64))
        assert_close(out, model[0], TOLERANCE[dtype], "out")
        assert_close(dtable, model[1], TOLERANCE[dtype], "table")
        if weighted:
            used = len(flat(model[2]))
            assert_close(dweights[:used], flat(model[2]), TOLERANCE[dtype], "weights")


@pytest.mark.parametrize("name", ["d2", "d3-odd", "d3-one-column", "d5"])
def test_lookup_to_dense_attend(name, method):
    case = make_case(SHAPES[name], "float32", False)
    n = case.shape.num_embeddings
    table = dense_table(case.cores, n)
    ids = np.array([[0, n - 1, n // 2], [1, 1, 0]], np.int32)
    query = jnp.asarray(case.g, jnp.float32)

    @jax.jit
    def read(cores, split):
        return (
            jax_tt.tt.lookup(cores, ids, num_embeddings=n, method=method),
            jax_tt.tt.lookup(cores, split, method=method),
            jax_tt.tt.to_dense(cores, n, method=method),
            jax_tt.tt.attend(cores, query, n),
        )

    rows, of_split, dense, scores = read(case.cores, case.shape.split_ids(ids))
    assert_close(rows, table[ids], 1e-5, "lookup")
    assert_close(of_split, table[ids], 1e-5, "split")
    assert_close(dense, table, 1e-5, "to_dense")
    assert_close(scores, np.asarray(query, np.float64) @ table.T, 1e-5, "attend")


def test_id_types(method):
    case = make_case(SHAPES["d2"], "float32", False)
    lookup = jax.jit(lambda cores, ids: jax_tt.tt.lookup(cores, ids, method=method))
    for dtype in ("int32", "uint32", "int64"):
        with jax.enable_x64(dtype == "int64"):
            ids = np.array([0, 7, 49], dtype)
            rows = lookup(case.cores, ids)
            assert_close(rows, dense_table(case.cores, 50)[ids], 1e-5, dtype)


@pytest.mark.parametrize("split", [False, True])
def test_bounds(split, method):
    case = make_case(SHAPES["d3-odd"], "float32", False)
    shape = case.shape
    n = shape.num_embeddings  # five rows fewer than the cores address
    table = dense_table(case.cores, n)
    ids = np.array([[0, -1], [n - 1, n], [3, 2**31 - 1], [-(2**31), 5]], np.int32)
    given = shape.split_ids(ids) if split else ids
    outside = (ids < 0) | (ids >= n)

    def rows(bounds):
        return jax_tt.tt.lookup(case.cores, given, num_embeddings=n, bounds=bounds, method=method)

    def pooled(weights, combiner):
        bags = jax_tt.Bags(given, None, weights)
        options = {"combiner": combiner, "num_embeddings": n, "bounds": "zero", "method": method}
        return jax_tt.tt.embed_bag(case.cores, bags, **options)

    @jax.jit
    def run(weights):
        dweights = jax.grad(lambda weights: pooled(weights, "sum").sum())(weights)
        return tuple(map(rows, ways)), pooled(None, "mean"), dweights

    clipped = table[np.clip(ids, 0, n - 1)]
    ways = ("clip", "unchecked", "zero") + (() if raises(method) else ("error",))
    found, mean, dweights = run(np.ones(ids.shape, np.float32))
    got = dict(zip(ways, found, strict=True))
    assert_close(got["clip"], clipped, 1e-5, "clip")
    assert_close(np.asarray(got["unchecked"])[~outside], clipped[~outside], 1e-5, "unchecked")
    assert_close(got["zero"], np.where(outside[..., None], 0, clipped), 1e-5, "zero")
    assert int(jax_tt.functional.count_out_of_range(given, shape)) == outside.sum()
    if raises(method):
        with pytest.raises(Exception, match=r"id"):
            jax.block_until_ready(rows("error"))
    else:
        assert (np.isnan(got["error"]).all(-1) == outside).all()
    # An id that reads zeros still counts in the divisor of a mean, and its weight has no gradient.
    assert_close(mean, np.where(outside[..., None], 0, clipped).mean(1), 1e-5, "mean")
    assert not np.any(np.asarray(dweights)[outside])


EMPTY = {
    "no bags": jax_tt.Bags.from_ragged([]),
    "no bags, with ids": jax_tt.Bags(
        np.arange(9, dtype=np.int32), np.zeros(1, np.int32), np.ones(9, np.float32)
    ),
    "empty bags": jax_tt.Bags.from_ragged([[], []]),
    "unused capacity": jax_tt.Bags.from_ragged([[], []], [[], []], capacity=4),
    "no rows": jax_tt.Bags(np.zeros((0, 3), np.int32)),
    "no columns": jax_tt.Bags(np.zeros((2, 0), np.int32)),
    "all padding": jax_tt.Bags.from_padded(np.full((2, 3), -1, np.int32)),
}


@pytest.mark.parametrize("combiner", ["mean", "sqrtn", "max"])
def test_zero_sizes(combiner, method):
    """All forms in one program."""
    case = make_case(SHAPES["d2"], "float32", False)
    batches = dict(EMPTY)
    if combiner == "max":
        batches = {k: dataclasses.replace(bags, weights=None) for k, bags in batches.items()}

    def loss(cores, weights):
        outs = {
            name: jax_tt.tt.embed_bag(
                cores,
                dataclasses.replace(bags, weights=weights[name]),
                combiner=combiner,
                method=method,
            )
            for name, bags in batches.items()
        }
        return sum(out.sum() for out in outs.values()), outs

    weights = {name: bags.weights for name, bags in batches.items()}
    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, outs), gradients = grad(case.cores, weights)
    for name, bags in batches.items():
        assert outs[name].shape == (bags.num_bags, 6) and not np.any(outs[name]), name
    assert not any(np.any(gradient) for gradient in jax.tree.leaves(gradients))
    empty = jax_tt.tt.lookup(case.cores, np.zeros((2, 0), np.int32), method=method)
    assert empty.shape == (2, 0, 6)
    assert jax_tt.tt.attend(case.cores, jnp.zeros((0, 6))).shape == (0, 56)


def test_table_of_10_to_the_12_rows(method):
    shape = jax_tt.TTShape.suggest(10**12, 32, 8, 5)
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    ids = np.array([0, 10**12 - 1, 123_456_789_012, 2**39])
    digits = np.asarray(shape.split_ids(ids).digits)
    rest = digits.astype(object)
    value = rest[:, 0]
    for k in range(1, 5):
        value = value * shape.row_factors[k] + rest[:, k]
    assert value.tolist() == ids.tolist()
    # A host array is split for the caller where JAX would cut it to 32 bits.
    lookup = jax.jit(lambda c: jax_tt.tt.lookup(c, ids, num_embeddings=10**12, method=method))
    for row, digit in zip(lookup(cores), digits, strict=True):
        parts = tuple(np.asarray(core)[i][None] for core, i in zip(cores, digit, strict=True))
        assert_close(row, dense_table(parts, 1)[0], 1e-5)


@pytest.mark.optimized
def test_uint32_ids_above_2_to_the_31(method):
    shape = jax_tt.TTShape.suggest(4_000_000_000, 4, 2, 3)
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    ids = np.array([3_999_999_999, 2**31, 4_000_000_000], np.uint32)
    options = {"num_embeddings": 4_000_000_000, "bounds": "zero", "method": method}
    rows, again = jax.jit(
        lambda cores: [
            jax_tt.tt.lookup(cores, given, **options) for given in (ids, shape.split_ids(ids))
        ]
    )(cores)
    np.testing.assert_array_equal(rows, again)
    assert np.any(rows[:2]) and not np.any(rows[2])


def test_float64_is_refused(method, x64):
    """Where kernels store no float64, "auto" takes the reference and the native method says so."""
    cores = make_case(SHAPES["d2"], "float64", False).cores
    table = jax_tt.tt.to_dense(cores, 50)
    rule = jax_tt.optimizers.SGD(0.1)
    trained, state = fused(cores, rule)
    ids = np.array([[1, 2]], np.int32)
    want = np.asarray(table)[ids].sum(1)
    runs = (
        lambda method: jax_tt.tt.embed_bag(cores, ids, method=method),
        lambda method: jax_tt.functional.embed_bag(table, ids, method=method),
        lambda method: jax_tt.lookup_bags(trained, state, ids, method=method)[0],
    )
    refused = method == "cuda_emulated" or (method == "native" and on_gpu())
    methods = ("auto",) if refused else ("auto", method)
    for rows in jax.jit(lambda: [run(way) for run in runs for way in methods])():
        np.testing.assert_allclose(rows, want, rtol=1e-12)
    for run in runs if refused else ():
        with pytest.raises(TypeError, match=r"float64 table.*method='reference'"):
            run(method)


@pytest.mark.slow(but="native")
def test_every_way_to_run_on_shards_of_a_table(method):
    """`table_shards_run` has 8 devices."""
    if on_gpu():
        pytest.skip("one GPU has nothing to shard over")
    check_ways(mesh_of((2, 2), AxisType.Auto), method)
