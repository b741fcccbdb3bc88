"""`tt.residuals`: trains in orders of their own that add up to a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_tt

SHAPE = jax_tt.TTShape(118, 8, 2, (10, 12), (8, 1))
SHAPE_60 = jax_tt.TTShape(60, 8, 2, (6, 10), (8, 1))


def table(rows=118, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=(rows, 8)).astype(dtype)


def dense(term, dtype=np.float64):
    cores = [np.asarray(core, np.float32) for core in term.approximation.cores]
    rows = np.asarray(jax_tt.tt.to_dense(cores, term.id_order.num_embeddings))
    return rows[term.id_order.rows].astype(dtype)


@pytest.mark.parametrize("refine", [0, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_errors_are_those_of_the_sums(count, refine):
    wanted = table()
    terms = jax_tt.tt.residuals(wanted, [SHAPE] * count, refine=refine, progress=False)
    assert len(terms) == count
    left = wanted.astype(np.float64)
    for term in terms:
        before = np.linalg.norm(left)
        left = left - dense(term)
        assert term.approximation.shape == SHAPE
        np.testing.assert_allclose(
            term.relative_error, np.linalg.norm(left) / np.linalg.norm(wanted), rtol=1e-4
        )
        np.testing.assert_allclose(
            term.approximation.relative_error, np.linalg.norm(left) / before, rtol=1e-4
        )
    assert terms[-1].relative_error < 1


def test_a_sum_of_trains_in_hidden_orders_is_nearly_found():
    """What is left falls with every term, and vanishes where the terms can hold the whole table."""
    exact = jax_tt.TTShape(60, 8, 8, (6, 10), (8, 1))
    ends = jax_tt.tt.residuals(table(60), [exact] * 3, progress=False)
    errors = [term.relative_error for term in ends]
    assert errors == sorted(errors, reverse=True)
    full = jax_tt.TTShape(60, 8, 60, (60, 1), (8, 1))
    rows = table(60)
    (whole,) = jax_tt.tt.residuals(rows, [full], progress=False)
    assert whole.relative_error < 1e-6
    _, second = jax_tt.tt.residuals(rows, [full, SHAPE_60], progress=False)
    assert second.relative_error < 1e-6


def test_shapes_may_differ():
    shapes = [
        jax_tt.TTShape(118, 8, 3, (10, 12), (8, 1)),
        jax_tt.TTShape(118, 8, 2, (5, 24), (2, 4)),
    ]
    terms = jax_tt.tt.residuals(table(), shapes, progress=False)
    assert [term.approximation.shape for term in terms] == shapes


def test_later_terms_make_up_for_rounding():
    """With bfloat16 cores, the error is that of the cores as they are stored."""
    wanted = table()
    terms = jax_tt.tt.residuals(wanted, [SHAPE] * 3, dtype=jnp.bfloat16, progress=False)
    assert all(core.dtype == jnp.bfloat16 for term in terms for core in term.approximation.cores)
    left = wanted - sum(dense(term) for term in terms)
    np.testing.assert_allclose(
        terms[-1].relative_error, np.linalg.norm(left) / np.linalg.norm(wanted), rtol=1e-3
    )


def test_equal_seeds_give_equal_terms_and_the_table_is_left_alone():
    wanted = table()
    copy = wanted.copy()
    one, two = (jax_tt.tt.residuals(wanted, [SHAPE] * 2, seed=3, progress=False) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert a.id_order == b.id_order and a.relative_error == b.relative_error
        assert all(map(np.array_equal, a.approximation.cores, b.approximation.cores))
    assert np.array_equal(wanted, copy)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_cores_have_the_type_of_the_table(dtype):
    with jax.enable_x64(dtype == np.float64):
        (term,) = jax_tt.tt.residuals(table(dtype=dtype), [SHAPE], progress=False)
        assert {core.dtype for core in term.approximation.cores} == {np.dtype(dtype)}


def test_errors_of_tables_whose_squares_float32_does_not_hold():
    shapes, options = [SHAPE] * 2, {"refine": 0, "progress": False}
    wanted, *scaled = (
        jax_tt.tt.residuals(table() * np.float32(factor), shapes, **options)
        for factor in (1, 1e-25, 1e25)
    )
    for found in scaled:
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_allclose(other.relative_error, one.relative_error, rtol=1e-3)


@given(
    rows=st.integers(1, 200_000),
    features=st.integers(1, 70),
    part=st.floats(0.02, 1.0),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
@settings(max_examples=30)
def test_shapes_fill_a_budget(rows, features, part, dtype):
    """Cores and orders take no more, and another rank would."""
    budget = max(1, int(part * rows * features * 4))
    order = jax_tt.order.IdOrder.identity(rows).nbytes
    p = jax_tt.TTShape.suggest(rows, features, 1, d=2).row_factors
    of_rank = (p[0] * features + p[1]) * jnp.dtype(dtype).itemsize
    if budget < order + of_rank:
        with pytest.raises(
            ValueError, match=f"expected at least {order + of_rank:,} bytes, for an"
        ):
            jax_tt.tt.residual_shapes(rows, features, budget, dtype=dtype)
        return
    shapes = jax_tt.tt.residual_shapes(rows, features, budget, dtype=dtype)
    assert {(s.num_embeddings, s.features, s.row_factors) for s in shapes} == {(rows, features, p)}
    taken = len(shapes) * order + sum(s.cost(dtype=dtype).bytes for s in shapes)
    assert taken <= budget
    full = any(s.ranks == (min(p[0] * features, p[1]),) for s in shapes)
    assert full or taken + of_rank > budget


def test_a_budget_beyond_the_table_is_one_whole_term():
    """It took time in proportion to the budget."""
    (shape,) = jax_tt.tt.residual_shapes(60, 6, 10**15)
    assert shape.ranks == (shape.row_factors[1],)


def test_shapes_of_no_budget_are_refused():
    for arguments, error, message in [
        ((0, 8, 100), ValueError, "num_embeddings: got 0; expected an integer >= 1"),
        ((10, 0, 100), ValueError, "features: got 0"),
        ((10, 8, 0), ValueError, "max_bytes: got 0"),
        ((10, 8, 1e3), TypeError, "max_bytes: got 1000.0 of type float"),
    ]:
        with pytest.raises(error, match=message):
            jax_tt.tt.residual_shapes(*arguments)
    with pytest.raises(ValueError, match="dtype: got int32; expected a floating type"):
        jax_tt.tt.residual_shapes(10, 8, 1000, dtype=jnp.int32)


def test_a_table_of_zeros():
    terms = jax_tt.tt.residuals(np.zeros((118, 8), np.float32), [SHAPE] * 2, progress=False)
    assert [term.relative_error for term in terms] == [0, 0]


def test_what_does_not_fit_is_refused():
    for rows, shapes, error, message in [
        (table(117), [SHAPE], ValueError, r"table: got .*shape \(117, 8\); expected \[118, 8\]"),
        (table()[:, :4], [SHAPE], ValueError, r"table: got .*shape \(118, 4\)"),
        (np.full((118, 8), np.nan), [SHAPE], ValueError, "table: row 0: got NaN or infinity"),
        (np.ones((118, 8), int), [SHAPE], ValueError, "table: got int64 .*; expected floats"),
        (table(), [], ValueError, "shapes: got none"),
        (table(), [SHAPE, 3], TypeError, "shapes: got 3; expected TTShapes"),
        (table(), 3, TypeError, "shapes: got 3"),
        (
            table(),
            [SHAPE, SHAPE_60],
            ValueError,
            r"shapes: got tables of \[\(60, 8\), \(118, 8\)\]",
        ),
    ]:
        with pytest.raises(error, match=message):
            jax_tt.tt.residuals(rows, shapes, progress=False)
    with pytest.raises(TypeError, match="table: got a traced array"):
        jax.jit(lambda rows: jax_tt.tt.residuals(rows, [SHAPE])[0].approximation)(table())
