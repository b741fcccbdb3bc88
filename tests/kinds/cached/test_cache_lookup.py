"""Lookups through a row cache: what is read and what is differentiated, whatever ids and types there are."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.conftest import why_skipped
from tests.helpers import (
    SHAPES,
    TOLERANCE,
    assert_close,
    bag_model,
    core_gradients,
    dense_table,
    flat,
    make_case,
    raises,
    skip_unless_stored,
)
from tests.kinds.cached import cache_parts
from tests.kinds.cached.cache_case import (
    HOT,
    SHAPE,
    D,
    N,
    both,
    effective,
    embed_bag,
    lookup,
    on_kernels,
    same,
    small_cache,
    trained,
    warm,
)

CASES = [
    ("d3", "float32", "sum", False, "rows"),
    ("d3", "float32", "max", False, "rows"),
    ("d3", "float32", "max", False, "cores"),
    ("d3", "float32", "sqrtn", True, "rows"),
    ("d2", "float32", "mean", True, "rows"),
    ("d4", "float32", "sqrtn", True, "cores"),
    ("d5", "float32", "mean_count", True, "rows"),
    ("d3", "bfloat16", "sqrtn", True, "rows"),
    ("d3", "float64", "sqrtn", True, "rows"),
]


@pytest.mark.parametrize(("name", "dtype", "combiner", "weighted", "gradients"), CASES)
def test_equals_a_dense_table_and_its_gradient(name, dtype, combiner, weighted, gradients, method):
    skip_unless_stored(dtype, method)
    with jax.enable_x64(dtype == "float64"):
        case = make_case(SHAPES[name], dtype, weighted)
        n = case.shape.num_embeddings
        bags = case.bags("rectangular" if combiner == "mean" else "ragged")
        cache = small_cache(gradients, capacity=8)
        table = warm(case.cores, cache, method, np.array([0, 2, n - 1, *case.rows[3]]), n=n)
        if gradients == "rows":
            table = trained(table)
        dense, tags, slots = effective(table, n)
        asked = np.unique(np.concatenate(case.rows))
        assert 0 < np.isin(asked, tags).sum() < len(asked)
        g = jnp.asarray(case.g).astype(jnp.float32 if dtype != "float64" else dtype)

        def loss(values, rows, weights):
            out, directory = cache_parts.embed_bag(
                table._replace(table=values, rows=rows),
                dataclasses.replace(bags, weights=weights),
                cache,
                combiner=combiner,
                num_embeddings=n,
                method=method,
            )
            return jnp.sum(out.astype(g.dtype) * g), (out, directory)

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        (_, (out, directory)), (dcores, drows, dweights) = step(
            table.table, table.rows, bags.weights
        )
        g64 = np.asarray(g, np.float64)
        want, dtable, want_weights = bag_model(dense, case.rows, case.weights, combiner, g64)
        tolerance = TOLERANCE[dtype]
        assert out.dtype == jnp.dtype(dtype)
        assert_close(out, want, tolerance, "out")
        want_rows = np.zeros(drows.shape)
        if gradients == "rows":
            want_rows[slots] = dtable[tags[slots]]
            dtable[tags[slots]] = 0
        assert_close(drows, want_rows, tolerance, "rows")
        for k, expected in enumerate(core_gradients(case.cores, dtable)):
            assert_close(dcores[k], expected, tolerance, f"core {k}")
        if weighted:
            tolerance = max(tolerance, TOLERANCE[str(dweights.dtype)])
            if bags.offsets is not None:
                assert_close(dweights[: sum(map(len, case.rows))], flat(want_weights), tolerance)
            else:
                got = [np.asarray(dweights)[b, : len(row)] for b, row in enumerate(case.rows)]
                assert_close(np.concatenate(got), flat(want_weights), tolerance)
        ids = np.concatenate(case.rows)
        figures = directory.statistics()
        before = table.directory.statistics()
        assert figures["requested"] - before["requested"] == len(ids)
        assert figures["unique"] - before["unique"] == len(np.unique(ids))
        assert figures["misses"] - before["misses"] == np.sum(~np.isin(ids, tags[slots]))


FORMS = ("weighted", "plain", "padded", "ragged", "array")
uncached = jax.jit(
    jax_tt.tt.embed_bag, static_argnames=("combiner", "bounds", "num_embeddings", "method")
)
uncached_lookup = jax.jit(jax_tt.tt.lookup, static_argnames="method")


@on_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "combiner", "gradients", "forms"),
    [
        ("clip", "sum", "rows", FORMS[:2]),
        ("zero", "mean", "cores", FORMS[2:]),
        ("zero", "max", "rows", FORMS[1::3]),
        ("error", "sqrtn", "rows", FORMS[::2]),
        ("unchecked", "sum", "cores", FORMS[::2]),
    ],
)
def test_right_after_populating_equals_no_cache(bounds, combiner, gradients, forms, method):
    case = make_case(SHAPE, "float32", True)
    cache = small_cache(gradients)
    table = warm(case.cores, cache, method)
    rng = np.random.default_rng(0)
    ids = np.where(rng.random((7, 5)) < 0.5, rng.choice(HOT, (7, 5)), rng.integers(0, N, (7, 5)))
    ids = ids.astype(np.int32)
    if bounds == "clip" or bounds == "zero":
        ids[1:6, 2] = [-1, -2, N, 2**31 - 1, -(2**31)]
    elif bounds == "error" and not raises(method):
        ids[3, 1] = N
    weights = jnp.asarray(rng.integers(1, 9, ids.shape) / 4, jnp.float32)
    padded = np.where(rng.random(ids.shape) < 0.3, -1, ids)
    batches = {
        "weighted": jax_tt.Bags(ids, weights=weights),
        "plain": jax_tt.Bags(ids),
        "padded": jax_tt.Bags(padded, weights=weights, padded=True),
        "ragged": jax_tt.Bags.from_ragged(ids.tolist(), weights.tolist(), capacity=40),
        "array": jnp.asarray(ids),
    }
    options = {"combiner": combiner, "bounds": bounds, "num_embeddings": N, "method": method}
    for form in forms:
        want = uncached(case.cores, batches[form], **options)
        got, _ = embed_bag(table, batches[form], cache, **options)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("method", ["native"], indirect=True)
def test_an_id_out_of_range_is_named(gradients, method):
    """Only the ops of the CPU raise."""
    case = make_case(SHAPE, "float32", True)
    cache = small_cache(gradients)
    table = warm(case.cores, cache, method)
    for bad in (N, -7, -1):
        with pytest.raises(Exception, match=rf"id {bad} at"):
            jax.block_until_ready(
                embed_bag(table, jnp.array([[5, bad, 0]]), cache, num_embeddings=N, method=method)
            )


@on_kernels
@both
@pytest.mark.parametrize("bounds", ["zero", "clip", "error"])
def test_all_ids_out_of_range(bounds, gradients, method):
    case = make_case(SHAPE, "float32", True)
    cache = small_cache(gradients)
    table = warm(case.cores, cache, method)
    ids = jnp.array([[-1, N, N + 7], [-5, -1, 2**31 - 1]], jnp.int32)
    run = partial(embed_bag, cache=cache, num_embeddings=N, bounds=bounds, method=method)
    if bounds == "error" and raises(method):
        with pytest.raises(Exception, match="id"):
            jax.block_until_ready(run(table, ids))
        return
    out, directory = run(table, ids)
    before, after = (d.statistics() for d in (table.directory, directory))
    if bounds == "clip":
        want = dense_table(case.cores, N)[np.array([[0, N - 1, N - 1], [0, 0, N - 1]])].sum(1)
        assert_close(out, want, 1e-5)
        assert after["requested"] - before["requested"] == 6
        assert after["misses"] == before["misses"]  # both ends of the table are cached
        return
    np.testing.assert_array_equal(out, np.full_like(out, 0 if bounds == "zero" else np.nan))
    assert after["requested"] == before["requested"] and after["calls"] == before["calls"] + 1
    same(directory._replace(clock=0, totals=0), table.directory._replace(clock=0, totals=0))


@on_kernels
@both
@pytest.mark.parametrize("kind", ["uint32", "split", "int64"])
def test_types_of_ids(kind, gradients, method):
    case = make_case(SHAPE, "float32", True)
    cache = small_cache(gradients)
    ids = np.array([[0, N - 1, 5], [7, 8, 5]], np.int64)
    with jax.enable_x64(kind == "int64"):
        given = SHAPE.split_ids(ids) if kind == "split" else jnp.asarray(ids.astype(kind))
        table = warm(case.cores, cache, method)
        dense, tags, _ = effective(table)
        rows, directory = lookup(table, given, cache, num_embeddings=N, method=method)
    assert_close(rows, dense[ids], 1e-5)
    assert rows.shape == (2, 3, D)
    missed = ~np.isin(ids, tags)
    assert int(directory.totals[3, 0] - table.directory.totals[3, 0]) == missed.sum() == 1


def test_residuals_of_wide_ids_have_one_type_on_every_platform():
    """A program for several platforms needs that."""
    if reason := why_skipped("cuda_emulated"):
        pytest.skip(reason)
    case, cache = make_case(SHAPE, "float32", True), small_cache("rows")

    def residuals(cores, method):
        parts = warm(cores, cache, "reference")
        ids = jnp.array([[0, N - 1, 5], [7, 8, 5]], jnp.int64)

        def rows(cores):
            table = parts._replace(table=cores)
            return lookup(table, ids, cache, num_embeddings=N, method=method)[0]

        return jax.vjp(rows, cores)[1]

    with jax.enable_x64(True):
        on_cpu, emulated = (
            jax.tree.leaves(jax.eval_shape(partial(residuals, method=method), case.cores))
            for method in ("native", "cuda_emulated")
        )
    assert [x.dtype for x in on_cpu] == [x.dtype for x in emulated]
    assert jnp.dtype("int64") in {x.dtype for x in on_cpu}


@on_kernels
def test_padding_of_unsigned_ids(method):
    case = make_case(SHAPE, "float32", True)
    cache = small_cache()
    table = warm(case.cores, cache, method)
    dense, _, _ = effective(table)
    mark = 2**32 - 1
    ids = np.array([[5, mark, 8], [mark, mark, mark]], np.uint32)
    bags = jax_tt.Bags(jnp.asarray(ids), padded=True)
    out, directory = embed_bag(table, bags, cache, combiner="mean", num_embeddings=N, method=method)
    assert_close(out, np.stack([dense[[5, 8]].mean(0), np.zeros(D)]), 1e-5)
    assert directory.statistics()["requested"] == HOT.size + 2


@on_kernels
@both
@pytest.mark.parametrize("beyond", ["int32", "uint32"])
def test_ids_beyond_31_bits(beyond, gradients, method, x64):
    factors = {"int32": (1300, 1300, 1300), "uint32": (1626, 1626, 1626)}[beyond]
    shape = jax_tt.TTShape(int(np.prod(factors, dtype=np.int64)), 8, 2, factors, (2, 2, 2))
    n = shape.num_embeddings
    cores = make_case(shape, "float32", False).cores
    rows = np.array([n - 1, 2**31, 2**31 + 1, 3, n - 2], np.int64)
    if beyond == "uint32":
        # All bits set is a row like any other where nothing is padded.
        rows = np.array([2**32 - 1, 2**32 - 2, 2**31, 3, 2**32 - 3], np.int64)
    cache = small_cache(gradients)
    table = warm(cores, cache, method, jnp.asarray(rows[[0, 2]]), n=n)
    given = [jnp.asarray(rows), shape.split_ids(rows)]
    if beyond == "uint32":
        given += [jnp.asarray(rows.astype(np.uint32))]
        cold = warm(cores, cache, method, jnp.asarray([1]), n=n)
        got, _ = lookup(cold, given[-1], cache, method=method)
        np.testing.assert_allclose(got, uncached_lookup(cores, given[-1], method=method), rtol=1e-5)
    for ids in given:
        got, directory = lookup(table, ids, cache, method=method)
        want = uncached_lookup(cores, ids, method=method)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert directory.statistics()["misses"] == 5


@on_kernels
@pytest.mark.parametrize(
    ("storage", "dtype", "gradients"),
    [
        ("float32", "bfloat16", "rows"),
        ("bfloat16", "float32", "cores"),
        ("float64", "float32", "rows"),
        ("float32", "float64", "rows"),
    ],
)
def test_rows_of_another_type(storage, dtype, gradients, method):
    skip_unless_stored(storage, method)
    skip_unless_stored(dtype, method)
    with jax.enable_x64("float64" in (storage, dtype)):
        case = make_case(SHAPE, storage, True)
        cache = small_cache(gradients, dtype=dtype)
        table = warm(case.cores, cache, method)
        assert table.values.dtype == jnp.dtype(dtype)
        if gradients == "rows":
            table = trained(table)
        dense, tags, slots = effective(table)
        bags = case.bags()

        def loss(cores, rows):
            out, _ = cache_parts.embed_bag(
                table._replace(table=cores, rows=rows), bags, cache, num_embeddings=N, method=method
            )
            return jnp.sum(out.astype(jnp.float32) * jnp.asarray(case.g, jnp.float32)), out

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, out), (dcores, drows) = step(table.table, table.rows)
        tolerance = max(TOLERANCE[storage], TOLERANCE[dtype], 1e-5)
        want, dtable, _ = bag_model(dense, case.rows, case.weights, "sum", case.g)
        assert out.dtype == jnp.dtype(storage) and drows.dtype == jnp.dtype(dtype)
        assert_close(out, want, tolerance)
        if gradients == "rows":
            want_rows = np.zeros(drows.shape)
            want_rows[slots] = dtable[tags[slots]]
            assert_close(drows, want_rows, tolerance)
            dtable[tags[slots]] = 0
        for got, expected in zip(dcores, core_gradients(case.cores, dtable), strict=True):
            assert_close(got, expected, tolerance)


@on_kernels
@both
def test_copies_are_read_and_rows_are_not_differentiated_twice(gradients, method):
    """With ``"cores"`` a copy that has grown old is what a lookup reads, and no gradient reaches it."""
    case = make_case(SHAPE, "float32", False)
    cache = small_cache(gradients)
    table = trained(warm(case.cores, cache, method))
    dense, _, slots = effective(table)
    ids = jnp.arange(N)

    def loss(rows):
        out, _ = cache_parts.lookup(
            table._replace(rows=rows), ids, cache, num_embeddings=N, method=method
        )
        return jnp.sum(out), out

    (_, out), drows = jax.jit(jax.value_and_grad(loss, has_aux=True))(table.rows)
    assert_close(out, dense, 1e-5)
    want = np.zeros(drows.shape)
    if gradients == "rows":
        want[slots] = 1
    np.testing.assert_array_equal(drows, want)


@both
def test_a_bad_row_stays_where_it_is(gradients, method):
    """NaN in a cached row or in a core reaches only who asks for it."""
    case = make_case(SHAPE, "float32", False)
    cache = small_cache(gradients)
    table = warm(case.cores, cache, method)
    tags = np.asarray(table.directory.tags).reshape(-1)
    bad = int(tags[0])
    assert bad >= 0
    rows = np.array(table.values)
    rows[0] = np.nan
    table = table._replace(rows=jnp.asarray(rows))
    others = np.delete(np.arange(N), bad)
    out, _ = lookup(table, others, cache, num_embeddings=N, method=method)
    assert np.isfinite(out).all()
    table = warm(case.cores, cache, method)
    broken = np.array(case.cores[0])
    broken[0] = np.nan  # rows 0 to 29, of which 0, 5 and 7 are cached
    table = table._replace(table=(jnp.asarray(broken), *case.cores[1:]))
    fine = np.resize([0, 5, 7, *range(30, N)], others.size)
    out, _ = lookup(table, fine, cache, num_embeddings=N, method=method)
    assert np.isfinite(out).all()
