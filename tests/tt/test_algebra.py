"""`tt.add`, `tt.inner`, `tt.norm`, `tt.round` and `tt.refine` against dense tables in float64."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._tt.trains import FixedRanks, orthogonal_from_right, to_cores, to_links, truncate
from tests.helpers import SHAPES
from tests.tt.test_from_dense import dense, discarded, full_shapes


def train(shape, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(c), dtype) for c in shape.core_shapes)


def other_ranks(shape, rank=2):
    return jax_tt.TTShape(
        shape.num_embeddings, shape.features, rank, shape.row_factors, shape.col_factors
    )


# -- sums and products


@pytest.mark.parametrize("name", ["d2", "d3-one-column", "d5"])
def test_sum(name):
    a, b = train(SHAPES[name], 0), train(other_ranks(SHAPES[name]), 1)
    found = jax.jit(jax_tt.tt.add)(a, b)
    rows = SHAPES[name].num_rows
    np.testing.assert_allclose(dense(found, rows), dense(a, rows) + dense(b, rows), atol=1e-6)


@pytest.mark.parametrize("name", ["d2", "d3-odd"])
def test_inner_products_count_the_rows_of_the_table(name):
    shape = SHAPES[name]
    a, b = train(shape, 0), train(other_ranks(shape), 1)
    whole = dense(a, shape.num_rows), dense(b, shape.num_rows)
    last = shape.row_factors[-1]
    for n in (1, last, shape.num_embeddings, None):
        x, y = (table[:n] for table in whole)
        tolerance = 1e-5 * np.linalg.norm(x) * np.linalg.norm(y)
        assert abs(float(jax_tt.tt.inner(a, b, n)) - np.sum(x * y)) < tolerance
        assert float(jax_tt.tt.norm(a, n)) == pytest.approx(np.linalg.norm(x), rel=1e-5)


def test_norm_of_a_small_difference():
    cores = train(SHAPES["d3"], 0)
    near = (cores[0] * (1 + 1e-5), *cores[1:])
    difference = jax_tt.tt.add(near, (-cores[0], *cores[1:]))
    exact = np.linalg.norm(dense(near, 120) - dense(cores, 120))
    assert float(jax_tt.tt.norm(difference)) == pytest.approx(exact, rel=0.05)
    assert float(jax_tt.tt.norm(jax_tt.tt.add(cores, (-cores[0], *cores[1:])))) < 1e-4


def test_gradients_of_products(x64):
    del x64
    n = 97
    shape = SHAPES["d3"]
    a, b = train(shape, 0, np.float64), train(other_ranks(shape), 1, np.float64)

    def table(cores):
        return jax_tt.tt.to_dense(cores, n, method="reference")

    for ours, plain in [
        (lambda a: jax_tt.tt.inner(a, b, n), lambda a: jnp.sum(table(a) * table(b))),
        (
            lambda a: jax_tt.tt.norm(jax_tt.tt.add(a, b), n),
            lambda a: jnp.linalg.norm(table(a) + table(b)),
        ),
    ]:
        for x, y in zip(jax.jit(jax.grad(ours))(a), jax.grad(plain)(a), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_types_of_sums_and_products(x64, dtype):
    del x64
    a, b = train(SHAPES["d3"], 0, jnp.dtype(dtype)), train(SHAPES["d3"], 1)
    total = jax_tt.tt.add(a, b)
    wide = "float64" if dtype == "float64" else "float32"
    assert {str(core.dtype) for core in total} == {wide}
    inner = jax_tt.tt.inner(a, b)
    assert str(inner.dtype) == str(jax_tt.tt.norm(total).dtype) == wide
    assert float(inner) == pytest.approx(np.sum(dense(a, 120) * dense(b, 120)), rel=1e-4)
    rounded = jax_tt.tt.round(a, 2)
    assert {str(core.dtype) for core in rounded} == {dtype}


# -- rounding


@hypothesis.given(full_shapes(), st.integers(0, 99), st.integers(1, 4), st.integers(1, 9))
def test_rounding_is_within_the_bounds_of_the_singular_values(shape, seed, rank, before):
    """In numpy, which has nothing to compile for a new shape."""
    rng = np.random.default_rng(seed)
    cores = [rng.standard_normal(core) for core in other_ranks(shape, before).core_shapes]
    table = dense(cores, shape.num_rows)
    wanted = other_ranks(shape, rank)
    links = truncate(orthogonal_from_right(to_links(cores)), FixedRanks(wanted.ranks))
    found = to_cores(links, shape.row_factors, shape.col_factors)
    reached = np.linalg.norm(dense(found, shape.num_rows) - table)
    norms = discarded(table, wanted)
    floor = 1e-10 * np.linalg.norm(table)
    assert reached <= np.linalg.norm(norms) + floor
    assert reached <= math.sqrt(shape.d - 1) * norms.max() + floor


@pytest.mark.parametrize("name", ["d2", "d3-odd", "d3-rank-one", "d5"])
def test_rounding_undoes_a_sum(name):
    shape = SHAPES[name]
    cores = train(shape, 0)
    twice = jax_tt.tt.add(cores, cores)
    for found in (
        jax_tt.tt.round(twice, shape.ranks),
        jax_tt.tt.round(twice, tolerance=1e-5),
        jax_tt.tt.round(twice, max_bytes=2 * shape.cost().bytes),
    ):
        table = 2 * dense(cores, shape.num_rows)
        error = np.linalg.norm(dense(found, shape.num_rows) - table)
        assert error < 2e-5 * np.linalg.norm(table)
        assert all(
            core.shape[3] <= rank for core, rank in zip(found[:-1], shape.ranks, strict=True)
        )


def test_rounding_keeps_its_ranks_its_tolerance_or_its_budget():
    shape = SHAPES["d4"]
    cores = train(shape, 3)
    table = dense(cores, shape.num_rows)

    def error(found):
        return np.linalg.norm(dense(found, shape.num_rows) - table)

    wanted = other_ranks(shape, 2)
    found = jax_tt.tt.round(cores, 2)
    assert error(found) <= np.linalg.norm(discarded(table, wanted)) * (1 + 1e-5)
    assert [core.shape for core in found] == list(wanted.core_shapes)
    for tolerance in (0.0, 0.5):
        found = jax_tt.tt.round(cores, tolerance=tolerance)
        assert error(found) <= (tolerance + 1e-6) * np.linalg.norm(table)
    # A tolerance is relative to the table, whatever its size.
    small = (1e-3 * cores[0], *cores[1:])
    for got, want in zip(jax_tt.tt.round(small, tolerance=0.5), found, strict=True):
        assert got.shape == want.shape
    small = jax_tt.tt.round(cores, max_bytes=shape.cost().bytes // 2)
    assert sum(core.size for core in small) * 4 <= shape.cost().bytes // 2


# -- least squares on samples


def test_refining_recovers_a_train_from_some_of_its_rows():
    shape = jax_tt.TTShape(10 * 11 * 12 - 9, 8, 3, (10, 11, 12), (2, 2, 2))
    wanted = train(shape, 0)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, shape.num_embeddings, 700)
    rows = dense(wanted, shape.num_embeddings)[ids]
    start = tuple(core + 0.1 * noise for core, noise in zip(wanted, train(shape, 1), strict=True))
    found = jax_tt.tt.refine(start, ids, rows, sweeps=8, ridge=1e-9)
    table = dense(wanted, shape.num_embeddings)
    error = np.linalg.norm(dense(found, shape.num_embeddings) - table)
    assert error < 1e-3 * np.linalg.norm(table)
    assert [core.shape for core in found] == list(shape.core_shapes)


def test_refining_solves_the_ridge_regression():
    """One sweep of two cores of which the samples reach one slice: the first step is a regression by hand."""
    shape = jax_tt.TTShape(12, 4, 2, (3, 4), (2, 2))
    cores = train(shape, 0)
    ids, weights = np.array([4, 5, 5]), np.array([1.0, 2.0, 0.5])
    rows = np.random.default_rng(1).standard_normal((3, 4))
    ridge = 0.3

    def objective(table):
        samples = weights @ np.square(table[ids] - rows).sum(1)
        return samples + ridge * weights.sum() / 12 * np.sum((table - before) ** 2)

    before = dense(cores, 12)
    found = jax_tt.tt.refine(cores, ids, rows, weights=weights, ridge=ridge, sweeps=1)
    # The best first core for the second as it was, over all rows at once, then one more step may only help.
    right = np.asarray(cores[1], np.float64)[:, :, :, 0].transpose(1, 0, 2).reshape(2, 8)
    design, target = [], []
    for row, weight in [(None, ridge * weights.sum() / 12), *zip(range(3), weights, strict=True)]:
        chosen = range(12) if row is None else [ids[row]]
        for i in chosen:
            value = before[i] if row is None else rows[row]
            basis = np.zeros((4, 3, 2, 2))  # [column, slice, q, r]
            for j, k in np.ndindex(2, 2):
                basis[2 * j + k, i // 4, j] = right[:, 2 * (i % 4) + k]
            design.append(math.sqrt(weight) * basis.reshape(4, -1))
            target.append(math.sqrt(weight) * value)
    solution = np.linalg.lstsq(np.concatenate(design), np.concatenate(target), rcond=None)[0]
    first = solution.reshape(3, 2, 2)[:, None]
    best_first = dense((first, cores[1]), 12)
    assert objective(dense(found, 12)) <= objective(best_first) * (1 + 1e-6)
    np.testing.assert_allclose(
        dense(jax_tt.tt.refine(cores, ids, rows, sweeps=0), 12), before, atol=1e-5
    )


def test_refining_without_samples_changes_nothing():
    cores = train(SHAPES["d3"], 0)
    found = jax_tt.tt.refine(cores, np.zeros(0, np.int32), np.zeros((0, 8)))
    assert all(bool(jnp.array_equal(a, b)) for a, b in zip(found, cores, strict=True))


# -- shapes for a budget


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    st.integers(1, 10**12), st.sampled_from([1, 3, 16, 64, 100, 1024]), st.integers(10, 10**8)
)
def test_shapes_for_a_budget_stay_within_it(n, features, params):
    try:
        shape = jax_tt.TTShape.for_budget(n, features, max_bytes=4 * params)
    except ValueError as error:
        assert "at least" in str(error)
        return
    assert (shape.num_embeddings, shape.features) == (n, features)
    assert shape.cost().bytes <= 4 * params
    assert shape == jax_tt.TTShape.for_budget(n, features, max_bytes=2 * params, dtype="bfloat16")


def test_a_budget_is_used():
    for ratio in (3, 30, 300, 3000):
        shape = jax_tt.TTShape.for_budget(1_000_000, 64, ratio=ratio)
        assert ratio <= shape.cost().compression < 1.5 * ratio


def test_no_rank_of_a_shape_for_a_budget_exceeds_the_largest():
    free = jax_tt.TTShape.for_budget(1_000_000, 64, ratio=10)
    for largest in (1, 32, max(free.ranks), 10**9):
        shape = jax_tt.TTShape.for_budget(1_000_000, 64, ratio=10, max_rank=largest)
        assert max(shape.ranks) <= largest and shape.cost().compression >= 10
    assert shape == free


# -- errors

CORES = train(SHAPES["d3"], 0)
IDS, ROWS = np.array([1, 2]), np.ones((2, 8))


def test_arguments_that_do_not_fit():
    for message, call in [
        ("b: got row factors", lambda: jax_tt.tt.add(CORES, train(SHAPES["d2"], 0))),
        ("a: cores: got 1 cores", lambda: jax_tt.tt.inner(CORES[:1], CORES)),
        ("num_embeddings: got 121", lambda: jax_tt.tt.inner(CORES, CORES, 121)),
        ("num_embeddings: got 0", lambda: jax_tt.tt.norm(CORES, 0)),
        ("expected exactly one", lambda: jax_tt.tt.round(CORES)),
        ("ranks and tolerance", lambda: jax_tt.tt.round(CORES, 3, tolerance=0.1)),
        ("ranks: got 3 ranks", lambda: jax_tt.tt.round(CORES, (1, 2, 3))),
        ("max_bytes: got 4 bytes;", lambda: jax_tt.tt.round(CORES, max_bytes=4)),
        ("ids: got the id 120; expected 0 to 119", lambda: jax_tt.tt.refine(CORES, [1, 120], ROWS)),
        ("ids: got float", lambda: jax_tt.tt.refine(CORES, [1.0, 2.0], ROWS)),
        (r"rows: got .*shape \(2, 7\)", lambda: jax_tt.tt.refine(CORES, IDS, ROWS[:, 1:])),
        ("rows: got NaN", lambda: jax_tt.tt.refine(CORES, IDS, ROWS * np.nan)),
        ("ridge: got -1", lambda: jax_tt.tt.refine(CORES, IDS, ROWS, ridge=-1)),
        ("max_bytes, ratio", lambda: jax_tt.TTShape.for_budget(100, 8)),
        ("ratio: got 0", lambda: jax_tt.TTShape.for_budget(100, 8, ratio=0)),
        ("max_rank: got 0", lambda: jax_tt.TTShape.for_budget(100, 8, ratio=2, max_rank=0)),
        ("ratio: got 90", lambda: jax_tt.TTShape.for_budget(100, 8, ratio=90)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_ranks_that_follow_from_values_are_refused_under_jit():
    with pytest.raises(TypeError, match=r"cores: got a traced array; .*tolerance"):
        jax.jit(lambda cores: jax_tt.tt.round(cores, tolerance=0.1))(CORES)
