"""The native ops of hash tables give the bits of those in plain JAX; `test_hash_directory` has those on directories."""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt._directories.hash_directory import POLICIES, Eviction, init_directory
from jax_tt._directories.initial import Constant, Normal, TruncatedNormal, Uniform
from jax_tt._native import hash as native_hash
from jax_tt._native import hash_backend
from jax_tt._native.hash import Fresh, Reset
from tests.conftest import WAYS, method_fixture
from tests.helpers import on_gpu
from tests.kinds.hashed.test_hash_directory import EXTREMES, double, find, insert, words

method = method_fixture(*WAYS[1:])


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_a_corrupt_directory_breaks_nothing_else(method):
    """A directory of noise: nothing to compare with, but nothing may be written elsewhere either."""
    draw = np.random.default_rng(4)
    pool = words(range(20))
    noise = init_directory(5, 33)._replace(
        keys=jnp.asarray(draw.integers(2, size=(5, 2, 33), dtype=np.uint32)),
        scores=jnp.asarray(draw.integers(2**32, size=(5, 2, 33), dtype=np.uint32)),
        touched=jnp.asarray(draw.integers(-(2**31), 2**31, size=(5, 33), dtype=np.int32)),
    )
    keys, here = pool[draw.integers(20, size=300)], draw.random(300) < 0.9
    for policy in POLICIES:
        batch = keys, here, keys, jnp.int32(7), jnp.uint32(0), Eviction(policy)
        after, done = insert(noise, *batch, method)
        assert done.counts[0] == here.sum()
        slots = np.asarray(find(after, keys, here, method))
        assert ((slots >= -1) & (slots < noise.capacity)).all()
    grown, _ = double(noise, [np.ones(noise.capacity, np.float32)], method)
    assert grown.capacity == 2 * noise.capacity


def test_a_workspace_that_is_too_small_is_refused(method, monkeypatch):
    if method == "native" and not on_gpu():
        pytest.skip("the CPU kernels allocate")
    monkeypatch.setattr(native_hash, "_workspace", lambda *_: 1)
    directory, keys = init_directory(3, 2), words([1, 2])
    batch = keys, np.ones(2, bool), keys, jnp.int32(1), jnp.uint32(0), Eviction("lru")
    for op in (
        lambda: hash_backend.insert(directory, *batch, method),
        lambda: hash_backend.double(directory, [], method),
    ):
        with pytest.raises(Exception, match="the workspace has 1 bytes, expected"):
            jax.block_until_ready(op())


def test_sizes_that_disagree_are_refused(method):
    directory = init_directory(3, 2)._replace(touched=jnp.zeros((3, 3), jnp.int32))
    keys = words([1, 2])
    batch = keys, np.ones(2, bool), keys, jnp.int32(1), jnp.uint32(0), Eviction("lru")
    for op in (
        lambda: hash_backend.find(directory, *batch[:2], method),
        lambda: hash_backend.insert(directory, *batch, method),
        lambda: hash_backend.double(directory, [], method),
    ):
        with pytest.raises(Exception, match=r"hash_(find|insert|double): \w+ has"):
            jax.block_until_ready(op())


@pytest.mark.each_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("features", [1, 7, 64, 130])
@pytest.mark.parametrize(
    "distribution", [Normal(0.02), TruncatedNormal(1e4), Uniform(1e-6), Constant(0.1)], ids=repr
)
def test_initial_rows(distribution, features, dtype, method):
    keys = words([*EXTREMES, *(random.Random(features).randrange(2**64) for _ in range(200))])
    wanted = np.arange(len(keys)) % 3 > 0
    seed = jnp.array([2**32 - 1, 5], jnp.uint32)

    @partial(jax.jit, static_argnums=0)
    def rows(method):
        asked = Fresh(seed, keys, wanted, distribution, features, dtype)
        return hash_backend.initial_many([asked], [method])[0]

    found = rows(method)
    assert found.dtype == dtype
    equal(np.asarray(found)[wanted], np.asarray(rows("reference"))[wanted])


