"""`TTShape`, its suggestions and its errors; splitting of ids."""

import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt


@hypothesis.given(st.integers(1, 2**61), st.integers(1, 2048), st.integers(2, 5))
@hypothesis.example(90_441, 1, 4)  # 14 x 14 x 14 x 33 has the smallest product
def test_suggest_is_valid_and_tight(n, features, d):
    shape = jax_tt.TTShape.suggest(n, features, 16, d)
    assert math.prod(shape.col_factors) == features
    assert list(shape.col_factors) == sorted(shape.col_factors)
    assert n <= shape.num_rows < 2**63
    root = n ** (1 / d)
    assert shape.num_rows <= n * (1 + 4 / root) ** d + d
    assert max(shape.row_factors) <= 1.2 * root + 12


@hypothesis.given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 50), st.data()
)
def test_ranks_are_clipped_to_what_helps(p, rank, data):
    q = data.draw(st.lists(st.integers(1, 4), min_size=len(p), max_size=len(p)))
    shape = jax_tt.TTShape(math.prod(p), math.prod(q), rank, p, q)
    for k, r in enumerate(shape.ranks, 1):
        left = math.prod(p[:k]) * math.prod(q[:k])
        right = math.prod(p[k:]) * math.prod(q[k:])
        assert r == min(rank, left, right)
    assert ("clipped" in str(shape)) == (max(shape.ranks) < rank or min(shape.ranks) < rank)
    assert ("clipped" in repr(shape)) == ("clipped" in str(shape))


def test_shape_is_a_value():
    one = jax_tt.TTShape(11_000_000, 64, 32, (200, 220, 250), (4, 4, 4))
    two = jax_tt.TTShape(11_000_000, 64, (32, 32), [200, 220, 250], np.array([4, 4, 4]))
    assert one == two and hash(one) == hash(two)
    with pytest.raises(AttributeError):
        one.features = 3
    cost = one.cost(10_240, jnp.bfloat16)
    assert cost.params == 958_720 and cost.bytes == 2 * 958_720
    assert cost.flops_forward == 10_240 * 36_864
    assert cost.dense_bytes == 11_000_000 * 64 * 2


def test_errors_hold_the_fix():
    for args, fix in [
        ((100, 8, 4, (4, 5), (2, 2, 2)), "col_factors=(2, 4)"),
        ((100, 8, 4, (4, 5, 6), (2, 2, 3)), "col_factors=(2, 2, 2)"),
        ((1000, 8, 4, (4, 5, 6), (2, 2, 2)), "row_factors=(10, 10, 10)"),
        ((100, 8, (4,), (4, 5, 6), (2, 2, 2)), "ranks=(32, 32)"),
        ((100, 8, 4, (100,), (8,)), "2 to 5"),
        ((0, 8, 4, (4, 5, 6), (2, 2, 2)), "num_embeddings: got 0"),
        ((100, 8, 0, (4, 5, 6), (2, 2, 2)), "ranks: got 0"),
        ((100, 8, 4, (2**31, 2**31, 4), (2, 2, 2)), "2**63"),
    ]:
        with pytest.raises(ValueError) as error:
            jax_tt.TTShape(*args)
        assert fix in str(error.value)


def test_sizes_must_be_integers():
    for args in [(10.5, 8), (10, "8"), (True, 8), (10, 8, 2.0)]:
        with pytest.raises(TypeError, match="expected"):
            jax_tt.TTShape.suggest(*args)


@hypothesis.given(st.data())
def test_split_ids_round_trip(data):
    n = data.draw(st.integers(1, 2**61))
    d = data.draw(st.integers(2, 5))
    shape = jax_tt.TTShape.suggest(n, 4, 2, d)
    edge = st.sampled_from([0, n - 1, n, -1, -(2**63), 2**63 - 1])
    ids = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1) | edge, min_size=1, max_size=8))
    split = shape.split_ids(np.array(ids, np.int64))
    assert split.shape == (len(ids),) and split.digits.dtype == np.int32
    rows = math.prod(shape.row_factors)
    for i, digits in zip(ids, split.digits.tolist(), strict=True):
        value = 0
        for digit, factor in zip(digits, shape.row_factors, strict=True):
            value = value * factor + digit
        if i < 0:
            assert set(digits) == {-1}
        elif n <= i < rows or i >= rows // shape.row_factors[0] * 2**31:
            assert tuple(digits) == shape.row_factors
        else:
            assert value == i and (i < n or digits[0] >= shape.row_factors[0])


def test_split_ids_refuses_what_it_cannot_split():
    shape = jax_tt.TTShape.suggest(100, 4)
    with pytest.raises(ValueError, match="integers"):
        shape.split_ids(np.array([1.0]))
    assert shape.split_ids([]).shape == (0,)
    big = shape.split_ids(np.array([2**64 - 1], np.uint64))
    assert tuple(big.digits[0]) == shape.row_factors
