"""Tensor trains in files."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_tt._base.arguments import expect, mismatch
from jax_tt._formats.stored import FileError, StoredArrays
from jax_tt._ids.id_order import IdOrder
from jax_tt._ids.stored_order import count_of
from jax_tt._tt.shape import TTShape

# Layers of NNX have a leaf "value" below the name in some checkpoints.
_CORE = re.compile(r"(?:(?P<table>.+)\.)?core_(?P<k>[0-4])(?P<leaf>\.value)?")
# Optimizer state in checkpoints: of optax, in a model's optimizer or alone, and of fused tables.
_OF_OPTIMIZER = re.compile(
    r"(?:.+\.)?(?:opt_state\..+|\d+\.(?:mu|nu|trace|sum_of_squares)\..+|slot_[^.]+(?:\.value)?)"
)
# Of the notes on tensor trains in the metadata of a file.
KIND = "tables"


class Train(NamedTuple):
    """A tensor train in a file.

    Attributes:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        shape: their `TTShape`.
        id_order: `IdOrder` from ids to rows, or None where ids are rows.
    """

    cores: tuple[Any, ...]
    shape: TTShape
    id_order: IdOrder | None


def is_optimizer_state(name: str) -> bool:
    """Whether the array of this name in a checkpoint is the state of an optimizer."""
    return _OF_OPTIMIZER.fullmatch(name) is not None


def shapes(stored: StoredArrays, without: Container[str] = ()) -> dict[str, TTShape]:
    """Shapes of the tensor trains among arrays, by name; their cores are not read."""
    names = core_names(stored)
    return {name: _shape(stored, name, names[name]) for name in names if name not in without}


def core_names(stored: StoredArrays) -> dict[str, tuple[str, ...]]:
    """The names of the cores of every table, in order."""
    by_table: dict[str, dict[int, str]] = {}
    for key, array in stored.arrays.items():
        match = None if is_optimizer_state(key) else _CORE.fullmatch(key)
        if match and len(array.shape) == 4:
            by_table.setdefault(match["table"] or "", {})[int(match["k"])] = key
    return {
        name: tuple(keys[k] for k in sorted(keys))
        for name, keys in by_table.items()
        if len(keys) >= 2 and sorted(keys) == list(range(len(keys)))
    }


def order_name(stored: StoredArrays, table: str) -> str | None:
    """The array that holds the order of a table's ids, or None."""
    start = f"{table}.id_order" if table else "id_order"
    return next((name for name in (start, f"{start}.value") if name in stored.arrays), None)


def _shape(stored: StoredArrays, name: str, keys: Sequence[str]) -> TTShape:
    p, left, q, right = zip(*(stored.arrays[key].shape for key in keys), strict=True)
    ranks = right[:-1]
    where = f"{stored.path}: the table {name!r}"
    if (left[0], right[-1]) != (1, 1) or left[1:] != ranks:
        shapes = ", ".join(str(stored.arrays[key].shape) for key in keys)
        raise FileError(f"{where}: the cores {shapes} do not fit together.")
    order = order_name(stored, name)
    tables = stored.notes.get(KIND)
    notes = tables.get(name) if isinstance(tables, Mapping) else None
    rows = notes.get("num_embeddings") if isinstance(notes, Mapping) else None
    if rows is None:
        rows = math.prod(p) if order is None else _number_of_ids(stored, order)
    try:
        shape = TTShape(rows, math.prod(q), ranks, p, q)
    except (ValueError, TypeError) as error:
        raise FileError(f"{where}: {error}") from error
    expected = f"at most {shape.ranks}, as the factors allow"
    expect(shape.ranks == ranks, where, f"the ranks {ranks}", expected, error=FileError)
    return shape


def read(stored: StoredArrays, name: str, shape: TTShape) -> Train:
    """Reads one of the trains that `shapes` lists."""
    cores = []
    for key in core_names(stored)[name]:
        core = np.asarray(stored.arrays[key].read())
        if not np.isfinite(core.astype(np.float32)).all():
            raise FileError(f"{stored.path}: {key} holds NaN or infinity.")
        cores.append(core)
    order = order_name(stored, name)
    id_order = None if order is None else _id_order(stored, order)
    if id_order is not None and id_order.num_embeddings != shape.num_embeddings:
        got = f"{order}, an order of {id_order.num_embeddings} ids"
        expected = f"{shape.num_embeddings}, the rows of the table"
        raise mismatch(stored.path, got, expected, error=FileError)
    return Train(tuple(cores), shape, id_order)


def _number_of_ids(stored: StoredArrays, name: str) -> int:
    array = stored.arrays[name]
    if len(array.shape) == 1:
        return array.shape[0]
    try:
        return count_of(np.asarray(array.read()))
    except ValueError as error:
        raise FileError(f"{stored.path}: {name} is no order of ids: {error}") from error


def _id_order(stored: StoredArrays, name: str) -> IdOrder:
    try:
        return IdOrder(stored.arrays[name].read())
    except (ValueError, TypeError) as error:
        raise FileError(f"{stored.path}: {name} is no order of ids: {error}") from error
