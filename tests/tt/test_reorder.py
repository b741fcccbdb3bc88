"""`tt.reorder`: rows move with their ids, as far as the new cores can hold them."""

import math
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_tt
from jax_tt._tt import approximation, decompose, from_dense, rows
from jax_tt.order import IdOrder
from tests.helpers import SHAPES, dense_table, make_case

SHAPE = jax_tt.TTShape(120, 8, (4, 4), (4, 5, 6), (2, 2, 2))
CORES = jax_tt.tt.init(jax.random.key(0), SHAPE)


def shuffled(n, seed=0):
    return IdOrder(np.random.default_rng(seed).permutation(n))


def by_id(cores, order, n):
    """float64 ``[N, D]``, the row of every id."""
    table = dense_table(cores, n)
    return table if order is None else table[order.rows]


@settings(max_examples=12)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 2**16),
    ordered=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_full_ranks_hold_any_order(name, seed, ordered, dtype):
    """A table whose ranks are the largest that help is moved without error, from any order to any other."""
    old = SHAPES[name]
    n = old.num_embeddings
    shape = jax_tt.TTShape(n, old.features, 10**6, old.row_factors, old.col_factors)
    cores = make_case(old, dtype, weighted=False, seed=seed).cores
    before = shuffled(n, seed) if ordered else None
    after = shuffled(n, seed + 1)
    found = jax_tt.tt.reorder(cores, before, after, shape=shape)
    wanted = by_id(cores, before, n)
    error = np.linalg.norm(by_id(found.cores, after, n) - wanted) / np.linalg.norm(wanted)
    assert found.shape == shape and all(core.dtype == dtype for core in found.cores)
    assert error < (1e-5 if dtype == "float32" else 2e-2)
    assert math.isclose(found.relative_error, error, rel_tol=0.1, abs_tol=1e-6)


@settings(max_examples=6)
@given(data=st.data(), name=st.sampled_from(["d2", "d3", "d4"]))
def test_renamed_digits_cost_no_rank(data, name):
    """An order that permutes the values of every digit permutes slices, which the same ranks hold."""
    shape = SHAPES[name]
    full = jax_tt.TTShape(
        shape.num_rows, shape.features, shape.ranks, shape.row_factors, shape.col_factors
    )
    cores = make_case(full, "float32", weighted=False).cores
    digits = np.unravel_index(np.arange(full.num_rows), full.row_factors)
    names = [np.array(data.draw(st.permutations(range(p)))) for p in full.row_factors]
    moved = [name[digit] for name, digit in zip(names, digits, strict=True)]
    order = IdOrder(np.ravel_multi_index(moved, full.row_factors))
    found = jax_tt.tt.reorder(cores, None, order)
    assert found.shape == full and found.relative_error < 1e-5
    np.testing.assert_allclose(
        by_id(found.cores, order, full.num_rows), dense_table(cores, full.num_rows), atol=1e-4
    )


@pytest.mark.parametrize("size", [{"ranks": 3}, {"tolerance": 0.3}, {"max_bytes": 900}])
def test_the_error_is_that_of_the_permuted_dense_table(size):
    before, after = shuffled(120), shuffled(120, 1)
    weights = np.random.default_rng(2).random(120)
    table = by_id(CORES, before, 120).astype(np.float32)
    for by_weight in (None, weights):
        row_weights = None if by_weight is None else by_weight[after.inverse.rows]
        wanted = jax_tt.tt.from_dense(
            table[after.inverse.rows],
            **size,
            weights=row_weights,
            row_factors=SHAPE.row_factors,
            col_factors=SHAPE.col_factors,
        )
        found = jax_tt.tt.reorder(
            CORES,
            before,
            after,
            **size,
            weights=by_weight,
            row_factors=SHAPE.row_factors,
            col_factors=SHAPE.col_factors,
        )
        assert found.shape == wanted.shape
        assert math.isclose(found.relative_error, wanted.relative_error, rel_tol=1e-3)
        for at, error in wanted.row_errors.items():
            assert math.isclose(found.row_errors[at], error, rel_tol=1e-2)
        if by_weight is not None:
            assert math.isclose(found.weighted_error, wanted.weighted_error, rel_tol=1e-3)


