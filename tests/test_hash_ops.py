"""The native ops of hash tables give the bits of those in plain JAX, for all sizes and types."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt._hash import backend
from jax_tt._hash.directory import POLICIES, Eviction, init_directory
from jax_tt._hash.initial import Constant, Normal, TruncatedNormal, Uniform
from tests.conftest import method_fixture
from tests.test_hash_directory import EXTREMES, words

method = method_fixture("ffi")
# sets, ways, keys of a batch, different keys
SIZES = [
    (1, 1, 1, 1),
    (1, 64, 300, 200),
    (2, 63, 0, 9),
    (5, 33, 2500, 400),
    (7, 16, 129, 90),
    (300, 3, 1500, 2000),
]


def equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize(("sets", "ways", "n", "keys"), SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_find_and_insert(sets, ways, n, keys, policy, method):
    draw = np.random.default_rng(n)
    pool = words([*EXTREMES, *draw.integers(2**64, size=keys, dtype=np.uint64)])
    directory = init_directory(sets, ways)
    insert = jax.jit(backend.insert, static_argnums=(6, 7))
    find = jax.jit(backend.find, static_argnums=3)
    for now in range(1, 5):
        asked, here = pool[draw.integers(len(pool), size=n)], draw.random(n) < 0.9
        given = draw.integers(2, size=(n, 2), dtype=np.uint32)
        batch = asked, here, given, jnp.int32(now), jnp.uint32(now // 2), Eviction(policy, 2)
        expected = insert(directory, *batch, "reference")
        equal(insert(directory, *batch, method), expected)
        directory = expected[0]
        equal(find(directory, asked, here, method), find(directory, asked, here, "reference"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("features", [1, 7, 64, 130])
@pytest.mark.parametrize(
    "distribution", [Normal(0.02), TruncatedNormal(1e4), Uniform(1e-6), Constant(0.1)], ids=repr
)
def test_initial_rows(distribution, features, dtype, method):
    keys = words([*EXTREMES, *(random.Random(features).randrange(2**64) for _ in range(200))])
    wanted = np.arange(len(keys)) % 3 > 0
    seed = jnp.array([2**32 - 1, 5], jnp.uint32)

    def rows(method):
        return backend.initial(distribution, seed, keys, wanted, features, dtype, method)

    found = jax.jit(rows, static_argnums=0)(method)
    assert found.dtype == dtype
    equal(found[wanted], rows("reference")[wanted])


def test_initial_rows_in_float64(x64, method):
    keys, wanted = words(range(50)), np.ones(50, bool)
    seed = jnp.array([1, 2], jnp.uint32)
    args = Normal(0.3), seed, keys, wanted, 5, "float64"
    equal(backend.initial(*args, method), backend.initial(*args, "reference"))


@pytest.mark.parametrize("return_old", [False, True])
@pytest.mark.parametrize("skipped", [0, 3, 40])
def test_exchange(skipped, return_old, method):
    draw = np.random.default_rng(skipped)
    capacity, n = 50, 40
    arrays = [
        jnp.asarray(draw.normal(size=(capacity, 9)), jnp.float32),
        jnp.asarray(draw.normal(size=(capacity, 3)), jnp.bfloat16),
        jnp.asarray(draw.integers(9, size=capacity), jnp.int32),
        jnp.asarray(draw.normal(size=(capacity, 2, 3)), jnp.float32),
    ]
    new = [
        jnp.asarray(draw.normal(size=(n, 9)), jnp.float32),
        jnp.bfloat16(0.5),
        jnp.arange(n, dtype=jnp.int32),
        jnp.float32(-2),
    ]
    slots = np.full(n, capacity)
    slots[: n - skipped] = np.sort(draw.permutation(capacity)[: n - skipped])

    def exchanged(method):
        return backend.exchange(
            arrays, new, jnp.asarray(slots, jnp.int32), method, return_old=return_old
        )

    equal(jax.jit(exchanged, static_argnums=0)(method), exchanged("reference"))


def test_gradients_of_an_exchange(method):
    """Of the rows that stay and of the new ones; arrays of integers beside them have none."""
    arrays, slots = [jnp.ones((4, 2)), jnp.arange(4)], jnp.array([1, 2, 4], jnp.int32)

    def loss(rows, new):
        changed, old = backend.exchange([rows, arrays[1]], [new, 7], slots, method, return_old=True)
        return jnp.sum(changed[0] * jnp.arange(8.0).reshape(4, 2)) + 10 * jnp.sum(old[0])

    of_rows, of_new = jax.jit(jax.grad(loss, (0, 1)))(arrays[0], jnp.ones((3, 2)))
    equal(of_rows, [[0, 1], [10, 10], [10, 10], [6, 7]])
    equal(of_new, [[2, 3], [4, 5], [0, 0]])


def test_exchange_of_nothing(method):
    array, none = jnp.ones((4, 2)), jnp.zeros(0, jnp.int32)
    equal(
        backend.exchange([array], [jnp.zeros((0, 2))], none, method, return_old=True),
        ([array], [jnp.zeros((0, 2))]),
    )
    equal(backend.exchange([], [], none, method, return_old=True), ([], []))
    empty = jnp.zeros((4, 0))
    slots = jnp.array([1, 4], jnp.int32)
    equal(
        backend.exchange([empty, array], [jnp.zeros((2, 0)), 3.0], slots, method, return_old=False),
        ([empty, array.at[1].set(3)], []),
    )


@pytest.mark.parametrize(("sets", "ways"), [(1, 1), (5, 33), (100, 4)])
def test_growth(sets, ways, method):
    draw = np.random.default_rng(sets)
    n = 2 * sets * ways
    keys = words([*EXTREMES, *draw.integers(2**64, size=n, dtype=np.uint64)])
    given, here = draw.integers(9, size=keys.shape, dtype=np.uint32), np.ones(len(keys), bool)
    batch = keys, here, given, jnp.int32(3), jnp.uint32(0), Eviction("custom")
    directory, _ = backend.insert(init_directory(sets, ways), *batch, method)
    arrays = [jnp.arange(float(3 * sets * ways)).reshape(-1, 3), jnp.arange(sets * ways)]
    equal(backend.double(directory, arrays, method), backend.double(directory, arrays, "reference"))
    equal(backend.double(directory, [], method)[1], [])


def test_under_vmap(method):
    keys, here = words(range(1, 13)).reshape(3, 4, 2), np.ones((3, 4), bool)
    directory = jax.tree.map(lambda x: jnp.stack([x] * 3), init_directory(2, 3))
    given, now, epoch = jnp.zeros((3, 4, 2), jnp.uint32), jnp.int32(1), jnp.uint32(0)

    def batches(method):
        def one(directory, keys, here, given):
            after, done = backend.insert(
                directory, keys, here, given, now, epoch, Eviction("lru"), method
            )
            return after, done, backend.find(after, keys, here, method)

        return jax.vmap(one)(directory, keys, here, given)

    equal(batches(method), batches("reference"))


def test_changes_are_in_place(method):
    directory = init_directory(4, 4)
    insert = jax.jit(backend.insert, static_argnums=(6, 7), donate_argnums=0)
    before = [array.unsafe_buffer_pointer() for array in directory]
    batch = words([5, 6]), np.ones(2, bool), words([0, 0]), jnp.int32(1), jnp.uint32(0)
    after, done = insert(directory, *batch, Eviction("lru"), method)
    assert [array.unsafe_buffer_pointer() for array in after] == before
    rows = jnp.zeros((16, 2))
    where = rows.unsafe_buffer_pointer()
    exchange = jax.jit(
        lambda rows, slots: backend.exchange([rows], [1.0], slots, method, return_old=False)[0][0],
        donate_argnums=0,
    )
    rows = exchange(rows, done.slots)
    assert rows.unsafe_buffer_pointer() == where
    assert rows.sum() == 4
