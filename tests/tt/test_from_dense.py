"""`tt.from_dense` against singular values of unfoldings by numpy in float64, on every way to decompose a table."""

import itertools
import math
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._tt import approximation, decompose, from_dense, rows, weighted
from tests.helpers import SHAPES

WAYS = ("whole", "gram", "sketch")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Small tables on the ways of large ones, in many blocks."""
    if request.param != "whole":
        monkeypatch.setattr(decompose, "_EXACT", 0)
        for module in (rows, decompose, approximation):
            monkeypatch.setattr(module, "_BLOCK", 700)
        monkeypatch.setattr(from_dense, "_ENERGY_BLOCK", 700)
    if request.param == "sketch":
        monkeypatch.setattr(decompose, "GRAM_SIDE", 0)
    return request.param


def dense(cores, n):
    """The table of cores, float64 ``[N, D]``."""
    out = np.ones((1, 1, 1))
    for core in cores:
        core = np.asarray(core).astype(np.float64)
        out = np.einsum("pqa,iajb->piqjb", out, core)
        out = out.reshape(out.shape[0] * core.shape[0], -1, core.shape[3])
    return out[:n, :, 0]


def random_train(shape, seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    cores = [rng.standard_normal(core) for core in shape.core_shapes]
    return dense(cores, shape.num_embeddings).astype(dtype)


def discarded(table, shape):
    """Of each unfolding, the norm of the singular values beyond its rank; the table fills its factors."""
    p, q, d = shape.row_factors, shape.col_factors, shape.d
    tensor = table.astype(np.float64).reshape(*p, *q)
    tensor = tensor.transpose([axis for k in range(d) for axis in (k, d + k)])
    norms = []
    for k, rank in enumerate(shape.ranks, 1):
        matrix = tensor.reshape(math.prod(p[:k]) * math.prod(q[:k]), -1)
        norms.append(np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[rank:]))
    return np.array(norms)


def error(found, table):
    return np.linalg.norm(dense(found.cores, len(table)) - table.astype(np.float64))


def words_table(n, width):
    """A real table that does not change: how often, in logarithms, words of the licence stand before others."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    words = re.findall("[a-z]+", text.lower())
    place = {word: i for i, word in enumerate(dict.fromkeys(words))}
    counts = np.zeros((n, width))
    for word, after in itertools.pairwise(words):
        if place[word] < n:
            counts[place[word], place[after] % width] += 1
    return np.log1p(counts).astype(np.float32)


# -- optimality


@st.composite
def full_shapes(draw):
    """Shapes without slack, of 2 to 4 cores."""
    d = draw(st.integers(2, 4))
    p = draw(st.lists(st.integers(1, 6), min_size=d, max_size=d))
    q = draw(st.lists(st.integers(1, 3), min_size=d, max_size=d))
    ranks = draw(st.lists(st.integers(1, 8), min_size=d - 1, max_size=d - 1))
    return jax_tt.TTShape(math.prod(p), math.prod(q), ranks, p, q)


def check_bounds(found, table, shape, slack=1e-6):
    norms, floor = discarded(table, shape), 1e-6 * np.linalg.norm(table)
    reached = error(found, table)
    assert found.shape == shape
    assert reached <= (1 + slack) * np.linalg.norm(norms) + floor
    # The best train of these ranks is at least as bad as the best matrix at any cut.
    assert reached <= (1 + slack) * math.sqrt(shape.d - 1) * norms.max() + floor
    assert found.relative_error == pytest.approx(
        reached / np.linalg.norm(table.astype(np.float64)), rel=1e-4, abs=1e-7
    )


@hypothesis.settings(max_examples=20)
@hypothesis.given(full_shapes(), st.integers(0, 2**16))
def test_error_is_within_the_bounds_of_the_singular_values(shape, seed):
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((shape.num_embeddings, shape.features)).astype(np.float32)
    check_bounds(jax_tt.tt.from_dense(table, shape=shape), table, shape)


