"""Every storage type through the kernels that are compiled for each: odd and even columns, rules, long bags."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import jax_tt
from jax_tt import optimizers
from tests.conftest import WAYS, method_fixture
from tests.helpers import assert_close, f64, fused

NARROW = ("bfloat16", "float16")
# One unit in the last place, where sums in another order round to the other side.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}

# The CPU kernels, which other tests hold to float64, say what is expected.
method = method_fixture(*WAYS[2:])


def _bags(lengths, rows):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, rows, sum(lengths)).astype(np.int32)
    ids[::3] = 5  # a row that takes many tiles
    weights = (rng.integers(1, 9, ids.size) / 8).astype(np.float32)
    return jax_tt.Bags.from_lengths(ids, np.asarray(lengths), weights)


@pytest.mark.parametrize("features", [3, 8])
@pytest.mark.parametrize("dtype", NARROW)
def test_dense_sums_and_gradients(dtype, features, method):
    """Bags that a warp sums and bags so long that a block does."""
    rng = np.random.default_rng(2)
    table = jnp.asarray(rng.normal(size=(40, features)), dtype)
    for lengths in ([2, 0, 3, 1], [300, 200]):
        bags = _bags(lengths, 40)
        g = rng.normal(size=(len(lengths), features)).astype(np.float32)

        @jax.jit
        def step(table, weights, bags=bags, g=g):
            def loss(table, weights):
                given = jax_tt.Bags(bags.ids, bags.offsets, weights)
                out = jax_tt.functional.embed_bag(table, given, method=method).astype(jnp.float32)
                return jnp.sum(out * g), out

            return jax.grad(loss, (0, 1), has_aux=True)(table, weights)

        (dtable, dweights), out = step(table, bags.weights)
        ids, weights, wide = np.asarray(bags.ids), f64(bags.weights), f64(table)
        bag_of = np.repeat(np.arange(len(lengths)), lengths)
        want, want_table = np.zeros(g.shape), np.zeros(wide.shape)
        np.add.at(want, bag_of, weights[:, None] * wide[ids])
        np.add.at(want_table, ids, weights[:, None] * g[bag_of])
        assert_close(out, want, TOLERANCE[dtype], f"sums of {lengths}")
        assert_close(dtable, want_table, TOLERANCE[dtype], f"table, {lengths}")
        dots = np.sum(wide[ids] * g[bag_of], axis=1)
        assert_close(dweights, dots, TOLERANCE[dtype], f"weights, {lengths}")


@pytest.mark.slow
@pytest.mark.dear("a table of 2^31 rows has at least 4 GiB")
def test_rows_beyond_31_bits(method, x64):
    """Rows that are sorted by two words, among them some that differ only in the upper one."""
    rows = 2**31 + 6
    if psutil.virtual_memory().available < 4 * rows:
        pytest.skip("needs 8 GiB for a table of 4")
    rule = optimizers.SGD(1.0)
    ids = np.array([5, 2**30 + 5, 2**31 + 5, 5, 2**31 - 1, 2**31, 0, 2**31 + 5, 2**30, 5])
    g = 2.0 ** np.arange(ids.size, dtype=np.float32)[:, None]

    @partial(jax.jit, donate_argnums=0)
    def step(state):
        def loss(state):
            out, _ = jax_tt.lookup_bags(table, state, jnp.asarray(ids)[:, None], method=method)
            return jnp.sum(out.astype(jnp.float32) * g)

        return jax.grad(loss)(state)

    # Of numpy, whose zeros are not written one by one.
    zeros = jax.device_put(np.zeros((rows, 1), np.float16), may_alias=False)
    table, state = fused(zeros, rule, stochastic_rounding=False)
    state = step(state)
    # And rows that those would be taken for if bits were lost.
    looked_at = np.unique([ids, ids % 2**30, ids % 2**31])
    want = [-np.sum(g[ids == row]) for row in looked_at]
    np.testing.assert_array_equal(state["embedding"][looked_at, 0], want)
