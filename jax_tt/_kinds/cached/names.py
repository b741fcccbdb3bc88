"""Names in the state of a table with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_tt._sets.cache_directory import CacheDirectory
from jax_tt._table.state import State

_PREFIX = "cache_"
DIRECTORY = tuple(f"{_PREFIX}{field}" for field in CacheDirectory._fields)
ROWS = "cache_rows"
COLLECTION = "row_cache"


def directory_of(state: State) -> CacheDirectory:
    return CacheDirectory(*(state[name] for name in DIRECTORY))


def named_directory(directory: CacheDirectory) -> dict[str, Any]:
    return dict(zip(DIRECTORY, directory, strict=True))


def outer(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the rows table under its names in the combined state."""
    return {outer_name(name): value for name, value in state.items()}


def outer_name(name: str) -> str:
    """The name in the combined state of an array of the rows table."""
    if name == "embedding":
        return ROWS
    return f"{_PREFIX}{name.removesuffix('_0')}"
