"""Arrays by table and name as bytes, in any type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


def to_bytes(arrays: Mapping[str, Mapping[str, Any]], other: bytes) -> bytes:
    """The arrays, and other bytes behind them."""
    described, parts = [], []
    for table, own in arrays.items():
        for name, value in own.items():
            array = np.asarray(value)
            described.append((table, name, array.dtype.name, array.shape))
            parts.append(array.tobytes())
    head = json.dumps(described).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *parts, other))


def from_bytes(data: bytes) -> tuple[dict[str, dict[str, np.ndarray]], bytes]:
    """The inverse of `to_bytes`."""
    start = 8 + int.from_bytes(data[:8], "little")
    found: dict[str, dict[str, np.ndarray]] = {}
    for table, name, dtype, shape in json.loads(data[8:start]):
        count, kind = int(np.prod(shape)), jnp.dtype(dtype)
        array = np.frombuffer(data, kind, count, start).reshape(shape)
        found.setdefault(table, {})[name] = array
        start += array.nbytes
    return found, data[start:]
