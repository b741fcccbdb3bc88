"""`combiner="max"`: where its gradient goes, which ids take no part, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
from tests.helpers import SHAPES, make_case

# Rows 0 to 4: 1 and 2 tie in the first column, 3 and 4 hold zeros of either sign.
TABLE = jnp.array([[-5, -1], [-2, -3], [-2, -4], [0.0, -9], [-0.0, -8]], jnp.float32)


@functools.partial(jax.jit, static_argnames=("method", "bounds"))
def _step(table, bags, method, bounds="error"):
    """The maxima of each batch of bags, and the gradient of their sum."""

    def pooled(table, bags):
        options = {"combiner": "max", "method": method, "bounds": bounds}
        out = jax_tt.functional.embed_bag(table, bags, **options)
        return out.sum(), out

    found = [jax.value_and_grad(pooled, has_aux=True)(table, each) for each in bags]
    return [(out, gradient) for (_, out), gradient in found]


def test_ties_go_to_the_first_position(method):
    bags = [[1, 2], [2, 1], [2, 2, 1], [3, 4], [4, 3, 0]]
    firsts = [(1, 1), (2, 1), (2, 1), (3, 4), (4, 0)]  # the row of each column
    single = np.zeros((len(bags), 5, 2))
    for want, (first, second) in zip(single, firsts, strict=True):
        want[first, 0] = want[second, 1] = 1
    ragged = jax_tt.Bags.from_ragged([[], *bags], capacity=15)
    found = _step(TABLE, [*(np.array([bag], np.int32) for bag in bags), ragged], method)
    for (_, gradient), want, bag in zip(
        found, [*single, single.sum(0)], [*bags, ragged], strict=True
    ):
        assert gradient.tolist() == want.tolist(), bag


def test_ids_that_take_no_part(method):
    """Padding, unused capacity and ids that read zeros leave a maximum below zero where it is."""
    padded = jax_tt.Bags.from_padded([[-1, 1, 0], [-1, -1, -1], [7, 2, -1], [7, -3, -1]])
    ragged = jax_tt.Bags.from_ragged([[1, 0], [], [7, 2], [7, -3]], capacity=9)
    for out, gradient in _step(TABLE, [padded, ragged], method, "zero"):
        assert out.tolist() == [[-2, -1], [0, 0], [-2, -4], [0, 0]]
        assert gradient.tolist() == [[0, 1], [1, 0], [1, 1], [0, 0], [0, 0]]
    # An id that is clipped reads a row, which takes part.
    ((out, _),) = _step(TABLE, [np.array([[-7, 2], [9, 2]], np.int32)], method, "clip")
    assert out.tolist() == [[-2, -1], [0, -4]]


def test_nan_and_infinity(method):
    table = TABLE.at[1, 0].set(jnp.nan).at[0, 1].set(-jnp.inf).at[3, 0].set(jnp.inf)
    bags = jax_tt.Bags.from_ragged([[3, 1, 0], [0], [1, 1], [3, 2]])
    want = [[np.nan, -3], [-5, -np.inf], [np.nan, -3], [np.inf, -4]]
    ((out, gradient),) = _step(table, [bags], method)
    np.testing.assert_array_equal(out, np.array(want, np.float32))
    np.testing.assert_array_equal(gradient, [[1, 1], [2, 2], [0, 1], [1, 0], [0, 0]])


@pytest.mark.slow(but="native")
@pytest.mark.parametrize("form", ["ragged", "rectangular"])
def test_vmap(form, method):
    cases = [make_case(SHAPES["d3"], "float32", False, seed) for seed in range(2)]

    @jax.jit
    @jax.value_and_grad
    def step(cores, bags):
        rows = jax_tt.tt.embed_bag(cores, bags, combiner="max", method=method)
        return jnp.sum(jnp.sin(rows))

    pairs = [(case.cores, case.bags(form)) for case in cases]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(list(map(jnp.asarray, leaves))), *pairs)
    mapped = jax.jit(jax.vmap(step))(*stacked)
    for i, pair in enumerate(pairs):
        jax.tree.map(
            lambda got, want, i=i: np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5),
            mapped,
            step(*pair),
        )


def test_split_ids_of_a_table_beyond_32_bits(method):
    shape = jax_tt.TTShape.suggest(10**12, 8, 4, 5)
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    ids = shape.split_ids(np.array([[2**39, 5], [10**12, 10**12 - 1], [10**12, -1]]))
    options = {"num_embeddings": 10**12, "bounds": "zero", "method": method}

    @jax.jit
    def both(cores):
        pooled = jax_tt.tt.embed_bag(cores, ids, combiner="max", **options)
        return jax_tt.tt.lookup(cores, ids, **options), pooled

    rows, got = map(np.asarray, both(cores))
    np.testing.assert_array_equal(got, [rows[0].max(0), rows[1, 1], np.zeros(8)])


def test_weights_are_refused():
    bags = jax_tt.Bags.from_ragged([[1, 2]], [[0.5, 1]])
    layer = jax_tt.EmbedBag(5, 2, combiner="max", name="items", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"items: bags\.weights: got weights with combiner='max'"):
        layer(bags)
    assert layer(dataclasses.replace(bags, weights=None)).shape == (1, 2)
