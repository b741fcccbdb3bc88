"""Dense tables whose rows are read from once to very often: what the GPU sums whole, in parts, and by a block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._base import ffi
from jax_tt._native import operands
from tests.conftest import WAYS, method_fixture, native_available
from tests.helpers import assert_same_in_any_order, fused, raises

# A warp looks at 32 sorted positions; rows of more than 64 of them are summed in parts.
READS = (1, 2, 31, 32, 33, 63, 64, 65, 66, 95, 96, 97, 98, 127, 128, 129, 700)
# Reads of one more row, with which a GPU sorts a batch in several launches.
MANY = 66_000
RULES = {
    "sgd": optimizers.SGD(0.05),
    "adagrad": optimizers.Adagrad(0.05, initial_accumulator_value=0.1),
    "rowwise": optimizers.RowWiseAdagrad(0.05),
    "adam": optimizers.Adam(0.01),
}


# The reference has no segments: it is what the others are held to.
method = method_fixture(*WAYS[1:])


def _batch(reads, shift=0, weighted=True):
    """Bags in which row i is read ``reads[i]`` times, after ``shift`` reads of rows before it."""
    rng = np.random.default_rng(len(reads) + shift)
    ids = np.repeat(np.arange(len(reads)), reads)
    ids = np.concatenate([np.zeros(shift, ids.dtype), ids + bool(shift)]).astype(np.int32)
    rng.shuffle(ids)
    cuts = np.sort(rng.integers(0, len(ids) + 1, 8 + shift // 100))
    weights = rng.normal(size=len(ids)).astype(np.float32) if weighted else None
    bags = jax_tt.Bags.from_offsets(
        ids, np.concatenate([[0], cuts, [len(ids)]]), weights, include_last_offset=True
    )
    bag_of = np.searchsorted(cuts, np.arange(len(ids)), side="right")
    return bags, ids, bag_of


def _table(num_rows, features, seed=0):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=(num_rows, features)).astype(np.float32)
    )


@pytest.mark.each_way
@pytest.mark.parametrize(
    ("features", "shift", "weighted"),
    [
        (1, 0, True),
        (64, 31, True),
        (1030, 1, False),
        (64, MANY, True),
    ],
)
def test_gradients_of_rows_read_any_number_of_times(features, shift, weighted, method):
    bags, ids, bag_of = _batch(READS, shift, weighted)
    table = _table(len(READS) + 3, features)
    g = np.random.default_rng(3).normal(size=(bags.num_bags, features)).astype(np.float32)

    def loss(table, weights):
        given = jax_tt.Bags(bags.ids, bags.offsets, weights)
        return jnp.sum(jax_tt.functional.embed_bag(table, given, method=method) * g)

    argnums = (0, 1) if weighted else (0,)
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums))(table, bags.weights)
    wide, weights = np.asarray(table, np.float64), np.ones(len(ids))
    if weighted:
        weights = np.asarray(bags.weights, np.float64)
    expected, reach = np.zeros_like(wide), np.zeros_like(wide)
    np.add.at(expected, ids, weights[:, None] * g[bag_of])
    np.add.at(reach, ids, np.abs(weights[:, None] * g[bag_of]))
    # The first 256 terms of a row are added one after another.
    assert np.all(np.abs(gradients[0] - expected) <= 5e-6 * reach)
    dots = np.sum(wide[ids] * g[bag_of], axis=1)
    np.testing.assert_allclose(value, np.sum(weights * dots), atol=1e-5 * np.sum(np.abs(dots)))
    if weighted:
        np.testing.assert_allclose(gradients[1], dots, rtol=1e-4, atol=1e-3)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(table, lookup, quiet, state, bags, g):
    del quiet  # what the program does with bad ids, which a test below changes

    def loss(state):
        out, _ = jax_tt.lookup_bags(table, state, bags, lookup)
        return jnp.sum(out.astype(jnp.float32) * g)

    return jax.grad(loss)(state)


def _update(table, state, bags, g, method, bounds="error"):
    lookup = jax_tt.Lookup(bounds=bounds, method=method)
    return _step(table, lookup, operands.QUIET, state, bags, g)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("name", "features", "shift"),
    [
        ("sgd", 3, 5),
        ("adagrad", 64, 5),
        ("adam", 132, 5),
        ("rowwise", 131, MANY),
    ],
)
def test_updates_of_rows_read_any_number_of_times(name, features, shift, skip, method):
    bags, _, bag_of = _batch(READS, shift)
    table, state = fused(_table(len(READS) + 3, features), RULES[name], skip_nonfinite=skip)
    g = np.random.default_rng(4).normal(size=(bags.num_bags, features)).astype(np.float32)
    got, want = (_update(table, state, bags, g, how) for how in (method, "reference"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    # What is not finite lies in a row that a block sums: everything must wait for it.
    bad = g.copy()
    bad[bag_of[len(bag_of) // 2], 0] = np.inf
    after = _update(table, state, bags, bad, method)
    same = np.array_equal(after["embedding"], state["embedding"])
    assert same == skip, "a step with a gradient that is not finite"


def _assert_same(after, before, what):
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(what))


def test_broken_offsets_make_nan_and_no_update(method):
    if raises(method):
        pytest.skip("checked before any work")
    table, state = fused(_table(20, 8), RULES["adam"])
    many = [0, MANY // 2, 3]
    for offsets in ([1, 4, 9], [0, 7, 3], [0, 4, 1000], [0, -3, 9], many):
        n = MANY if offsets is many else 9
        bags = jax_tt.Bags(jnp.arange(n, dtype=jnp.int32) % 20, jnp.array(offsets, jnp.int32))
        rows = state["embedding"]
        out = jax_tt.functional.embed_bag(rows, bags, bounds="error", method=method)
        assert np.isnan(out).any(), offsets
        after = _update(table, state, bags, np.ones((2, 8), np.float32), method)
        _assert_same(after, state, offsets)


@pytest.mark.parametrize("code", ["poison", "error"])
@pytest.mark.parametrize(
    ("skip", "shift"), [(False, 0), (True, 0), pytest.param(True, MANY, marks=pytest.mark.slow)]
)
def test_bad_ids_make_nan_and_no_update(skip, shift, code, method, monkeypatch):
    if raises(method):
        pytest.skip("checked before any work")
    # A handler that is given "error" after all can do no more than with "poison".
    monkeypatch.setattr(operands, "QUIET", code)
    bags, ids, bag_of = _batch(READS, shift)
    table, state = fused(_table(len(READS) + 3, 8), RULES["adam"], skip_nonfinite=skip)
    g = np.random.default_rng(4).normal(size=(bags.num_bags, 8)).astype(np.float32)
    for bad in (-1, len(READS) + 3, 2**31 - 1):
        at = 5 * len(ids) // 7
        broken = jax_tt.Bags(jnp.asarray(ids).at[at].set(bad), bags.offsets, bags.weights)
        rows = state["embedding"]
        out = jax_tt.functional.embed_bag(rows, broken, bounds="error", method=method)
        is_nan = np.isnan(out).all(axis=1)
        assert is_nan.sum() == 1 and is_nan[bag_of[at]], bad
        _assert_same(_update(table, state, broken, g, method), state, bad)
        for bounds in ("clip", "zero"):
            after = _update(table, state, broken, g, method, bounds)
            assert after["step"] == 1 and np.all(np.isfinite(after["embedding"])), (bad, bounds)


def test_bad_ids_in_no_bag_are_not_read(method):
    table, state = fused(_table(20, 8), RULES["sgd"])
    ids = jnp.array([3, 4, 3, 99, -7], jnp.int32)
    bags = jax_tt.Bags(ids, jnp.array([0, 1, 3], jnp.int32))
    after = _update(table, state, bags, np.ones((2, 8), np.float32), method)
    moved = np.any(np.asarray(after["embedding"] != state["embedding"]), axis=1)
    assert np.flatnonzero(moved).tolist() == [3, 4] and after["step"] == 1


@pytest.mark.each_way
@pytest.mark.parametrize("n", [9_000, 65_537])
def test_most_positions_read_one_row(n, method):
    """It then has positions in many of the blocks that sort, and more parts than a block adds in one turn."""
    rng = np.random.default_rng(n)
    ids = np.where(rng.random(n) < 0.05, rng.integers(0, 300, n), 7).astype(np.int32)
    bags = jax_tt.Bags.from_lengths(ids, rng.multinomial(n, np.ones(5) / 5))
    g = np.arange(1, 6, dtype=np.float32)[:, None]

    @jax.jit
    def gradient(table):
        return jax.grad(lambda t: jnp.sum(jax_tt.functional.embed_bag(t, bags, method=method) * g))(
            table
        )

    want = np.zeros((300, 1))
    np.add.at(want, ids, g[np.repeat(np.arange(5), np.diff(bags.offsets))])
    np.testing.assert_array_equal(gradient(jnp.ones((300, 1))), want)


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="the emulator is not built")
def test_cuda_blocks_share_rows_that_samples_of_the_batch_miss():
    """The blocks that sort divide the rows by samples of the batch, and one has more than its shared memory holds."""
    n, samples = 20_000, 4 * 125  # of dense/split.cu
    own = np.arange(samples, dtype=np.uint32)
    run, random = n // samples, own * np.uint32(2654435761) >> 16
    ids = np.arange(n, dtype=np.int32)[::-1] % 300
    ids[own * run + (random * run >> 16)] = 400 + own % 100
    table, state = fused(jnp.zeros((500, 1)), optimizers.SGD(1.0))
    g = np.arange(n, dtype=np.float32)[:, None] % 16
    after = _update(table, state, ids[:, None], g, "cuda_emulated")
    want = np.zeros((500, 1), np.float32)
    np.add.at(want, ids, -g)
    np.testing.assert_array_equal(after["embedding"], want)


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="the emulator is not built")
@pytest.mark.parametrize(
    ("n", "launches"),
    [(1, 1), (512, 1), (4097, 1), (65_536, 1), (65_537, 4)],
)
@pytest.mark.parametrize("ids", ["equal", "distinct", "falling", "scattered"])
def test_sorts_of_any_size(n, launches, ids):
    """Around the sizes at which one block gives way to several, and one launch to one for each pass.

    The gradients of a row that is read three times have another sum in most other orders.
    """
    module = ffi.load("cuda_emulated")
    assert module is not None
    rows = 70_000  # 17 bits: three passes
    given = {
        "equal": np.full(n, rows - 1),
        "distinct": np.random.default_rng(n).permutation(rows)[:n],
        "falling": np.arange(n)[::-1] // 3,
        "scattered": np.random.default_rng(n).permutation(n) // 3,
    }[ids].astype(np.int32)
    given[n // 2] = rows  # reads nothing
    table, state = fused(jnp.zeros((rows, 1)), optimizers.SGD(1.0))
    g = np.arange(1, n + 1, dtype=np.float32)[:, None] % 128
    if ids in ("falling", "scattered"):
        order = np.argsort(given, kind="stable")
        earlier = np.arange(n) - np.searchsorted(given[order], given[order])
        g[order, 0] = np.array([2**24, 1, -(2**24)], np.float32)[earlier]
    module.clear_launch_counts()
    after = _update(table, state, given[:, None], g, "cuda_emulated", "zero")
    jax.block_until_ready(after)  # counts are those of calls that are done
    counts = module.launch_counts()
    sorts = ("dense/split", "SortInOneBlock", "CountBins", "SortTiles")
    found = [count for name, (count, _, _) in counts.items() if any(sort in name for sort in sorts)]
    assert sum(found) == launches
    want = np.zeros((rows + 1, 1), np.float32)
    np.add.at(want, given, -g)
    np.testing.assert_array_equal(after["embedding"], want[:-1])


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="the emulator is not built")
def test_order_of_threads_leaves_no_trace():
    bags, _, _ = _batch(READS, shift=3)
    table, state = fused(_table(len(READS) + 3, 24), RULES["adagrad"])
    g = np.random.default_rng(5).normal(size=(bags.num_bags, 24)).astype(np.float32)
    assert_same_in_any_order(lambda: _update(table, state, bags, g, "cuda_emulated"), orders=4)
