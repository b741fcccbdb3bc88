"""Describes tables for files, and reads them back."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import type_of
from jax_tt._files.trains import KIND as TRAIN
from jax_tt._files.trains import Train
from jax_tt._formats.stored import StoredArrays
from jax_tt._ids import places
from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._kinds.coded.layout import CODES, HOT_PLACES, CodeLayout
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.composite.sum import SumTable
from jax_tt._kinds.ordered.table import OrderedTable
from jax_tt._kinds.quantized.codec import check_headers
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._ops.describe import with_codebooks
from jax_tt._ops.trains import tt_to_table
from jax_tt._table.check import check_state
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.rotation import ROTATION, as_rotation
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._tt.shape import TTShape

Pair = tuple[Any, dict[str, jax.Array]]

# Settings of a table that a file lists, and sizes of a tensor train of codebooks.
_QUANTIZED = ("features", "bits", "levels", "rotated")
_CODED = ("features", "num_codes", "bits", "kind", "rotated", "terms", "hot", "hot_terms")
_CODEBOOKS, _CODEBOOK_SIZES = "codebook_shape", ("ranks", "row_factors", "col_factors")


class Description(NamedTuple):
    """The description of a table in a file, beside its arrays.

    Attributes:
        kind: the key of `READERS`, or `TRAIN`.
        notes: its settings, a JSON object.
    """

    kind: str
    notes: dict[str, Any]


@functools.singledispatch
def describe(table: Table) -> Description:
    """Describes a table that a file can keep; raises for other kinds and settings."""
    raise TypeError(
        f"got {type_of(table)}; expected a tensor train, with or without an id order, a sum of tensor trains, "
        "a quantized or coded table, or a mixed one of quantized tables. Other states go to "
        "jax_tt.files.save_arrays, or into a checkpoint."
    )


@describe.register
def _(table: TTTable) -> Description:
    if table.shape.full_ranks != table.ranks:
        fix = f"Lower them with jax_tt.tt.round(cores, {table.shape.ranks})."
        raise ValueError(f"got cores of ranks {table.ranks[1:-1]}, too high for factors. {fix}")
    return Description(TRAIN, {"num_embeddings": table.num_embeddings})


@describe.register
def _(table: OrderedTable) -> Description:
    description = describe(table.table)
    if description.kind != TRAIN:
        raise TypeError(
            f"got an OrderedTable of {type_of(table.table)}; expected one of a tensor train."
        )
    return description


@describe.register
def _(table: QuantizedTable) -> Description:
    return Description("quantized", {field: getattr(table, field) for field in _QUANTIZED})


@describe.register
def _(table: MixedTable) -> Description:
    parts = [describe(part) for part in table.tables]
    if any(part.kind != "quantized" for part in parts):
        kinds = ", ".join(sorted({type(part).__name__ for part in table.tables}))
        raise TypeError(f"got a MixedTable of {kinds}; expected one of quantized tables.")
    notes = {
        "num_embeddings": table.num_embeddings,
        "tables": [part.notes for part in parts],
    }
    return Description("mixed", notes)


@describe.register
def _(table: SumTable) -> Description:
    kinds = sorted({type(term).__name__ for term in table.tables if describe(term).kind != TRAIN})
    if kinds:
        raise TypeError(f"got a SumTable of {', '.join(kinds)}; expected one of tensor trains.")
    notes = {"num_embeddings": table.num_embeddings, "terms": len(table.tables)}
    return Description("sum", notes)


@describe.register
def _(table: CodedTable) -> Description:
    notes: dict[str, Any] = {name: getattr(table, name) for name in _CODED}
    # Only tensor trains have a shape.
    shape = getattr(table.codebooks, "shape", None)
    if shape is not None:
        notes[_CODEBOOKS] = {name: list(getattr(shape, name)) for name in _CODEBOOK_SIZES}
    return Description("coded", notes)


def description_of(table: Table) -> np.ndarray | None:
    """What a layer keeps beside the arrays of a table that do not tell its settings, JSON in uint8; None for others."""
    try:
        kind, notes = describe(unsharded(table))
    except (TypeError, ValueError):
        return None
    return None if kind == TRAIN else np.frombuffer(json.dumps({kind: notes}).encode(), np.uint8)


@functools.singledispatch
def train_of(table: Table, state: State) -> Train:
    """The tensor train of a table that consists of one; raises for other kinds."""
    del state
    raise TypeError(
        f"source: got {type_of(table)}; expected a table that is a tensor train. "
        "jax_tt.TableEmbed.from_pretrained and jax_tt.TableEmbedBag.from_pretrained take tables of every kind."
    )


@train_of.register
def _(table: TTTable, state: State) -> Train:
    return Train(tuple(table.spec.params(state)), table.shape, None)


@train_of.register
def _(table: OrderedTable, state: State) -> Train:
    return train_of(table.table, state)._replace(id_order=IdOrder(state[ID_ORDER]))


def _quantized(stored: StoredArrays, prefix: str, notes: Any) -> Pair:
    array = stored[f"{prefix}{PACKED}"]
    # Files of earlier versions have uniform levels and no rotation.
    levels, rotated = notes.get("levels"), notes.get("rotated", False)
    levels = None if levels is None else tuple(levels)
    table = QuantizedTable(
        array.shape[0], notes["features"], notes["bits"], levels=levels, rotated=rotated
    )
    expected = table.spec.param_shapes[PACKED]
    itemsize = array.dtype.itemsize if array.dtype in (np.uint8, np.float32) else 0
    # A table that is trained has words, whose bytes are the rows.
    if (*array.shape[:-1], array.shape[-1] * itemsize) != expected:
        raise ValueError(
            f"its rows are {array.dtype} of shape {array.shape}; expected uint8 of shape {expected}."
        )
    packed = np.ascontiguousarray(array.read()).view(np.uint8)
    check_headers("its rows", packed, 0)
    state = {PACKED: jnp.asarray(packed)}
    if table.rotated:
        rotation = as_rotation(np.asarray(stored[f"{prefix}{ROTATION}"].read()), table.features)
        state[ROTATION] = jnp.asarray(rotation)
    return table, state


def _mixed(stored: StoredArrays, prefix: str, notes: Any) -> Pair:
    pairs = [
        _quantized(stored, f"{prefix}table_{k}_", part) for k, part in enumerate(notes["tables"])
    ]
    table = MixedTable(tuple(part for part, _ in pairs))
    if table.num_embeddings != notes["num_embeddings"]:
        raise ValueError(
            f"its tables have {table.num_embeddings} rows; expected {notes['num_embeddings']}."
        )
    names = [f"places_{k}" for k in range(len(pairs) - 1)]
    state = table.joined([state for _, state in pairs])
    state |= {name: jnp.asarray(stored[f"{prefix}{name}"].read()) for name in names}
    check_state(table, state)
    try:
        same = table.with_parts(state, table.parts_of(state))
    except ValueError as error:
        raise ValueError(f"its places are damaged: {error}") from error
    if any((same[name] != state[name]).any() for name in names):
        raise ValueError("its places are damaged: they do not tell the rows of the tables.")
    return table, state


def _coded(stored: StoredArrays, prefix: str, notes: Any) -> Pair:
    def read(name: str) -> jax.Array:
        return jnp.asarray(stored[f"{prefix}{name}"].read())

    codes = read(CODES)
    # Files of earlier versions have no hot ids.
    layout = CodeLayout(
        codes.shape[0], **{field: notes[field] for field in _CODED if field in notes}
    )
    shape = None
    if _CODEBOOKS in notes:
        factors = (tuple(notes[_CODEBOOKS][name]) for name in _CODEBOOK_SIZES)
        shape = TTShape(layout.num_entries, layout.width, *factors)
    table = with_codebooks(layout, shape)
    names = [
        name for name in (*table.spec.param_names, *table.spec.constant_names) if name != CODES
    ]
    state = {CODES: codes} | {name: read(name) for name in names}
    for name in (*table.spec.param_names, *([ROTATION] if table.rotated else [])):
        if not np.isfinite(np.asarray(state[name], np.float32)).all():
            raise ValueError(f"its {name} hold NaN or infinity; expected finite numbers.")
    table = with_codebooks(layout, shape, param_dtype=table.spec.storage(state))
    check_state(table, state)
    if table.hot:
        hot, _ = table.hot_ids(state, jnp.arange(table.num_embeddings))
        if hot.sum() != table.hot or (places.mark_members(hot) != state[HOT_PLACES]).any():
            raise ValueError(f"its {HOT_PLACES} do not tell the places of {table.hot} ids.")
    return table, state


def _sum(stored: StoredArrays, prefix: str, notes: Any) -> Pair:
    terms = [
        _term(stored, f"{prefix}table_{k}_", notes["num_embeddings"]) for k in range(notes["terms"])
    ]
    table = SumTable(tuple(term for term, _ in terms))
    return table, table.joined([state for _, state in terms])


def _term(stored: StoredArrays, prefix: str, num_embeddings: int) -> Pair:
    count = next(k for k in itertools.count() if f"{prefix}core_{k}" not in stored.arrays)
    cores = tuple(np.asarray(stored[f"{prefix}core_{k}"].read()) for k in range(max(count, 1)))
    for k, core in enumerate(cores):
        if not np.isfinite(core.astype(np.float32)).all():
            raise ValueError(f"its {prefix}core_{k} holds NaN or infinity, no finite numbers.")
    name = f"{prefix}{ID_ORDER}"
    order = IdOrder(stored[name].read()) if name in stored.arrays else None
    return tt_to_table(cores, order, num_embeddings=num_embeddings)


# By kind: reads the table whose arrays have a prefix, with its state.
READERS: Mapping[str, Callable[[StoredArrays, str, Any], Pair]] = {
    "quantized": _quantized,
    "mixed": _mixed,
    "coded": _coded,
    "sum": _sum,
}


def array_names(table: Table, state: State) -> list[str]:
    """The arrays of a state that a file keeps."""
    kept = {*table.spec.param_names, *table.spec.constant_names, *table.spec.buffers}
    return [name for name in state if name in kept]
