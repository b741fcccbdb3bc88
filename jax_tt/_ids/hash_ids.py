"""`hash_ids`: 64-bit keys of strings and of composed features, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base.arguments import as_int
from jax_tt._base.installed import require


def hash_ids(*features: Any, seed: int = 0) -> np.ndarray:
    """Keys of strings, of integers, or of combinations of them, for a `HashTable`; needs ``jax-tt[keys]``.

    A key is the XXH3 hash of the bytes of a value: of a string in UTF-8, of an integer the eight bytes of its 64 bits,
    lowest first. The hash of each feature is the seed of that of the next one, so that combinations such as
    ``("a", "bc")`` and ``("ab", "c")`` have different keys. Keys are the same on all machines.

    Args:
        *features: one or more arrays or nested lists of strings, bytes or integers, whose shapes broadcast against each
            other.
        seed: of the first feature, from 0 to 2**64 - 1.

    Returns:
        uint64, of the common shape. `split_keys` makes `SplitIds` of it where ``jax_enable_x64`` is off.

    Raises:
        ImportError: xxhash is not installed.
        TypeError: no feature, or one of other values.
        ValueError: shapes do not fit, or the seed does not.

    >>> import jax_tt
    >>> jax_tt.dynamic.hash_ids(["red", "green", "red"]).tolist()
    [7471995151418550101, 3804765694509603969, 7471995151418550101]
    >>> jax_tt.dynamic.hash_ids([["red"], ["green"]], [7, 8]).shape
    (2, 2)
    """
    xxhash = require("xxhash", "jax_tt.dynamic.hash_ids", "keys")
    if not 0 <= as_int("seed", seed) < 2**64:
        raise ValueError(f"seed: got {seed}; expected 0 to 2**64 - 1.")
    if not features:
        raise TypeError("features: got none; expected at least one array of strings or integers.")
    arrays = [_values(k, feature) for k, feature in enumerate(features)]
    shapes = [array.shape for array in arrays]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"features: got shapes {', '.join(map(str, shapes))}; expected shapes that broadcast."
        ) from None
    digest = xxhash.xxh3_64_intdigest
    keys = [int(seed)] * int(np.prod(shape))
    for k, array in enumerate(arrays):
        values = np.broadcast_to(array, shape).reshape(-1).tolist()
        keys = [digest(_bytes(k, value), seed=key) for value, key in zip(values, keys, strict=True)]
    return np.array(keys, np.uint64).reshape(shape)


def _values(number: int, feature: Any) -> np.ndarray:
    # Of objects, since numpy cuts zeros off the end of strings and bytes.
    array = feature if isinstance(feature, np.ndarray) else np.array(feature, object)
    if array.dtype.kind not in "OSUiu":
        raise _type_error(number, str(array.dtype))
    return array


def _bytes(number: int, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or not -(2**63) <= value < 2**64:
        raise _type_error(number, repr(value))
    return (int(value) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")


def _type_error(number: int, got: str) -> TypeError:
    return TypeError(
        f"features[{number}]: got {got}; expected strings, bytes or integers of 64 bits."
    )
