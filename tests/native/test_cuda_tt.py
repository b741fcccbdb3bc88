"""What only the CUDA kernels do: batches of many tiles, digits of several passes, rows in chunks, plans made again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._base import ffi
from tests.conftest import method_fixture
from tests.helpers import assert_close, assert_same_in_any_order, f64, fused, on_cpu

method = method_fixture("cuda_emulated", pytest.param("cuda", marks=pytest.mark.gpu))

SMALL = jax_tt.TTShape(120, 8, (4, 4), (4, 5, 6), (2, 2, 2))


def step(shape, ids, method, dtype="float32"):
    """Output and core gradients of a sum of rows weighted by fixed random numbers."""
    cores = jax_tt.tt.init(jax.random.key(0), shape, "normal", dtype=dtype)
    g = jax.random.normal(jax.random.key(1), (ids.shape[0], shape.features))

    def loss(cores):
        out = jax_tt.tt.embed_bag(cores, ids, num_embeddings=shape.num_embeddings, method=method)
        return jnp.vdot(out.astype(jnp.float32), g), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(cores)
    return out, *gradients


def uniform(rows, *size, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, rows, size), jnp.int32)


CASES = {
    # more positions than one block sorts or numbers, every row in several spans and parts
    "many tiles": (SMALL, uniform(120, 1000, 20)),
    "one row": (SMALL, jnp.full((1000, 20), 7, jnp.int32)),
    # 3,000 slices: more than the bins of one pass
    "long digits": (
        jax_tt.TTShape(42_000, 8, (4, 4), (7, 3000, 2), (2, 2, 2)),
        uniform(42_000, 50, 20),
    ),
    "more than a million slices": (
        jax_tt.TTShape(2_200_000, 4, 2, (1_100_000, 2), (2, 2)),
        uniform(2_200_000, 30, 4),
    ),
    # wider rows to the right than to the left, and the reverse: the other side is contracted first
    "left first": (
        jax_tt.TTShape(1000, 64, (8, 8), (10, 10, 10), (2, 4, 8)),
        uniform(1000, 30, 5),
    ),
    "right first": (
        jax_tt.TTShape(1000, 64, (8, 8), (10, 10, 10), (8, 4, 2)),
        uniform(1000, 30, 5),
    ),
    # a tile that shared memory cannot hold: one slice of the middle core alone takes 256 KiB
    "wide products": (
        jax_tt.TTShape(1000, 1024, (64, 64), (10, 10, 10), (8, 16, 8)),
        uniform(1000, 2, 3),
    ),
    # rows in several chunks
    "chunks": (
        jax_tt.TTShape(8000, 8192, (2, 2), (20, 20, 20), (32, 16, 16)),
        uniform(8000, 800, 2),
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c == "chunks" else ()) for c in CASES]
)
def test_equals_the_cpu(case, method):
    shape, ids = CASES[case]
    # The CPU kernels are judged in float64 elsewhere; the reference would take minutes here.
    with on_cpu():
        expected = step(shape, ids, "native")
    # Sums of tens of thousands of float32 numbers in another order.
    for got, want in zip(step(shape, ids, method), expected, strict=True):
        assert_close(got, np.asarray(want, np.float64), 3e-5)


def test_wide_products_of_a_narrow_table_equal_the_cpu(method):
    shape, ids = CASES["wide products"]
    with on_cpu():
        expected = step(shape, ids, "native", "bfloat16")
    for got, want in zip(step(shape, ids, method, "bfloat16"), expected, strict=True):
        assert got.dtype == want.dtype
        assert_close(got, f64(want), 1e-2)


def test_sums_of_long_bags_do_not_depend_on_their_neighbours(method):
    # Around the length from which a bag is cut into spans, and far beyond it.
    lengths = [3, 129, 0, 128, 1, 257, 130, 5000, 127, 700]
    ends = np.cumsum(lengths)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 120, ends[-1]).astype(np.int32)
    weights = rng.normal(size=ends[-1]).astype(np.float32)
    ids[ends[4] + 200] = 120  # makes NaN of the bag of 257
    cores = jax_tt.tt.init(jax.random.key(0), SMALL, "normal")

    def pooled(begin, cuts, method):
        offsets = np.concatenate([[0], np.asarray(cuts) - begin])
        part = slice(begin, cuts[-1])
        bags = jax_tt.Bags.from_offsets(ids[part], offsets, weights[part], include_last_offset=True)
        options = {"num_embeddings": 120, "bounds": "error", "method": method}
        return np.asarray(jax_tt.tt.embed_bag(cores, bags, **options))

    out = pooled(0, ends, method)
    assert np.isnan(out).all(axis=1).tolist() == [length == 257 for length in lengths]
    valid = ~np.isnan(out)
    expected = pooled(0, ends, "reference")
    assert_close(out[valid], np.asarray(expected, np.float64)[valid], 1e-5)
    for b, length in enumerate(lengths):
        alone = pooled(ends[b] - length, ends[b : b + 1], method)
        np.testing.assert_array_equal(alone[0], out[b])


@pytest.mark.parametrize("platform", ["cuda_emulated", "cuda"])
def test_workspace_is_for_what_is_asked(platform):
    module = ffi.load(platform)
    if module is None:
        pytest.skip(ffi.why_unavailable(platform))
    table = (1000, 2000, 3000), (4, 4, 4), (1, 32, 32, 1)
    n, floats = 10_000, 4 * sum((1000 * 128, 2000 * 4096, 3000 * 128))

    def size(op, **asked):
        return module.workspace_size(op, *table, n, **asked)

    assert size("backward", weights=True) - size("backward") == 4 * n * 64
    plan, _ = module.plan_size(*table, 1000, n, n)
    assert size("update", resharded=True) - size("update") >= 4 * plan
    assert size("update", skip_nonfinite=True) - size("update") >= floats
    # The gradients of cores are not kept where every slice takes its step at once.
    assert size("update") == size("backward")
    with pytest.raises(ValueError, match="expected plan, forward"):
        size("sideways")


@pytest.mark.parametrize("rule", ["RowWiseAdagrad", "PartialRowWiseLAMB"])
def test_bitwise_equal_in_any_order_of_threads(rule):
    optimizer = getattr(optimizers, rule)(0.05)
    cores = jax_tt.tt.init(jax.random.key(0), SMALL, "normal")
    ids = uniform(120, 300, 4)
    g = jax.random.normal(jax.random.key(1), (300, SMALL.features))

    table, before = fused(cores, optimizer)

    @jax.jit
    def update(state):
        def loss(state):
            return jnp.vdot(jax_tt.lookup_bags(table, state, ids, method="cuda_emulated")[0], g)

        return jax.grad(loss)(state)

    after = assert_same_in_any_order(lambda: update(before), orders=4)
    assert any(np.any(after[name] != before[name]) for name in table.spec.param_names)


@pytest.mark.parametrize("rule", ["RowWiseAdagrad", "Adam"])
def test_steps_of_slices_with_several_parts(rule, method):
    """One slice of 4,096 elements that all rows share: the blocks of its parts divide it, or one of them has it."""
    optimizer = getattr(optimizers, rule)(0.05)
    shape = jax_tt.TTShape(80, 64, (32, 32), (8, 1, 10), (4, 4, 4))
    cores = jax_tt.tt.init(jax.random.key(0), shape, "normal")
    ids = jnp.asarray(np.random.default_rng(0).permutation(80).reshape(20, 4), jnp.int32)
    g = jax.random.normal(jax.random.key(1), (20, shape.features))

    table, state = fused(cores, optimizer, shape.num_embeddings)

    def update(way):
        def loss(state):
            return jnp.vdot(jax_tt.lookup_bags(table, state, ids, method=way)[0], g)

        return jax.jit(jax.grad(loss))(state)

    found, expected = (jax.tree.leaves(update(way)) for way in (method, "reference"))
    assert not np.array_equal(found[1], cores[1])
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, 1e-5, rule)


@pytest.mark.parametrize("broken", ["id", "offsets", "sentinel"])
def test_a_bad_batch_changes_nothing(broken, method):
    # The CPU raises; a GPU cannot, so the output is NaN and the table stays as it was.
    cores = jax_tt.tt.init(jax.random.key(0), SMALL, "normal")
    table, state = fused(cores, optimizers.Adagrad(0.05), 120)
    ids, offsets = uniform(120, 12), np.array([0, 4, 8, 12], np.int32)
    if broken == "id":
        ids = ids.at[5].set(120)
    if broken == "offsets":
        offsets[1] = 9
    if broken == "sentinel":
        state |= {"sentinel": jnp.float32(2)}

    @jax.jit
    def step(state, offsets):
        bags = jax_tt.Bags.from_offsets(ids, offsets, include_last_offset=True)

        def loss(state):
            out, _ = jax_tt.lookup_bags(table, state, bags, bounds="error", method=method)
            return jnp.sum(out**2), out

        return jax.grad(loss, has_aux=True)(state)

    new, out = step(state, jnp.asarray(offsets))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[2]).all() == (broken == "id")
    for name in state.keys() - {"sentinel", "used"}:
        np.testing.assert_array_equal(new[name], state[name])
