"""Checkpoints of orbax: directories of arrays."""

from __future__ import annotations

import logging
import os
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_tt._base.installed import require
from jax_tt._formats.archive import is_bomb
from jax_tt._formats.stored import FileError, StoredArray, StoredArrays

_KEY = "jax_tt"
_TREE = "_METADATA"
_DEEPEST = 3  # a manager's directory holds steps, and those items


def read_orbax(path: str) -> StoredArrays:
    """The arrays of a checkpoint, by their keys joined by dots.

    The directory of a `CheckpointManager` does as well as long as there is one checkpoint of a tree inside.
    """
    place = str(_tree_directory(path))
    checkpointer = _checkpointer()
    try:
        metadata = checkpointer.metadata(place)
        if metadata.item_metadata is None:
            raise ValueError("it lacks the list of its arrays")
        tree = metadata.item_metadata.tree
        arrays = {}
        for keys, leaf in _leaves(tree, ()):
            read = partial(_read, place, keys)
            arrays[".".join(keys)] = StoredArray(tuple(leaf.shape), np.dtype(leaf.dtype), read)
    except Exception as error:  # a damaged checkpoint fails anywhere in orbax
        raise FileError(f"{path}: is not a complete orbax checkpoint ({_brief(error)}).") from error
    held = sum(file.stat().st_size for file in Path(place).rglob("*") if file.is_file())
    for name, array in arrays.items():
        if is_bomb(held, array.nbytes):
            raise FileError(
                f"{path}: {name} claims {array.nbytes:,} bytes, the checkpoint has {held:,} in all; refused."
            )
    notes = (metadata.custom_metadata or {}).get(_KEY, {})
    return StoredArrays(path, arrays, notes if isinstance(notes, dict) else {})


def write_orbax(path: str, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """A directory that does not exist yet."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *outer, last = name.split(".")
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = np.asarray(array)
    try:
        _checkpointer().save(os.path.abspath(path), tree, custom_metadata={_KEY: dict(notes)})
    except Exception as error:  # a full disk fails anywhere in orbax
        raise OSError(_brief(error)) from error


def _checkpointer() -> Any:
    orbax = require("orbax.checkpoint", "Reading and writing orbax checkpoints", "cli")
    # It warns that numpy arrays have no sharding, and repeats the errors that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return orbax.PyTreeCheckpointer()


def _read(place: str, keys: tuple[str, ...]) -> np.ndarray:
    """One leaf; the others are not read."""
    orbax = require("orbax.checkpoint", "Reading orbax checkpoints", "cli")
    wanted: Any = 0
    argument: Any = orbax.RestoreArgs(restore_type=np.ndarray)
    for key in reversed(keys):
        wanted, argument = {key: wanted}, {key: argument}
    request = orbax.args.PyTreeRestore(item=wanted, restore_args=argument, partial_restore=True)
    try:
        restored = orbax.Checkpointer(orbax.PyTreeCheckpointHandler()).restore(place, args=request)
    except Exception as error:
        raise FileError(f"{place}: {'.'.join(keys)} cannot be read ({_brief(error)}).") from error
    return np.asarray(jax.tree.leaves(restored)[0])


def _brief(error: Exception) -> str:
    """The error of tensorstore, shortened from several pages."""
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def _leaves(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, inner in tree.items():
            yield from _leaves(inner, (*keys, str(key)))
    elif isinstance(tree, list | tuple):
        for k, inner in enumerate(tree):
            yield from _leaves(inner, (*keys, str(k)))
    elif getattr(tree, "shape", None) is not None and getattr(tree, "dtype", None) is not None:
        yield keys, tree


def _tree_directory(path: str) -> Path:
    start = Path(path).absolute()
    places = [start] if (start / _TREE).exists() else []
    for depth in range(1, _DEEPEST + 1):
        places = places or sorted(p.parent for p in start.glob("*/" * depth + _TREE))
    if len(places) == 1:
        return places[0]
    if not places:
        raise FileError(f"{path}: is a directory without an orbax checkpoint (no {_TREE} in it).")
    listed = ", ".join(str(place.relative_to(start)) for place in places[:5])
    raise FileError(f"{path}: holds {len(places)} checkpoints; expected one of them: {listed}.")
