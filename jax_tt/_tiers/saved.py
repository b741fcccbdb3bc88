"""Arrays by table and name as bytes, in any type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._tiers.disk import StoreError


def to_bytes(arrays: Mapping[str, Mapping[str, Any]], other: bytes) -> bytes:
    """The arrays, and other bytes behind them."""
    described, parts = [], []
    for table, by_name in arrays.items():
        for name, value in by_name.items():
            array = np.asarray(value)
            described.append((table, name, array.dtype.name, array.shape))
            parts.append(array.tobytes())
    head = json.dumps(described).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *parts, other))


def from_bytes(data: bytes) -> tuple[dict[str, dict[str, np.ndarray]], bytes]:
    """The inverse of `to_bytes`."""
    start = 8 + int.from_bytes(data[:8], "little")
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for table, name, dtype, shape in json.loads(data[8:start]):
        count, kind = int(np.prod(shape)), jnp.dtype(dtype)
        array = np.frombuffer(data, kind, count, start).reshape(shape)
        arrays.setdefault(table, {})[name] = array
        start += array.nbytes
    return arrays, data[start:]


def check_like(
    saved: Mapping[str, Mapping[str, Any]], like: Mapping[str, Mapping[str, Any]], path: str
) -> None:
    """Raises unless saved arrays have the names, shapes and types of others."""
    got, expected = _described(saved), _described(like)
    for table, name in sorted(got.keys() | expected.keys()):
        pair = got.get((table, name)), expected.get((table, name))
        if pair[0] != pair[1]:
            raise StoreError(
                f"{path}: holds {pair[0] or 'nothing'} for {name!r} of {table!r}; expected {pair[1] or 'nothing'}, as "
                "the collection has it. Describe the tables as they were when they were saved, also if they have "
                "grown; they can be changed after that."
            )


def _described(arrays: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (table, name): f"{jnp.result_type(x)} of shape {jnp.shape(x)}"
        for table, by_name in arrays.items()
        for name, x in by_name.items()
    }
