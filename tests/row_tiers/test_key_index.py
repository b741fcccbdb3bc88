"""The index of the rows in host memory equals a dict."""

import threading
import time

import numpy as np
import pytest

from jax_tt._base import ffi
from jax_tt._tiers.key_index import DictIndex, KeyIndex
from tests.row_tiers.test_row_tiers import batch_of, small_tiers


def find(index, keys):
    numbers = np.empty(len(keys), np.int64)
    index.find_into(keys, numbers)
    return numbers


def changed(call, keys, *numbers):
    before = np.empty(len(keys), np.int64)
    call(keys, *numbers, before)
    return before


@pytest.mark.parametrize("pool", [50, 3000])
def test_native_index_equals_a_dict(pool):
    native = ffi.load("cpu")
    assert native is not None
    index, model, draw = native.KeyIndex(), DictIndex(), np.random.default_rng(pool)
    keys = draw.integers(0, 2**64, pool, dtype=np.uint64)
    keys[:4] = 0, 2**64 - 1, 2**63, 1
    for _ in range(600):
        some = keys[draw.integers(0, pool, draw.integers(0, 60))]
        if draw.random() < 0.5:
            numbers = draw.integers(0, 2**40, len(some))
            before = [changed(own.set, some, numbers) for own in (index, model)]
        else:
            before = [changed(own.erase, some) for own in (index, model)]
        assert (before[0] == before[1]).all()
        assert len(index) == len(model)
        assert (find(index, some) == find(model, some)).all()
    assert (find(index, keys) == find(model, keys)).all()


def test_many_keys():
    """More than one segment has room for; the first bits of the hashes of half of the keys are the same."""
    native = ffi.load("cpu")
    assert native is not None
    draw = np.random.default_rng(0)
    keys = np.concatenate([draw.integers(0, 2**64, 20_000, dtype=np.uint64), crowded(20_000)])
    index, numbers = native.KeyIndex(), np.arange(len(keys))
    for part in np.array_split(np.arange(len(keys)), 50):
        assert (changed(index.set, keys[part], numbers[part]) == -1).all()
    assert len(index) == len(keys)
    assert (find(index, keys) == numbers).all()
    assert (changed(index.erase, keys[::2].copy()) == numbers[::2]).all()
    assert (find(index, keys) == np.where(numbers % 2, numbers, -1)).all()


def crowded(count):
    """Keys whose hashes differ in their last 16 bits only."""
    keys = np.arange(count, dtype=np.uint64)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        keys = (keys ^ keys >> np.uint64(33)) * np.uint64(pow(factor, -1, 2**64))
    return keys ^ keys >> np.uint64(33)


def test_errors():
    native = ffi.load("cpu")
    assert native is not None
    index = native.KeyIndex()
    with pytest.raises(ValueError, match="one number for every key"):
        changed(index.set, np.zeros(2, np.uint64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="one number for every key"):
        index.erase(np.zeros(2, np.uint64), np.zeros(1, np.int64))
    with pytest.raises(TypeError):
        index.find_into(np.zeros(2), np.zeros(2, np.int64))
    with pytest.raises(TypeError):
        index.find_into(np.zeros(2, np.uint64), np.zeros((2, 1), np.int64))


@pytest.mark.slow
def test_no_two_threads_are_in_an_index_at_once(tmp_path, monkeypatch):
    """Those that prepare batches, and the one that trains, reads and saves."""
    inside, together, callers = {}, [], set()

    def watched(call):
        def watching(index, *args):
            lock = inside.setdefault(id(index), threading.Lock())
            callers.add(threading.current_thread().name)
            if not lock.acquire(blocking=False):
                together.append(call.__name__)
                return call(index, *args)
            try:
                time.sleep(1e-4)  # others have the chance to come in
                return call(index, *args)
            finally:
                lock.release()

        return watching

    for name in ("find", "set", "erase"):
        monkeypatch.setattr(KeyIndex, name, watched(getattr(KeyIndex, name)))
    draw = np.random.default_rng(0)
    tiers, state = small_tiers(tmp_path, depth=3, host_rows=24)
    # More ids than fit into their sets, so that the thread that places them uses an index as well.
    batches = (batch_of(draw.choice(200, 12, replace=False)) for _ in range(40))
    for k, staged in enumerate(tiers.prefetch(batches)):
        state = tiers.load(state, staged)
        if k % 10 == 0:
            tiers.read(state, "item", np.arange(200))
        if k % 20 == 0:
            tiers.save(state)
    tiers.close()
    assert not together
    assert len(callers) >= 3