def test_initial_rows_in_float64(x64, method):
    keys, wanted = words(range(50)), np.ones(50, bool)
    seed = jnp.array([1, 2], jnp.uint32)
    asked = [Fresh(seed, keys, wanted, Normal(0.3), 5, "float64")] * 2
    equal(*([rows] for rows in hash_backend.initial_many(asked, [method, "reference"])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("features", [1, 7, 130])
def test_initial_rows_in_slots(features, dtype, method):
    """They are those of the reference; other rows stay, and so do their gradients."""
    slots = np.array([0, 3, 4, 11, 12, 12], np.int32)
    draw = np.random.default_rng(features)
    given = [draw.normal(size=(12, features)).astype(jnp.dtype(dtype)) for _ in range(2)]

    @partial(jax.jit, static_argnums=1)
    def reset(rows, method):
        resets = [
            Reset(x, jnp.array([7, k], jnp.uint32), words([*EXTREMES[:5], k]), slots, Normal(0.3))
            for k, x in enumerate(rows)
        ]
        return hash_backend.reset_many(resets, [method] * 2)

    found = reset(given, method)
    equal(found, reset(given, "reference"))
    kept = np.setdiff1d(np.arange(12), slots)
    equal([np.asarray(x)[kept] for x in found], [x[kept] for x in given])
    loss = jax.grad(lambda rows: reset(rows, method)[0].sum().astype("float32"))
    (gradient, _) = jax.jit(loss)(given)
    assert np.flatnonzero(np.asarray(gradient[:, 0], "float32")).tolist() == kept.tolist()


@pytest.mark.parametrize("return_old", [False, True])
@pytest.mark.parametrize("skipped", [3, 40])
def test_exchange(skipped, return_old, method):
    draw = np.random.default_rng(skipped)
    capacity, n = 50, 40
    bfloat16 = jnp.dtype("bfloat16")
    arrays = [
        draw.normal(size=(capacity, 9)).astype(np.float32),
        draw.normal(size=(capacity, 3)).astype(bfloat16),
        draw.integers(9, size=capacity).astype(np.int32),
        draw.normal(size=(capacity, 2, 3)).astype(np.float32),
    ]
    new = [
        draw.normal(size=(n, 9)).astype(np.float32),
        bfloat16.type(0.5),
        np.arange(n, dtype=np.int32),
        np.float32(-2),
    ]
    slots = np.full(n, capacity, np.int32)
    slots[: n - skipped] = np.sort(draw.permutation(capacity)[: n - skipped])

    @partial(jax.jit, static_argnums=0)
    def exchanged(method):
        given = jax.tree.map(jnp.asarray, (arrays, new, slots))
        return hash_backend.exchange(*given, method, return_old=return_old)

    equal(exchanged(method), exchanged("reference"))


def test_gradients_of_an_exchange(method):
    """Of the rows that stay and of the new ones; arrays of integers beside them have none."""
    arrays, slots = [jnp.ones((4, 2)), jnp.arange(4)], jnp.array([1, 2, 4], jnp.int32)

    def loss(rows, new):
        changed, old = hash_backend.exchange(
            [rows, arrays[1]], [new, 7], slots, method, return_old=True
        )
        return jnp.sum(changed[0] * jnp.arange(8.0).reshape(4, 2)) + 10 * jnp.sum(old[0])

    of_rows, of_new = jax.jit(jax.grad(loss, (0, 1)))(arrays[0], jnp.ones((3, 2)))
    equal(of_rows, [[0, 1], [10, 10], [10, 10], [6, 7]])
    equal(of_new, [[2, 3], [4, 5], [0, 0]])


def test_exchange_of_nothing(method):
    array, none = jnp.ones((4, 2)), jnp.zeros(0, jnp.int32)
    equal(
        hash_backend.exchange([array], [jnp.zeros((0, 2))], none, method, return_old=True),
        ([array], [jnp.zeros((0, 2))]),
    )
    equal(hash_backend.exchange([], [], none, method, return_old=True), ([], []))
    empty = jnp.zeros((4, 0))
    slots = jnp.array([1, 4], jnp.int32)
    equal(
        hash_backend.exchange(
            [empty, array], [jnp.zeros((2, 0)), 3.0], slots, method, return_old=False
        ),
        ([empty, array.at[1].set(3)], []),
    )


@pytest.mark.parametrize(("sets", "ways"), [(1, 1), (5, 33)])
def test_growth(sets, ways, method):
    draw = np.random.default_rng(sets)
    n = 2 * sets * ways
    keys = words([*EXTREMES, *draw.integers(2**64, size=n, dtype=np.uint64)])
    given, here = draw.integers(9, size=keys.shape, dtype=np.uint32), np.ones(len(keys), bool)
    batch = keys, here, given, jnp.int32(3), jnp.uint32(0), Eviction("custom")
    directory, _ = insert(init_directory(sets, ways), *batch, method)
    rows = np.arange(3 * sets * ways, dtype=np.float32).reshape(-1, 3)
    arrays = [rows, np.arange(sets * ways, dtype=np.int32)]
    equal(double(directory, arrays, method), double(directory, arrays, "reference"))
    equal(double(directory, [], method)[1], [])


def test_under_vmap(method):
    keys, here = words(range(1, 13)).reshape(3, 4, 2), np.ones((3, 4), bool)
    directory = jax.tree.map(lambda x: jnp.stack([x] * 3), init_directory(2, 3))
    given, now, epoch = jnp.zeros((3, 4, 2), jnp.uint32), jnp.int32(1), jnp.uint32(0)

    def batches(method):
        def one(directory, keys, here, given):
            after, done = hash_backend.insert(
                directory, keys, here, given, now, epoch, Eviction("lru"), method
            )
            return after, done, hash_backend.find(after, keys, here, method)

        return jax.vmap(one)(directory, keys, here, given)

    run = jax.jit(batches, static_argnums=0)
    equal(run(method), run("reference"))


def test_changes_are_in_place(method):
    directory = init_directory(4, 4)
    donated = jax.jit(hash_backend.insert, static_argnums=(6, 7), donate_argnums=0)
    before = [array.unsafe_buffer_pointer() for array in directory]
    batch = words([5, 6]), np.ones(2, bool), words([0, 0]), jnp.int32(1), jnp.uint32(0)
    after, done = donated(directory, *batch, Eviction("lru"), method)
    assert [array.unsafe_buffer_pointer() for array in after] == before
    rows = jnp.zeros((16, 2))
    where = rows.unsafe_buffer_pointer()
    exchange = jax.jit(
        lambda rows, slots: hash_backend.exchange([rows], [1.0], slots, method, return_old=False)[
            0
        ][0],
        donate_argnums=0,
    )
    rows = exchange(rows, done.slots)
    assert rows.unsafe_buffer_pointer() == where
    assert rows.sum() == 4