def test_bounds_of_every_number_of_cores(way):
    rng = np.random.default_rng(0)
    for p, q, ranks in [
        ((20, 30), (4, 4), 7),
        ((5, 4, 3, 4), (2, 1, 3, 2), (4, 6, 5)),
        ((3, 4, 3, 2, 4), (1, 2, 1, 2, 2), 4),
    ]:
        shape = jax_tt.TTShape(math.prod(p), math.prod(q), ranks, p, q)
        table = rng.standard_normal((shape.num_embeddings, shape.features)).astype(np.float32)
        check_bounds(jax_tt.tt.from_dense(table, shape=shape), table, shape, slack=0.02)
    shape = jax_tt.TTShape(9 * 8 * 7, 24, (6, 9), (9, 8, 7), (2, 3, 4))
    real = words_table(shape.num_embeddings, 24)
    check_bounds(jax_tt.tt.from_dense(real, shape=shape), real, shape, slack=0.01)


def test_two_cores_are_the_truncated_svd():
    shape = jax_tt.TTShape(7 * 9, 12, 5, (7, 9), (3, 4))
    table = np.random.default_rng(0).standard_normal((63, 12))
    found = jax_tt.tt.from_dense(table.astype(np.float32), shape=shape)
    assert error(found, table) == pytest.approx(discarded(table, shape)[0], rel=1e-5)


# -- exact recovery, and the rows past the end


