"""Finding, inserting and erasing keys, against a model of Python dicts."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt._base import ffi
from jax_tt._native import hash_backend
from jax_tt._sets.hash_directory import COUNTERS, POLICIES, Eviction, KeyDirectory, init_directory
from jax_tt._sets.hash_reference import erase
from tests.conftest import WAYS, method_fixture, native_available
from tests.kinds.hashed.hash_model import ModelDirectory, joined

method = method_fixture(*WAYS)

EXTREMES = (0, 1, 2**64 - 1, 2**63, 2**63 - 1)


def words(numbers):
    array = np.array(numbers, np.uint64)
    return np.stack([array >> np.uint64(32), array & np.uint64(2**32 - 1)], -1).astype(np.uint32)


def check_directory(directory: KeyDirectory, model: ModelDirectory) -> None:
    keys, scores, touched = model.arrays()
    assert (joined(np.moveaxis(np.asarray(directory.keys), 1, -1)) == keys).all()
    assert (joined(np.moveaxis(np.asarray(directory.scores), 1, -1)) == scores).all()
    assert (np.asarray(directory.touched) == touched).all()


@pytest.mark.slow(but="3-5-3")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("sets", "ways", "min_age"), [(1, 4, 1), (3, 5, 3), (16, 4, 1)])
def test_directory_equals_model(policy, sets, ways, min_age, method):
    draw = random.Random(f"{policy} {sets}")
    directory, model, capacity = init_directory(sets, ways), ModelDirectory(sets, ways), sets * ways
    insert = jax.jit(hash_backend.insert, static_argnums=(6, 7))
    find = jax.jit(hash_backend.find, static_argnums=3)
    pool = [draw.randrange(2**64) for _ in range(2 * capacity)] + [*EXTREMES]
    for now in range(1, 31):
        keys = [draw.choice(pool) for _ in range(24)]
        present = [draw.random() < 0.8 for _ in keys]
        given = [draw.choice([0, 1, 2**40, draw.randrange(2**64)]) for _ in keys]
        batch = words(keys), np.array(present), words(given), jnp.int32(now), jnp.uint32(now // 5)
        directory, done = insert(directory, *batch, Eviction(policy, min_age), method)
        entries, counts = model.insert(keys, present, given, now, now // 5, policy, min_age)
        check_directory(directory, model)
        assert dict(zip(COUNTERS, done.counts.tolist(), strict=True)) == counts
        slots = done.slots[: len(entries)].tolist()
        assert slots == sorted(entries)
        assert (done.slots[len(entries) :] == capacity).all()
        for k, slot in enumerate(slots):
            old = joined(done.old_keys)[k], joined(done.old_scores)[k], done.old_touched[k]
            assert (joined(done.keys)[k], [*map(int, old)]) == entries[slot]
        asked = [draw.choice(pool) for _ in range(40)]
        here = np.arange(40) % 5 > 0
        expected = [model.find(key) if ok else -1 for key, ok in zip(asked, here, strict=True)]
        assert find(directory, words(asked), here, method).tolist() == expected
        gone = [draw.randrange(-3, capacity + 3) for _ in range(3)]
        directory = erase(directory, jnp.array(gone, jnp.int32))
        model.erase(gone)


def test_many_operations_equal_model(method):
    """Requests for keys of which a few are frequent, removals, and growth when half of them are done."""
    policy, operations, size, sets, ways = "lfu", 4000, 500, 40, 8
    draw = np.random.default_rng(operations)
    insert = jax.jit(hash_backend.insert, static_argnums=(6, 7))
    find = jax.jit(hash_backend.find, static_argnums=3)
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
        directory = erase(directory, jnp.asarray(gone, jnp.int32))
        model.erase(gone.tolist())
        if now == batches // 2:
            directory, _ = hash_backend.double(directory, [], method)
            model, sets = model.doubled(), 2 * sets
        check_directory(directory, model)


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="the emulator is not built")
@pytest.mark.parametrize(("n", "kernel"), [(12_288, "SortInOneBlock"), (12_289, "SortTiles")])
@pytest.mark.parametrize("method", ["cuda_emulated"])
def test_insertions_that_one_block_or_several_sort(n, kernel, method):
    module = ffi.load(method)
    assert module is not None
    keys = words(np.random.default_rng(n).permutation(n))
    batch = keys, np.ones(n, bool), np.zeros((n, 2), np.uint32), jnp.int32(1), jnp.uint32(0)
    insert = jax.jit(hash_backend.insert, static_argnums=(6, 7))
    module.clear_launch_counts()
    emulated, want = (
        jax.block_until_ready(insert(init_directory(256, 64), *batch, Eviction("lru", 1), way))
        for way in (method, "native")
    )
    assert [name for name in module.launch_counts() if name.startswith("Sort")] == [kernel]
    for got, expected in zip(jax.tree.leaves(emulated), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, expected)