def test_the_same_order_keeps_rows():
    for order in (None, shuffled(120)):
        found = jax_tt.tt.reorder(CORES, order, order or IdOrder.identity(120))
        assert found.relative_error < 1e-6
        np.testing.assert_allclose(
            dense_table(found.cores, 120), dense_table(CORES, 120), atol=1e-6
        )


def test_other_factors_and_back():
    other = jax_tt.TTShape(120, 8, 64, (11, 11), (2, 4))
    order = shuffled(120)
    found = jax_tt.tt.reorder(CORES, None, order, shape=other)
    assert found.shape == other and found.relative_error < 1e-5
    back = jax_tt.tt.reorder(found.cores, order, IdOrder.identity(120), shape=SHAPE)
    np.testing.assert_allclose(dense_table(back.cores, 120), dense_table(CORES, 120), atol=1e-5)


def test_least_squares_refine():
    """Weights of 1 add sweeps to the SVD, which can only bring the rows nearer."""
    order = shuffled(120)
    plain = jax_tt.tt.reorder(CORES, None, order)
    refined = jax_tt.tt.reorder(CORES, None, order, weights=np.ones(120), sweeps=4)
    assert refined.relative_error < 0.999 * plain.relative_error


def test_equal_arguments_give_equal_bits(monkeypatch):
    monkeypatch.setattr(decompose, "_EXACT", 100)
    monkeypatch.setattr(decompose, "GRAM_SIDE", 4)  # the randomised part
    first, again = (jax_tt.tt.reorder(CORES, None, shuffled(120), seed=3).cores for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_dense_table_is_never_there(monkeypatch):
    """With small blocks, memory is that of the factors and of a few numbers a row, and the table would not fit."""
    modules = (from_dense, "_ENERGY_BLOCK"), (decompose, "_BLOCK"), (approximation, "_BLOCK")
    for module, name in (*modules, (rows, "_GATHERED")):
        monkeypatch.setattr(module, name, 1 << 14)
    shape = jax_tt.TTShape(20_000, 64, 4, (20, 20, 50), (4, 4, 4))
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    order = shuffled(20_000)
    tracemalloc.start()
    try:
        found = jax_tt.tt.reorder(cores, None, order)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000 * 64 * 4 / 2  # half of the table in float32
    assert 0 < found.relative_error < 1


def test_traced_cores_and_bad_arguments():
    order = shuffled(120)
    with pytest.raises(TypeError, match=r"cores: got a traced array; .*outside of jit"):
        jax.jit(lambda cores: jax_tt.tt.reorder(cores, None, order).cores)(CORES)
    with pytest.raises(
        ValueError, match=r"new_order: got an order of 120 ids; expected 3, as old_order"
    ):
        jax_tt.tt.reorder(CORES, IdOrder.identity(3), order)
    with pytest.raises(ValueError, match=r"num_embeddings.*200"):
        jax_tt.tt.reorder(CORES, None, IdOrder.identity(200))
    for name, kind, orders in (
        ("old_order", "a list", ([0], order)),
        ("new_order", "None", (None, None)),
    ):
        with pytest.raises(TypeError, match=f"{name}: got {kind}; expected a jax_tt.order.IdOrder"):
            jax_tt.tt.reorder(CORES, *orders)
    with pytest.raises(ValueError, match="expected exactly one"):
        jax_tt.tt.reorder(CORES, None, order, 4, tolerance=0.1)
    with pytest.raises(ValueError, match=r"weights: got .*shape \(3,\); expected \(120,\)"):
        jax_tt.tt.reorder(CORES, None, order, weights=np.ones(3))
    bad = (CORES[0], CORES[1].at[0].set(jnp.nan), CORES[2])
    with pytest.raises(ValueError, match="cores: core 1 holds NaN or infinity"):
        jax_tt.tt.reorder(bad, None, order)
    with pytest.raises(ValueError, match=r"shape: got 100 x 8; expected 120 x 8"):
        jax_tt.tt.reorder(CORES, None, order, shape=jax_tt.TTShape.suggest(100, 8))
