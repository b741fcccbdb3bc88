"""Sums of many terms: bags of many ids, and gradients of rows that are read very often."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._table import distinct_rows
from tests.helpers import fused

# Terms that are added one after the other, and many more.
COUNTS = (1, 256, 257, 3000, 65_536)
FEW_COUNTS = (256, 3000, pytest.param(65_536, marks=pytest.mark.slow))


def _terms(n):
    """``[n, 12]``: constant columns, columns of alternating signs, and random ones."""
    rng = np.random.default_rng(n)
    constant = np.broadcast_to([0.1, 0.7, 1 / 3, 1.1], (n, 4))
    alternating = np.where(np.arange(n) % 2, -1, 1)[:, None] * rng.uniform(0.5, 1, (n, 4))
    terms = [constant, alternating, rng.normal(size=(n, 4))]
    return np.concatenate(terms, axis=1).astype(np.float32)


def _assert_sum(got, terms, what=""):
    """That a sum has an error below 1e-6 of its terms; of few terms, what adding them in order gives."""
    wide = terms.astype(np.float64)
    error = np.abs(np.asarray(got) - wide.sum(axis=0))
    first = 1e-8 * min(len(terms), 256) ** 2 / len(terms)
    assert np.all(error <= (7e-7 + first) * np.abs(wide).sum(axis=0)), f"{what}: {error}"


def _once(n):
    """Bags of one position each, which read the same row, with weights that keep the terms exact."""
    weights = 2.0 ** -(np.arange(n) % 3)
    return jax_tt.Bags(
        jnp.ones(n, jnp.int32),
        jnp.arange(n + 1, dtype=jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


@partial(jax.jit, static_argnames="method")
def _bag_and_gradient(table, positions, bags, g, method):
    """The sum of all rows of a table, and the gradient of a small table by ``bags``."""
    whole = jax_tt.Bags(positions, jnp.stack([positions[0], positions[0] + positions.size]))
    small = jnp.zeros((3, table.shape[1]), table.dtype)
    _, pullback = jax.vjp(
        lambda small: jax_tt.functional.embed_bag(small, bags, method=method), small
    )
    return jax_tt.functional.embed_bag(table, whole, method=method)[0], pullback(g)[0]


@pytest.mark.each_way
@pytest.mark.parametrize("n", COUNTS)
def test_bags_and_gradients(n, method):
    terms, bags = _terms(n), _once(n)
    positions = jnp.arange(n, dtype=jnp.int32)
    out, gradient = _bag_and_gradient(jnp.asarray(terms), positions, bags, terms, method)
    _assert_sum(out, terms, "bag")
    _assert_sum(gradient[1], np.asarray(bags.weights)[:, None] * terms, "gradient")
    assert not np.any(gradient[::2])


def test_programs_for_any_number_of_positions():
    """Exported with a symbolic size, they add the terms as those for one size do."""

    @jax.jit
    def run(table, ids, weights):
        """The sum of a bag of all positions, and its gradient."""
        ends = jnp.arange(ids.size + 1, dtype=jnp.int32)[:: ids.size]
        whole = jax_tt.Bags(ids, ends, weights)
        out, pullback = jax.vjp(
            lambda table: jax_tt.functional.embed_bag(
                table, whole, bounds="zero", method="reference"
            ),
            table,
        )
        return out[0], pullback(jnp.ones_like(out))[0]

    (b,) = jax.export.symbolic_shape("b")
    shapes = ((3, 12), jnp.float32), ((b,), jnp.int32), ((b,), jnp.float32)
    exported = jax.export.export(run)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    terms = _terms(3000)[:, 5]
    args = np.ones((3, 12), np.float32), np.ones(3000, np.int32), terms
    out, gradient = exported.call(*args)
    jax.tree.map(np.testing.assert_array_equal, (out, gradient), run(*args))
    _assert_sum(out, np.broadcast_to(terms[:, None], (3000, 12)), "bag")
    _assert_sum(gradient[1], np.broadcast_to(terms[:, None], (3000, 12)), "gradient")


@pytest.mark.parametrize("n", FEW_COUNTS)
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_fused_steps(name, n, method):
    rule = {"sgd": optimizers.SGD(1.0), "adagrad": optimizers.Adagrad(1.0, eps=0.0)}[name]
    terms, bags = _terms(n), _once(n)
    table, state = fused(jnp.zeros((3, terms.shape[1])), rule)

    @jax.jit
    def step(state, bags, g):
        def loss(state):
            return jnp.sum(jax_tt.lookup_bags(table, state, bags, method=method)[0] * g)

        return jax.grad(loss)(state)

    after = step(state, bags, terms)
    weighted = np.asarray(bags.weights)[:, None] * terms
    if name == "sgd":
        _assert_sum(-after["embedding"][1], weighted)
    else:
        total = np.sqrt(np.asarray(after["slot_sum_0"])[1])
        _assert_sum(np.copysign(total, weighted.astype(np.float64).sum(axis=0)), weighted)


@pytest.mark.parametrize("n", FEW_COUNTS)
def test_tensor_trains(n, method):
    """One row, of which every column is 1, read by bags of one position each, and by a bag of all positions."""
    terms, bags = _terms(n), _once(n)
    cores = jnp.ones((2, 1, 3, 1)), jnp.ones((2, 1, 4, 1))

    @jax.jit
    def run(cores, bags, g):
        whole = jax_tt.Bags(bags.ids, jnp.array([0, n], jnp.int32), g[:, 5])
        out = jax_tt.tt.embed_bag(cores, whole, method=method)
        _, pullback = jax.vjp(lambda cores: jax_tt.tt.embed_bag(cores, bags, method=method), cores)
        return out[0], pullback(g)[0]

    out, (left, right) = run(cores, bags, terms)
    _assert_sum(out, np.broadcast_to(terms[:, 5:6], terms.shape), "bag")
    weighted = np.asarray(bags.weights, np.float64)[:, None] * terms
    sums = weighted.sum(axis=0).reshape(3, 4)
    reach = np.abs(weighted).sum(axis=0).reshape(3, 4)
    for got, axis in ((left[0], 1), (right[1], 0)):
        error = np.abs(np.asarray(got).reshape(-1) - sums.sum(axis=axis))
        assert np.all(error <= 2e-6 * reach.sum(axis=axis)), axis


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16"])
def test_bags_of_narrow_rows(dtype, method):
    """Bags of rows that are converted a few at a time, and that begin anywhere among these."""
    n = 3000
    rows = np.tile(_terms(n), 11)[:, :129]
    if dtype == "uint8":
        table, state = jax_tt.quantize(rows)
    else:
        table, state = (
            jax_tt.dense_table(n, 129, param_dtype=dtype),
            {"embedding": rows.astype(dtype)},
        )
    read = np.asarray(jax_tt.tables.to_dense(table, state))
    ends = np.array([0, 7, 263, 270, n])
    bags = jax_tt.Bags(jnp.arange(n, dtype=jnp.int32), jnp.asarray(ends, jnp.int32))
    lookup = jax_tt.Lookup(method=method, dtype="float32")
    out = jax.jit(lambda state: jax_tt.lookup_bags(table, state, bags, lookup)[0])(state)
    for got, begin, end in zip(out, ends[:-1], ends[1:], strict=True):
        _assert_sum(got, read[begin:end], (begin, end))


def test_sums_of_distinct_rows():
    """What rules in plain JAX and quantized tables are given."""
    n = 65_536
    terms = _terms(n)
    rows = np.where(np.arange(n) % 8 == 7, 2**31 - 1, np.arange(n) % 3).astype(np.int32)
    found = jax.jit(lambda rows, terms: distinct_rows._distinct(rows, terms, None))(rows, terms)
    assert found.rows[:4].tolist() == [0, 1, 2, 2**31 - 1]
    for row in range(3):
        _assert_sum(found.sums[row], terms[rows == row], row)
    assert not np.any(found.sums[3:])


def test_infinite_terms(method):
    """They make a sum infinite, not NaN."""
    n = 3000
    terms = _terms(n)
    terms[2000, 0], terms[100, 1] = np.inf, -np.inf
    positions = jnp.arange(n, dtype=jnp.int32)
    out, gradient = _bag_and_gradient(jnp.asarray(terms), positions, _once(n), terms, method)
    for got in (out, gradient[1]):
        assert got[0] == np.inf and got[1] == -np.inf and np.all(np.isfinite(got[2:]))
