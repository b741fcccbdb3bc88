"""Calls of the FFI targets of hash tables with valid arguments, as the library makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt._directories.hash_directory import COUNTERS, POLICIES
from tests.fuzz.calls import DTYPES, Call, one_after_another, result_type

INITIAL = (jax_tt.dynamic.Normal(0.5), jax_tt.dynamic.Uniform(0.5), jax_tt.dynamic.Constant(0.5))


def _words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Words of which many are equal, so that keys repeat; 0 is the key of empty slots."""
    return rng.integers(0, 4, shape, np.uint32) * np.uint32(rng.choice([1, 2**30]))


def _directory(rng: np.random.Generator) -> list[np.ndarray]:
    """Keys, scores, touched."""
    sets, ways = int(rng.integers(1, 6)), int(rng.choice([1, 3, 4, 8, 16, 64]))
    touched = rng.integers(0, 9, (sets, ways), np.int32)
    return [_words(rng, sets, 2, ways), _words(rng, sets, 2, ways), touched]


def _batch(rng: np.random.Generator) -> list[np.ndarray]:
    """Keys, and which positions are present."""
    n = int(rng.choice([0, 1, 7, 60, 1100]))
    return [_words(rng, n, 2), rng.integers(0, 2, n).astype(bool)]


def _find(rng: np.random.Generator) -> Call:
    keys, _, touched = _directory(rng)
    asked, present = _batch(rng)
    guess = rng.integers(-1, touched.size, present.size if rng.integers(2) else 0, np.int32)
    attributes = {"absent": np.int64(rng.integers(-1, 99)), "safe_check": "ignore"}
    results = [result_type(present.shape, "int32")]
    args = [keys, touched, asked, present, guess]
    return Call("", args, results, attributes | {"message": "{count}"})


def _insert(rng: np.random.Generator) -> Call:
    directory, (keys, present) = _directory(rng), _batch(rng)
    n, old = present.size, present.size if rng.integers(2) else 0
    now, epoch = np.int32(rng.integers(1, 20)), np.uint32(rng.integers(9))
    args = [keys, present, _words(rng, n, 2), now, epoch, *directory]
    shapes = [(n,), (n, 2), (old, 2), (old, 2), (old,), (len(COUNTERS),), (n,)]
    signed = (True, False, False, False, True, True, True)
    types = ["int32" if is_signed else "uint32" for is_signed in signed]
    results = [result_type(*own) for own in zip(shapes, types, strict=True)]
    results += [result_type(array.shape, array.dtype) for array in directory]
    attributes = {
        "policy": str(rng.choice(POLICIES)),
        "min_age": np.int64(rng.integers(1, 4)),
        "safe_check": "ignore",
        "message": "{count}",
    }
    return Call("", args, results, attributes, {5 + k: 7 + k for k in range(3)})


def _initial(rng: np.random.Generator) -> Call:
    keys, wanted = _batch(rng)
    values = INITIAL[rng.integers(len(INITIAL))]
    seed = rng.integers(2**32, size=2, dtype=np.uint32)
    args = [seed, np.asarray(values.quantiles), np.float32(values.factor), keys, wanted]
    results = [result_type((wanted.size, rng.integers(1, 40)), rng.choice(DTYPES))]
    return Call("", args, results, {"signed": bool(values.signed)})


def _reset(rng: np.random.Generator) -> Call:
    capacity = int(rng.integers(1, 60))
    slots = np.flatnonzero(rng.integers(0, 2, capacity)).astype(np.int32)
    slots = np.append(slots, np.full(rng.integers(9), capacity, np.int32))
    values = INITIAL[rng.integers(len(INITIAL))]
    seed = rng.integers(2**32, size=2, dtype=np.uint32)
    rows = np.ones((capacity, rng.integers(1, 40)), jnp.dtype(rng.choice(DTYPES)))
    args = [seed, np.asarray(values.quantiles), np.float32(values.factor)]
    args += [_words(rng, slots.size, 2), slots, rows]
    results = [result_type(rows.shape, rows.dtype)]
    return Call("", args, results, {"signed": bool(values.signed)}, {5: 0})


def _exchange(rng: np.random.Generator) -> Call:
    capacity = int(rng.integers(1, 60))
    slots = np.flatnonzero(rng.integers(0, 2, capacity)).astype(np.int32)
    slots = np.append(slots, np.full(rng.integers(9), capacity, np.int32))
    arrays = [_entries(rng, capacity) for _ in range(rng.integers(1, 4))]
    new = [np.ones((slots.size, *x.shape[1:]) if rng.integers(2) else (), x.dtype) for x in arrays]
    return_old = bool(rng.integers(2))
    results = [result_type(x.shape, x.dtype) for x in arrays]
    if return_old:
        results += [result_type((slots.size, *x.shape[1:]), x.dtype) for x in arrays]
    attributes = {"arrays": np.int64(len(arrays)), "return_old": return_old}
    aliases = {1 + k: k for k in range(len(arrays))}
    return Call("", [slots, *arrays, *new], results, attributes, aliases)


def _entries(rng: np.random.Generator, count: int) -> np.ndarray:
    shape = (count, *(int(size) for size in rng.integers(1, 9, rng.integers(2))))
    return np.ones(shape, jnp.dtype(rng.choice(DTYPES)))


def build_hash_tables(rng: np.random.Generator) -> Call:
    """An op on up to three hash tables at once."""
    ops = {
        "find": _find,
        "insert": _insert,
        "initial": _initial,
        "reset": _reset,
        "exchange": _exchange,
    }
    op = str(rng.choice(list(ops)))
    whole = Call(f"jax_tt_hash_tables_{op}_v1", [], [], {})
    return one_after_another(whole, [ops[op](rng) for _ in range(rng.integers(1, 4))])


def build_hash_double(rng: np.random.Generator) -> Call:
    directory = _directory(rng)
    capacity = directory[2].size
    arrays: list[Any] = [_entries(rng, capacity) for _ in range(rng.integers(4))]
    args = [*directory, *arrays]
    results = [result_type((2 * x.shape[0], *x.shape[1:]), x.dtype) for x in args]
    return Call("jax_tt_hash_double_v1", args, results, {})


BUILDERS: tuple[Callable[[np.random.Generator], Call], ...] = (build_hash_tables, build_hash_double)
