"""The index of the rows in host memory equals a dict."""

import numpy as np
import pytest

from jax_tt import _ffi
from jax_tt._tiers.key_index import DictIndex


def find(index, keys):
    numbers = np.empty(len(keys), np.int64)
    index.find_into(keys, numbers)
    return numbers


@pytest.mark.parametrize("pool", [50, 3000])
def test_native_index_equals_a_dict(pool):
    native = _ffi.load("cpu")
    assert native is not None
    index, model, draw = native.KeyIndex(), DictIndex(), np.random.default_rng(pool)
    keys = draw.integers(0, 2**64, pool, dtype=np.uint64)
    keys[:4] = 0, 2**64 - 1, 2**63, 1
    for _ in range(600):
        some = keys[draw.integers(0, pool, draw.integers(0, 60))]
        if draw.random() < 0.5:
            numbers = draw.integers(0, 2**40, len(some))
            index.set(some, numbers)
            model.set(some, numbers)
        else:
            index.erase(some)
            model.erase(some)
        assert len(index) == len(model)
        assert (find(index, some) == find(model, some)).all()
    assert (find(index, keys) == find(model, keys)).all()


def test_errors():
    native = _ffi.load("cpu")
    assert native is not None
    index = native.KeyIndex()
    with pytest.raises(ValueError, match="one number for every key"):
        index.set(np.zeros(2, np.uint64), np.zeros(1, np.int64))
    with pytest.raises(TypeError):
        index.find_into(np.zeros(2), np.zeros(2, np.int64))
    with pytest.raises(TypeError):
        index.find_into(np.zeros(2, np.uint64), np.zeros((2, 1), np.int64))
