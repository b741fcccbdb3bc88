"""`tt.grow`, `TTShape.grow` and `IdOrder.grow`: rows stay, bit for bit, and new ones are as asked for."""

import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_tt
from jax_tt.order import IdOrder
from tests.helpers import SHAPES, dense_table, make_case

SHAPE = jax_tt.TTShape(58, 8, 4, (3, 4, 5), (2, 2, 2))
CORES = jax_tt.tt.init(jax.random.key(0), SHAPE)
KEY = jax.random.key(1)


@settings(max_examples=8)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    more=st.sampled_from([0, 3, 60]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_old_rows_keep_their_bits(name, more, dtype):
    old = SHAPES[name]
    cores = make_case(old, dtype, weighted=False).cores
    shape = old.grow(old.num_embeddings + more)
    grown = jax_tt.tt.grow(cores, shape, KEY)
    assert [core.shape for core in grown] == list(shape.core_shapes)
    assert all(core.dtype == dtype for core in grown)
    if shape.num_embeddings <= old.num_rows:
        assert all(a is b for a, b in zip(grown, cores, strict=True))
    np.testing.assert_array_equal(
        dense_table(grown, old.num_rows), dense_table(cores, old.num_rows)
    )


@pytest.mark.parametrize("init", ["approx-normal", "uniform"])
def test_new_rows_are_distributed_as_fresh_ones(init):
    """Mean 0 and variance 1 / (3 N), for cores of another size too."""
    shape = jax_tt.TTShape(1000, 16, 8, (10, 10, 10), (2, 2, 4))
    trained = [3 * core for core in jax_tt.tt.init(KEY, shape)]
    bigger = shape.grow(5000)
    new = dense_table(jax_tt.tt.grow(trained, bigger, KEY, init=init), 5000)[1000:]
    assert np.isclose((new**2).mean() * 3 * 5000, 1, atol=1e-3)
    assert abs(new.mean()) < 0.05 * new.std()
    kurtosis = (new**4).mean() / (new**2).mean() ** 2
    assert 2.5 < kurtosis < 4.5


def test_a_callable_makes_the_slices():
    grown = jax_tt.tt.grow(CORES, SHAPE.grow(100), KEY, init=jax.nn.initializers.constant(7))
    np.testing.assert_array_equal(grown[0][3:], 7)
    zeros = [jnp.zeros_like(core) for core in CORES]
    assert np.isfinite(jax_tt.tt.grow(zeros, SHAPE.grow(100), KEY)[0]).all()


def test_new_rows_near_old_ones():
    table = dense_table(CORES, 60)
    exact = jax_tt.tt.grow(CORES, SHAPE.grow(80), KEY, like=np.arange(20, 40))
    np.testing.assert_allclose(dense_table(exact, 80)[60:], table[20:40], atol=1e-6)
    one = jax_tt.tt.grow(CORES, SHAPE.grow(80), KEY, like=np.int64(7))
    far = np.linalg.norm(
        dense_table(jax_tt.tt.grow(CORES, SHAPE.grow(80), KEY), 80)[60:] - table[7]
    )
    assert np.linalg.norm(dense_table(one, 80)[60:] - table[7]) < 0.9 * far


def test_rows_to_be_near_are_not_held_in_memory():
    """The fit is that of least squares over all new rows, and takes a fraction of what those rows would."""
    shape = jax_tt.TTShape(60_000, 32, 8, (5, 12_000), (4, 8))
    cores = jax_tt.tt.init(jax.random.key(2), shape)
    count = 114_000  # of ten more slices, the last of them in part
    like = np.random.default_rng(0).integers(0, 60_000, count)
    grow = partial(jax_tt.tt.grow, cores, shape.grow(60_000 + count), KEY)
    fresh = grow()
    tracemalloc.start()
    first = np.asarray(grow(like=like)[0], np.float64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < count * 32 * 4 / 2
    wanted = dense_table(cores, 60_000)[like]
    tails = np.asarray(cores[1], np.float64)[..., 0].transpose(1, 0, 2)  # [r, p, q]
    for i in range(10):
        rows = wanted[i * 12_000 : (i + 1) * 12_000].reshape(-1, 4, 8).transpose(1, 0, 2)
        own = tails[:, : rows.shape[1]].reshape(8, -1)
        best = np.linalg.lstsq(own.T, rows.reshape(4, -1).T, rcond=None)[0]
        np.testing.assert_allclose(first[5 + i, 0], best.T, rtol=1e-4, atol=1e-6)
    assert not np.allclose(fresh[0][5:], first[5:])


def test_blocks_of_rows_to_be_near_are_small_at_high_ranks():
    shape = jax_tt.TTShape(5000, 128, 128, (5, 1000), (64, 2))
    cores = jax_tt.tt.init(jax.random.key(2), shape)
    grow = partial(jax_tt.tt.grow, cores, shape.grow(7000), KEY)
    fresh = grow()
    like = np.random.default_rng(0).integers(0, 5000, 2000)
    tracemalloc.start()
    near = grow(like=like)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Cores and results of 5 MiB, and what a block of 2 MiB is computed from.
    assert peak < 16 * 2**20
    wanted = dense_table(cores, 5000)[like]
    error, before = (np.linalg.norm(dense_table(c, 7000)[5000:] - wanted) for c in (near, fresh))
    assert error < 0.9 * before


def test_slices_to_spare_are_like_no_row():
    """A shape may have more slices than its rows take."""
    for num_embeddings, like in ((58, np.arange(5)), (60, 7)):
        shape = jax_tt.TTShape(num_embeddings, 8, 4, (4, 4, 5), (2, 2, 2))
        grown = jax_tt.tt.grow(CORES, shape, KEY, like=like)
        np.testing.assert_array_equal(grown[0], jax_tt.tt.grow(CORES, shape, KEY)[0])


def test_orders_and_shapes_grow():
    order = IdOrder([2, 0, 1])
    np.testing.assert_array_equal(order.grow(5).rows, [2, 0, 1, 3, 4])
    assert order.grow(3) == order
    assert SHAPE.grow(60).row_factors == (3, 4, 5)
    assert SHAPE.grow(61).row_factors == (4, 4, 5)
    assert SHAPE.grow(61).ranks == SHAPE.ranks


def test_bad_arguments():
    for thing, number in ((IdOrder([0, 1]), 1), (SHAPE, 57)):
        with pytest.raises(ValueError, match=rf"num_embeddings: got {number} .*only grows"):
            thing.grow(number)
    with pytest.raises(TypeError, match="shape: got 100; expected a TTShape"):
        jax_tt.tt.grow(CORES, 100, KEY)
    for other in (jax_tt.TTShape(40, 8, 4, (2, 4, 5), (2, 2, 2)), jax_tt.TTShape.suggest(100, 8)):
        with pytest.raises(ValueError, match=r"shape: got cores of shapes .*old_shape.grow"):
            jax_tt.tt.grow(CORES, other, KEY)
    for like, message in (
        (np.arange(3), r"like: got int64 of shape \(3,\); expected an integer, or one for every"),
        (0.5, "like: got float64"),
        (60, "like: got the id 60; expected 0 to 59"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_tt.tt.grow(CORES, SHAPE.grow(80), KEY, like=like)
    with pytest.raises(ValueError, match="init: got 'x'; expected one of"):
        jax_tt.tt.grow(CORES, SHAPE.grow(80), KEY, init="x")
