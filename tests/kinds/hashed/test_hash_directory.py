"""Finding, inserting and erasing keys, against a model of Python dicts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt._base import ffi
from jax_tt._directories.hash_directory import (
    COUNTERS,
    POLICIES,
    Eviction,
    KeyDirectory,
    init_directory,
)
from jax_tt._directories.hash_reference import erase
from jax_tt._native import hash_backend
from tests.conftest import WAYS, method_fixture, native_available
from tests.kinds.hashed.hash_model import ModelDirectory, joined

method = method_fixture(*WAYS)

EXTREMES = (0, 1, 2**64 - 1, 2**63, 2**63 - 1)


insert = jax.jit(hash_backend.insert, static_argnums=(6, 7))
find = jax.jit(hash_backend.find, static_argnums=3)
double = jax.jit(hash_backend.double, static_argnums=2)
erased = jax.jit(erase)


def words(numbers):
    array = np.array(numbers, np.uint64)
    return np.stack([array >> np.uint64(32), array & np.uint64(2**32 - 1)], -1).astype(np.uint32)


def check_directory(directory: KeyDirectory, model: ModelDirectory) -> None:
    keys, scores, touched = model.arrays()
    assert (joined(np.moveaxis(np.asarray(directory.keys), 1, -1)) == keys).all()
    assert (joined(np.moveaxis(np.asarray(directory.scores), 1, -1)) == scores).all()
    assert (np.asarray(directory.touched) == touched).all()


# Sets, ways, batches after which a key may leave, keys of a batch, and different keys.
SIZES = {
    "one slot": (1, 1, 1, 1, 1),
    "odd": (3, 5, 3, 24, 30),
    "one set": (1, 64, 1, 150, 100),
    "odd ways": (5, 33, 1, 400, 300),
    "many sets": (150, 3, 1, 700, 900),
    "no keys": (2, 63, 1, 0, 9),
}
CASES = [
    *(("odd", policy) for policy in POLICIES),
    ("one slot", "lru"),
    ("one set", "lru"),
    ("odd ways", "lfu"),
    ("many sets", "epoch_lfu"),
    ("no keys", "custom"),
]


@pytest.mark.slow(but="odd-")
@pytest.mark.each_way
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_directory_equals_model(case, method):
    name, policy = case
    sets, ways, min_age, n, different = SIZES[name]
    draw, capacity = np.random.default_rng(n), sets * ways
    directory, model = init_directory(sets, ways), ModelDirectory(sets, ways)
    pool = np.array([*EXTREMES, *draw.integers(2**64, size=different, dtype=np.uint64)], np.uint64)
    for now in range(1, 21 if n < 100 else 5):
        keys, present = draw.choice(pool, n), draw.random(n) < 0.8
        given = draw.integers(2**64, size=n, dtype=np.uint64)
        some = draw.random(n) < 0.7
        given[some] = draw.choice([0, 1, 2**40], some.sum())
        batch = words(keys), present, words(given), jnp.int32(now), jnp.uint32(now // 5)
        directory, done = insert(directory, *batch, Eviction(policy, min_age), method)
        listed = keys.tolist(), present.tolist(), given.tolist()
        entries, counts = model.insert(*listed, now, now // 5, policy, min_age)
        check_directory(directory, model)
        assert dict(zip(COUNTERS, done.counts.tolist(), strict=True)) == counts
        slots = np.asarray(done.slots)
        assert slots[: len(entries)].tolist() == sorted(entries)
        assert (slots[len(entries) :] == capacity).all()
        arrays = *map(joined, (done.keys, done.old_keys, done.old_scores)), done.old_touched
        new = zip(*(np.asarray(x)[: len(entries)].tolist() for x in arrays), strict=True)
        assert [(key, old) for key, *old in new] == [entries[slot] for slot in sorted(entries)]
        asked = draw.choice(pool, n)
        here = np.arange(n) % 5 > 0
        expected = [
            model.find(key) if ok else -1 for key, ok in zip(asked.tolist(), here, strict=True)
        ]
        assert find(directory, words(asked), here, method).tolist() == expected
        gone = draw.integers(-3, capacity + 3, 3)
        directory = erased(directory, gone.astype(np.int32))
        model.erase(gone.tolist())


def test_many_operations_equal_model(method):
    """Requests for keys of which a few are frequent, removals, and growth when half of them are done."""
    policy, operations, size, sets, ways = "lfu", 4000, 500, 40, 8
    draw = np.random.default_rng(operations)
    directory, model = init_directory(sets, ways), ModelDirectory(sets, ways)
    pool = np.array([*EXTREMES, *draw.integers(2**64, size=2000, dtype=np.uint64)], np.uint64)
    batches = operations // size
    for now in range(1, batches + 1):
        keys = pool[(len(pool) ** draw.random(size)).astype(int) - 1]
        if now % 4 == 0:
            keys[: size // 2] = 0  # one of them many times
        present, given = draw.random(size) < 0.9, draw.integers(2**64, size=size, dtype=np.uint64)
        batch = words(keys), present, words(given), jnp.int32(now), jnp.uint32(now // 9)
        directory, done = insert(directory, *batch, Eviction(policy), method)
        listed = keys.tolist(), present.tolist(), given.tolist()
        entries, counts = model.insert(*listed, now, now // 9, policy, 1)
        assert dict(zip(COUNTERS, done.counts.tolist(), strict=True)) == counts
        assert done.slots[: len(entries)].tolist() == sorted(entries)
        expected = [model.find(key) if ok else -1 for key, ok in zip(*listed[:2], strict=True)]
        assert find(directory, words(keys), present, method).tolist() == expected
        gone = draw.integers(sets * ways, size=7)
        directory = erased(directory, gone.astype(np.int32))
        model.erase(gone.tolist())
        if now == batches // 2:
            before = {entry[0]: slot for slot, entry in model.entries().items()}
            directory, (moved,) = double(directory, [np.arange(sets * ways)], method)
            model, sets = model.doubled(), 2 * sets
            moved = np.asarray(moved)
            slots = {entry[0]: moved[slot] for slot, entry in model.entries().items()}
            assert slots == before  # what lies beside a key comes with it
        check_directory(directory, model)


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="the emulator is not built")
@pytest.mark.parametrize(("n", "kernel"), [(12_288, "SortInOneBlock"), (12_289, "SortTiles")])
@pytest.mark.parametrize("method", ["cuda_emulated"])
def test_insertions_that_one_block_or_several_sort(n, kernel, method):
    module = ffi.load(method)
    assert module is not None
    keys = words(np.random.default_rng(n).permutation(n))
    batch = keys, np.ones(n, bool), np.zeros((n, 2), np.uint32), jnp.int32(1), jnp.uint32(0)
    module.clear_launch_counts()
    emulated, want = (
        jax.block_until_ready(insert(init_directory(256, 64), *batch, Eviction("lru", 1), way))
        for way in (method, "native")
    )
    assert [name for name in module.launch_counts() if name.startswith("Sort")] == [kernel]
    for got, expected in zip(jax.tree.leaves(emulated), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, expected)