@pytest.mark.parametrize("name", ["d2", "d3-odd", "d3-one-column", "d5"])
def test_a_train_is_recovered(way, name):
    shape = SHAPES[name]  # most of them address more rows than the table has
    found = jax_tt.tt.from_dense(random_train(shape, 1), shape=shape)
    assert found.shape == shape
    assert found.relative_error < 5e-7
    assert max(found.row_errors.values()) < 1e-4


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(2, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_rows_past_the_end_cost_no_rank(missing, r, s, seed):
    full = (6, 5, 7)
    shape = jax_tt.TTShape(math.prod(full) - missing, 8, (r, s), full, (2, 2, 2))
    table = random_train(shape, seed)
    found = jax_tt.tt.from_dense(
        table, tolerance=1e-5, row_factors=full, col_factors=shape.col_factors
    )
    assert found.relative_error <= 1e-5
    assert all(a <= b for a, b in zip(found.shape.ranks, shape.ranks, strict=True))


def test_noise_past_the_end_is_not_blown_up():
    """One known row of the last slab against 30 complete slabs: the fill stays of the size of the table."""
    shape = jax_tt.TTShape(30 * 20 + 1, 4, 30, (31, 20), (2, 2))
    table = np.random.default_rng(0).standard_normal((601, 4)).astype(np.float32)
    found = jax_tt.tt.from_dense(table, shape=shape)
    filled = dense(found.cores, shape.num_rows)[601:]
    assert np.sqrt(np.mean(filled**2)) < 1.5


# -- tolerance and budget


@pytest.mark.parametrize("tolerance", [0.0, 0.4, 0.99])
def test_tolerance_is_kept(way, tolerance):
    shape = jax_tt.TTShape(6 * 7 * 8, 8, 3, (6, 7, 8), (2, 2, 2))
    noise = np.random.default_rng(0).standard_normal((336, 8))
    table = (random_train(shape, 0) + 0.3 * noise).astype(np.float32)
    found = jax_tt.tt.from_dense(
        table, tolerance=tolerance, row_factors=(6, 7, 8), col_factors=(2, 2, 2)
    )
    assert found.relative_error <= max(tolerance, 1e-6)
    if tolerance == 0.4:
        assert found.shape.ranks == (3, 3)


def test_tolerance_takes_the_least_rank(way):
    table = np.random.default_rng(0).standard_normal((90, 6)).astype(np.float32)
    for tolerance in (0.7, 0.3):
        found = jax_tt.tt.from_dense(
            table, tolerance=tolerance, row_factors=(9, 10), col_factors=(2, 3)
        )
        less = jax_tt.TTShape(90, 6, found.shape.ranks[0] - 1, (9, 10), (2, 3))
        assert found.relative_error <= tolerance
        assert discarded(table, less)[0] > tolerance * np.linalg.norm(table)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_budget_is_kept_and_spent_by_the_singular_values(way, dtype):
    shape = jax_tt.TTShape(8 * 9 * 10, 8, (2, 12), (8, 9, 10), (2, 2, 2))
    table = random_train(shape, 0)
    size = jnp.dtype(dtype).itemsize
    factors = {"row_factors": (8, 9, 10), "col_factors": (2, 2, 2)}
    found = jax_tt.tt.from_dense(table, max_bytes=900 * size, dtype=dtype, **factors)
    assert found.shape.num_params <= 900
    assert {core.dtype for core in found.cores} == {jnp.dtype(dtype)}
    uniform = jax_tt.TTShape(720, 8, 6, (8, 9, 10), (2, 2, 2))
    assert uniform.num_params <= 900
    same = jax_tt.tt.from_dense(table, shape=uniform)
    assert found.relative_error < 0.8 * same.relative_error


def test_budget_alone_chooses_a_shape():
    table = np.random.default_rng(0).standard_normal((3000, 12)).astype(np.float32)
    found = jax_tt.tt.from_dense(table, max_bytes=8000)
    assert found.shape.cost().bytes <= 8000
    with pytest.raises(ValueError, match="max_bytes: got 16"):
        jax_tt.tt.from_dense(table, max_bytes=16)
    table[0] = np.nan  # which nobody reads before a budget that is too small is refused
    with pytest.raises(ValueError, match=r"max_bytes: got 16.*at least"):
        jax_tt.tt.from_dense(table, max_bytes=16, row_factors=(50, 60), col_factors=(3, 4))


def test_the_number_of_cores_for_a_budget_suits_a_real_table():
    table = words_table(480, 24)
    for ratio in (4, 30):
        budget = 4 * (table.size // ratio)
        errors = []
        for d in (2, 3, 4, 5):
            factors = jax_tt.TTShape.suggest(*table.shape, 1, d)
            found = jax_tt.tt.from_dense(
                table,
                max_bytes=budget,
                row_factors=factors.row_factors,
                col_factors=factors.col_factors,
            )
            errors.append(found.relative_error)
        assert jax_tt.tt.from_dense(table, max_bytes=budget).relative_error < 1.05 * min(errors)


# -- weights


def weighted_error(cores, table, weights):
    difference = dense(cores, len(table)) - table
    return float(weights @ np.square(difference).sum(1))


def test_weights_that_are_products_give_the_weighted_svd():
    p, q, rank = (7, 9), (3, 2), 4
    rng = np.random.default_rng(0)
    table = rng.standard_normal((63, 6))
    a, b = rng.uniform(0.2, 1, 7), rng.uniform(0.2, 1, 9)
    weights = np.multiply.outer(a, b).reshape(-1)
    shape = jax_tt.TTShape(63, 6, rank, p, q)
    best = discarded(np.sqrt(weights)[:, None] * table, shape)[0]
    for sweeps in (0, 3):
        found = jax_tt.tt.from_dense(
            table.astype(np.float32), shape=shape, weights=weights, sweeps=sweeps
        )
        assert math.sqrt(weighted_error(found.cores, table, weights)) == pytest.approx(best, 1e-4)
        whole = math.sqrt(weights @ np.square(table).sum(1))
        assert found.weighted_error == pytest.approx(best / whole, rel=1e-4)


@pytest.mark.parametrize("block", [1 << 22, 300])
def test_rows_without_weight_do_not_count(monkeypatch, block):
    monkeypatch.setattr(weighted, "_BLOCK", block)
    monkeypatch.setattr(weighted, "_NORMAL", 16 * block)
    shape = jax_tt.TTShape(6 * 7 * 8 - 5, 8, 3, (6, 7, 8), (2, 2, 2))
    table = random_train(shape, 0)
    rng = np.random.default_rng(1)
    weights = (rng.uniform(size=len(table)) > 0.1).astype(np.float64)
    spoilt = table + (1 - weights)[:, None] * rng.standard_normal(table.shape)
    found = jax_tt.tt.from_dense(spoilt.astype(np.float32), shape=shape, weights=weights, sweeps=12)
    assert found.weighted_error < 1e-3
    np.testing.assert_allclose(dense(found.cores, len(table)), table, atol=0.05 * table.std())


def test_sweeps_lower_the_weighted_error(way):
    table = words_table(500, 12)
    weights = 1 / np.random.default_rng(0).permutation(np.arange(1.0, 501))
    plain = jax_tt.tt.from_dense(table, 5)
    errors = [
        jax_tt.tt.from_dense(table, 5, weights=weights, sweeps=sweeps).weighted_error
        for sweeps in (0, 1, 2, 4)
    ]
    assert errors == sorted(errors, reverse=True)
    whole = weights @ np.square(table).sum(1)
    assert errors[2] < 0.9 * math.sqrt(weighted_error(plain.cores, table, weights) / whole)


@pytest.mark.parametrize("goal", [{"tolerance": 0.5}, {"max_bytes": 2000}])
def test_weights_with_a_tolerance_or_a_budget(goal):
    table = words_table(300, 12)
    weights = np.arange(300.0)
    found = jax_tt.tt.from_dense(table, weights=weights, **goal)
    whole = weights @ np.square(table.astype(np.float64)).sum(1)
    reached = math.sqrt(weighted_error(found.cores, table, weights) / whole)
    assert found.weighted_error == pytest.approx(reached, rel=1e-4)
    assert reached < goal.get("tolerance", 1)
    assert found.shape.cost().bytes <= goal.get("max_bytes", math.inf)


# -- report, types, kinds of tables


def test_report_is_that_of_the_stored_cores(way):
    table = words_table(400, 12)
    table[17] = 0
    found = jax_tt.tt.from_dense(table, 4, dtype=jnp.bfloat16)
    difference = np.linalg.norm(dense(found.cores, 400) - table, axis=1)
    norms = np.linalg.norm(table.astype(np.float64), axis=1)
    norms[norms == 0] = np.sqrt(np.mean(norms**2))
    ratios = difference / norms
    for quantile, value in found.row_errors.items():
        assert value == pytest.approx(np.quantile(ratios, quantile), rel=1e-3)
    assert "relative error" in str(found) and "0.99: " in str(found)


def test_cores_beyond_the_range_of_their_type_are_refused():
    table = np.full((100, 8), 1e20, np.float32)
    assert jax_tt.tt.from_dense(table, 2, dtype=jnp.bfloat16).relative_error < 0.01
    with pytest.raises(ValueError, match=r"dtype: got float16, whose largest number is 6\.55e\+04"):
        jax_tt.tt.from_dense(table, 2, dtype=jnp.float16)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_types(dtype):
    shape = SHAPES["d3"]
    table = random_train(shape, 0).astype(jnp.dtype(dtype))
    found = jax_tt.tt.from_dense(table, shape=shape)
    stored = "float32" if dtype == "float64" else dtype
    assert {str(core.dtype) for core in found.cores} == {stored}
    assert found.relative_error < {"float32": 1e-6}.get(stored, 0.02)


def test_float64_is_recovered_to_its_rounding(x64):
    del x64
    shape = SHAPES["d4"]
    found = jax_tt.tt.from_dense(random_train(shape, 0, np.float64), shape=shape)
    assert found.relative_error < 1e-14 and found.cores[0].dtype == np.float64


def test_kinds_of_tables_are_the_same(tmp_path, way):
    table = words_table(300, 6)
    on_disk = np.memmap(tmp_path / "table", np.float32, "w+", shape=table.shape)
    on_disk[:] = table
    kinds = [table, on_disk, jnp.asarray(table), np.asfortranarray(table), table.tolist()]
    found = [jax_tt.tt.from_dense(kind, 3, seed=4, dtype=jnp.float32).cores for kind in kinds]
    for cores in found[1:]:
        for a, b in zip(cores, found[0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_seed_decides(monkeypatch):
    monkeypatch.setattr(decompose, "_EXACT", 0)
    monkeypatch.setattr(decompose, "GRAM_SIDE", 0)
    table = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    one, two, other = (jax_tt.tt.from_dense(table, 4, seed=seed).cores for seed in (0, 0, 1))
    assert all(bool(jnp.array_equal(a, b)) for a, b in zip(one, two, strict=True))
    assert not all(bool(jnp.array_equal(a, b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("n, width", [(1, 1), (5, 13), (97, 1)])
def test_odd_sizes_at_full_rank(way, n, width):
    table = np.random.default_rng(0).standard_normal((n, width)).astype(np.float32)
    found = jax_tt.tt.from_dense(table, 1000)
    assert found.relative_error < 1e-6


def test_zeros_and_ranks_of_no_use(way):
    found = jax_tt.tt.from_dense(np.zeros((50, 4), np.float32), 3)
    assert found.relative_error == 0 and found.row_errors[1.0] == 0
    assert all(np.isfinite(core).all() for core in found.cores)
    # The second rank exceeds what the first leaves room for; the cores have the shapes asked for all the same.
    shape = jax_tt.TTShape(60, 4, (1, 9), (3, 4, 5), (1, 2, 2))
    table = random_train(jax_tt.TTShape(60, 4, 2, (3, 4, 5), (1, 2, 2)), 0)
    found = jax_tt.tt.from_dense(table, shape=shape)
    assert [core.shape for core in found.cores] == list(shape.core_shapes)


def test_cores_are_balanced_and_can_all_be_trained():
    table = random_train(SHAPES["d3"], 0)
    found = jax_tt.tt.from_dense(1000 * table, 6, row_factors=(4, 5, 6), col_factors=(2, 2, 2))
    sizes = [float(jnp.sqrt(jnp.mean(core**2))) for core in found.cores]
    assert max(sizes) < 1.001 * min(sizes)
    # Also along the directions that the table does not need: ranks 4 were enough.
    for core in found.cores[:-1]:
        directions = np.square(core).sum((0, 1, 2))
        assert directions.min() > 1e-3 * directions.max()


def test_progress_is_shown(capsys):
    jax_tt.tt.from_dense(np.ones((50, 4), np.float32), 1, progress=True)
    assert "error" in capsys.readouterr().err


# -- errors

TABLE = np.ones((60, 4), np.float32)


def test_arguments_that_do_not_fit():
    for message, arguments in [
        ("none of them; expected exactly one", {}),
        ("ranks and tolerance", {"ranks": 2, "tolerance": 0.1}),
        ("tolerance: got 1", {"tolerance": 1}),
        ("tolerance: got nan", {"tolerance": float("nan")}),
        ("max_bytes: got 0", {"max_bytes": 0}),
        ("ranks: got 0", {"ranks": 0}),
        ("shape: got 61 x 4", {"shape": jax_tt.TTShape.suggest(61, 4)}),
        ("row_factors, col_factors", {"ranks": 2, "row_factors": (6, 10)}),
        (
            "row_factors, col_factors: the shape has them",
            {"shape": jax_tt.TTShape.suggest(60, 4), "row_factors": (6, 10)},
        ),
        ("row_factors: got 6 x 9", {"ranks": 2, "row_factors": (6, 9), "col_factors": (2, 2)}),
        (r"weights: got .*shape \(3,\)", {"ranks": 2, "weights": np.ones(3)}),
        ("weights: got some that are negative", {"ranks": 2, "weights": -np.ones(60)}),
        ("weights: got zeros alone", {"ranks": 2, "weights": np.zeros(60)}),
        ("sweeps: got -1", {"ranks": 2, "weights": np.ones(60), "sweeps": -1}),
        ("dtype: got int32", {"ranks": 2, "dtype": jnp.int32}),
    ]:
        with pytest.raises(ValueError, match=message):
            jax_tt.tt.from_dense(TABLE, **arguments)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_table_that_is_not_finite(way, value):
    table = np.ones((300, 4), np.float32)
    table[217, 2] = value
    with pytest.raises(ValueError, match="row 217"):
        jax_tt.tt.from_dense(table, 2)


def test_tables_and_shapes_that_are_none_are_refused():
    for table in (np.ones(3, np.float32), np.ones((0, 4), np.float32), np.ones((3, 4), np.int32)):
        with pytest.raises(ValueError, match="table: got"):
            jax_tt.tt.from_dense(table, 2)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda table: jax_tt.tt.from_dense(table, 2).cores)(TABLE)
    with pytest.raises(TypeError, match="shape: got"):
        jax_tt.tt.from_dense(TABLE, shape=(2, 2))
