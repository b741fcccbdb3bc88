"""`save` and `load`: tables with their states in files; and `read_table`: a dense table in a file of any format."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import expect, instance_of, mismatch, type_of
from jax_tt._base.dtypes import x64_enabled
from jax_tt._base.installed import require
from jax_tt._base.reports import level_of_caller
from jax_tt._files import trains
from jax_tt._files.kinds import READERS, Description, Pair, array_names, describe
from jax_tt._formats.container import Container
from jax_tt._formats.mapped import open_arrays
from jax_tt._formats.orbax_directory import write_orbax
from jax_tt._formats.output import check_output, writing
from jax_tt._formats.stored import FileError, StoredArray, StoredArrays
from jax_tt._ops.trains import tt_to_table
from jax_tt._table.check import check_state
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._tt.approximation import Approximation
from jax_tt._tt.shape import TTShape

# In checkpoints of layers, which may have a leaf "value" below every name.
_DESCRIPTION = re.compile(r"(?:(?P<table>.+)\.)?description(?P<leaf>\.value)?")
_LONGEST = 1 << 20
_ERROR, _ROW_ERRORS = "relative_error", "row_errors"
# Relative error of a table, and of a row by quantile.
Errors = tuple[float | None, Mapping[float, float]]


def save(
    path: str | os.PathLike[str],
    tables: Mapping[str, tuple[Table, State]],
    *,
    errors: Mapping[str, Errors] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes tables with their states to one ``.safetensors`` file, or to a new directory as an orbax checkpoint.

    A file keeps tables for lookups, all kinds that `compress` makes: tensor trains (`TTTable`, also in an
    `OrderedTable`), `SumTable` of them, `QuantizedTable`, `CodedTable`, and `MixedTable` of quantized tables. Anything
    else is refused before anything is written. A file may
    have tables of several kinds.

    The array ``NAME.array`` of the file is the array of the state of the table ``NAME``, such as ``NAME.core_0`` or
    ``NAME.packed``. An order of ids is the array ``NAME.id_order``: uint16 rows ``[N]`` up to 65,536 ids, int64 beyond
    2^31 - 1, and in between uint32 ``[ceil(N / 32), b]``, where b is the number of bits of N: 32 rows of b bits each,
    one after another, lowest bits first. Settings and errors are in the metadata under the key ``jax_tt``, a JSON
    object, with a checksum of every array, which `load` compares. Arrays whose names begin with ``__padding_`` align
    those after them.

    The file or directory is written under a temporary name and renamed when it is complete, so that an interrupted
    program leaves either the old one or the new one.

    Args:
        path: ends with ``.safetensors``, or names a directory. Its parent folder must exist.
        tables: tables with their states by name, as `quantize`, `encode` and `tt.to_table` return them.
        errors: by name of the table, its error relative to the table that it was made from, and the relative errors of
            rows by quantile, such as ``(train.relative_error, train.row_errors)`` of a `tt.Approximation`.
            `load_errors` reads them, and ``jax-tt info`` shows them.
        overwrite: replace an existing file, or the directory of a checkpoint.

    Raises:
        FileError: the path has another suffix, cannot be written, or exists and ``overwrite`` is False (then also a
            `FileExistsError`).
        TypeError, ValueError: ``tables`` contains something else, a table with an optimizer, or a state that does not
            belong to its table.
        ImportError: safetensors or orbax is missing.

    >>> import jax.numpy as jnp, os, tempfile
    >>> import jax_tt
    >>> path = os.path.join(tempfile.mkdtemp(), "small.safetensors")
    >>> rows = jnp.eye(100, 16)
    >>> jax_tt.files.save(path, {"items": jax_tt.quantize(rows, bits=4), "shops": jax_tt.encode(rows, 4, bits=4)})
    >>> table, state = jax_tt.files.load(path)["items"]
    >>> table.bits, state["packed"].shape
    (4, (100, 12))
    """
    expected = "a mapping from names to tables and states, e.g. {'items': jax_tt.quantize(rows)}"
    instance_of("tables", tables, Mapping, expected)
    measured = _as_notes(errors or {}, tables)
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for name, pair in tables.items():
        kind, notes = _described(name, pair)
        table, state = pair
        arrays |= {
            f"{_prefix(name)}{key}": np.asarray(state[key]) for key in array_names(table, state)
        }
        about.setdefault(kind, {})[name] = notes | measured.get(name, {})
    directory = check_tables_path(path)
    check_output(path, overwrite=overwrite, directory=directory)
    with writing(path, overwrite=overwrite, directory=directory) as new:
        if directory:
            write_orbax(new, arrays, about)
        else:
            Container("tables", arrays, about).write(new)


def load(path: str | os.PathLike[str]) -> dict[str, tuple[Any, dict[str, jax.Array]]]:
    """Reads the tables in a file or checkpoint, with their states, by name.

    These are the tables written by `save`, and those in checkpoints of layers, which are named after the path to the
    layer: tensor trains, by their arrays ``core_0``, ``core_1``, ..., and, of NNX layers, those of the other kinds. A
    checkpoint of a tensor train contains the number of rows only if there is an order of
    ids; otherwise it is taken to be the product of the row factors, which is slightly larger. Arrays in float64 are
    rounded to float32 while ``jax_enable_x64`` is off, with a warning.

    Args:
        path: a ``.safetensors`` or ``.npz`` file, or the directory of an orbax checkpoint.

    Returns:
        Read-only tables: `TTTable`, `OrderedTable` of one, `SumTable`, `QuantizedTable`, `CodedTable`, or `MixedTable`.
        `TableEmbed.from_pretrained` and `EmbedCollection.replaced` take each of them, or the path.

    Raises:
        FileError: there is no such file (then also a `FileNotFoundError`), it is damaged, it contains no such table, or
            the arrays of a table have other sizes than the metadata say, do not fit together, or are not finite.
        ImportError: safetensors or orbax is missing.

    >>> import numpy as np, os, tempfile
    >>> import jax_tt
    >>> path = os.path.join(tempfile.mkdtemp(), "cores.npz")
    >>> cores = np.ones((10, 1, 2, 3), np.float32), np.ones((10, 3, 4, 1), np.float32)
    >>> np.savez(path, core_0=cores[0], core_1=cores[1])
    >>> table, state = jax_tt.files.load(path)[""]
    >>> table.num_embeddings, table.features, list(state)
    (100, 8, ['core_0', 'core_1'])
    """
    stored = open_tables(path)
    pairs = {}
    # A comprehension is a frame for warnings in some versions of Python.
    for name, kind in table_kinds(stored).items():
        pairs[name] = _load(stored, name, kind)
    if not pairs:
        raise FileError(
            f"{stored.path}: holds no table that jax_tt.files.save writes, and no tensor train (arrays core_0, core_1, "
            f"...), only {stored.listed()}."
        )
    return pairs


def open_tables(path: str | os.PathLike[str]) -> StoredArrays:
    """`open_arrays` with the descriptions of tables that layers keep beside their arrays among the notes."""
    stored = open_arrays(path)
    arrays, notes, leaves = dict(stored.arrays), dict(stored.notes), {}
    for key in stored.arrays:
        match = _DESCRIPTION.fullmatch(key)
        described = match and _read_description(stored.arrays[key])
        if match and described:
            del arrays[key]
            name = match["table"] or ""
            leaves[_prefix(name)] = match["leaf"] or ""
            for kind, settings in described.items():
                others = notes.get(kind)
                notes[kind] = {**(others if isinstance(others, Mapping) else {}), name: settings}
    for start, leaf in leaves.items():
        for key in [key for key in arrays if key.startswith(start)]:
            arrays[key.removesuffix(leaf)] = arrays.pop(key)
    return dataclasses.replace(stored, arrays=arrays, notes=notes)


def _read_description(array: StoredArray) -> dict[str, Any] | None:
    """The kind of a table and its settings; None for an array of something else."""
    if array.dtype != np.uint8 or len(array.shape) != 1 or array.nbytes > _LONGEST:
        return None
    try:
        described = json.loads(np.asarray(array.read()).tobytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(described, dict) or not described.keys() <= READERS.keys():
        return None
    return described


def load_errors(path: str | os.PathLike[str]) -> dict[str, tuple[float | None, dict[float, float]]]:
    """Reads the errors of tables that were given to `save`.

    Returns:
        By name of the table, its relative error, or None, and the relative errors of rows by quantile.

    Raises:
        FileError: there is no such file (then also a `FileNotFoundError`), or it is damaged.

    >>> import numpy as np, os, tempfile
    >>> import jax_tt
    >>> path = os.path.join(tempfile.mkdtemp(), "items.safetensors")
    >>> train = jax_tt.tt.from_dense(np.ones((1000, 8), np.float32), 1)
    >>> errors = {"items": (train.relative_error, train.row_errors)}
    >>> jax_tt.files.save(path, {"items": jax_tt.tt.to_table(train)}, errors=errors)
    >>> jax_tt.files.load_errors(path) == errors
    True
    """
    stored = open_tables(path)
    named = (*train_shapes(stored), *(name for kind in READERS for name in _notes(stored, kind)))
    every = {name: errors_of(stored, name) for name in named}
    return {name: errors for name, errors in every.items() if errors != (None, {})}


def read_table(
    path: str | os.PathLike[str], name: str | None, option: str = "--name"
) -> tuple[str, Any]:
    """Reads a dense table: its name and floats ``[N, D]``, by rows where the format allows it.

    ``name`` may be None if the file has one such array; errors refer to the ``option`` that sets it.
    """
    stored = open_tables(path)
    chosen = name if name is not None else only_name(stored, 2, "table [N, D]", option)
    array = stored[chosen]
    if len(array.shape) != 2 or not jnp.issubdtype(array.dtype, jnp.floating) or 0 in array.shape:
        got = f"{chosen or 'the array'}, {array.dtype} of shape {array.shape}"
        raise mismatch(path, got, "floats [N, D]", error=FileError)
    return chosen or "table", array.by_rows()


def only_name(stored: StoredArrays, ndim: int, what: str, option: str = "--name") -> str:
    """The name of the only array with this number of dimensions."""
    fits = [name for name, array in stored.arrays.items() if len(array.shape) == ndim]
    if len(fits) == 1:
        return fits[0]
    if not fits:
        shapes = ", ".join(str(array.shape) for array in list(stored.arrays.values())[:5])
        raise FileError(f"{stored.path}: holds no {what}; the shapes in it are {shapes or 'none'}.")
    few = ", ".join(fits[:10]) + (f" and {len(fits) - 10} more" if len(fits) > 10 else "")
    raise FileError(
        f"{stored.path}: holds {len(fits)} arrays of {ndim} dimensions; say which by {option}: {few}."
    )


def load_one(path: str | os.PathLike[str], name: str | None, option: str) -> Pair | None:
    """Reads one table as `load`, without the others; None if the file holds none, or another array is named.

    ``name`` may be None if the file has one table; errors refer to the ``option`` that sets it.
    """
    stored = open_tables(path)
    kinds = table_kinds(stored)
    if name is None and len(kinds) > 1:
        raise FileError(
            f"{stored.path}: holds {len(kinds)} tables; say which by {option}: {', '.join(kinds)}."
        )
    chosen = next(iter(kinds), None) if name is None else name
    return _load(stored, chosen, kinds[chosen]) if chosen in kinds else None


def table_kinds(stored: StoredArrays) -> dict[str, str]:
    """The kinds of the tables that `load` reads, by name: keys of `READERS`, or that of tensor trains."""
    described = {name: kind for kind in READERS for name in _notes(stored, kind)}
    return described | dict.fromkeys(train_shapes(stored), trains.KIND)


def described_tables(stored: StoredArrays) -> dict[str, Pair]:
    """Reads the tables of a file that have settings: all kinds but tensor trains."""
    kinds = table_kinds(stored)
    return {
        name: _described_table(stored, name, kinds[name])
        for name in kinds
        if kinds[name] in READERS
    }


def _load(stored: StoredArrays, name: str, kind: str) -> Pair:
    if kind in READERS:
        pair = _described_table(stored, name, kind)
        keys = (f"{_prefix(name)}{key}" for key in pair[1])
        warn_of_lost_bits(stored.path, name, [stored[k] for k in keys if k in stored.arrays])
        return pair
    train = trains.read(stored, name, train_shapes(stored)[name])
    warn_of_lost_bits(stored.path, name, train.cores)
    return tt_to_table(train.cores, train.id_order, num_embeddings=train.shape.num_embeddings)


def _described_table(stored: StoredArrays, name: str, kind: str) -> Pair:
    try:
        return READERS[kind](stored, _prefix(name), _notes(stored, kind)[name])
    except FileError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FileError(f"{stored.path}: the table {name!r}: {error}") from error


def train_shapes(stored: StoredArrays) -> dict[str, TTShape]:
    """Shapes of the tensor trains that are tables, by name; codebooks are not. The cores are not read."""
    others = {name for kind in READERS for name in _notes(stored, kind)}
    return trains.shapes(stored, without=others)


def errors_of(stored: StoredArrays, name: str) -> tuple[float | None, dict[float, float]]:
    """Reads the relative error of a table, and the errors of its rows by quantile, from the metadata."""
    candidates = (_notes(stored, kind).get(name) for kind in (trains.KIND, *READERS))
    notes = next((notes for notes in candidates if isinstance(notes, Mapping)), {})
    error, rows = notes.get(_ERROR), notes.get(_ROW_ERRORS)
    try:
        pairs = rows if isinstance(rows, Sequence) else ()
        return None if error is None else float(error), {float(at): float(e) for at, e in pairs}
    except (TypeError, ValueError) as problem:
        raise FileError(f"{stored.path}: the errors of {name!r} are no numbers.") from problem


def check_tables_path(path: str | os.PathLike[str]) -> bool:
    """Whether `save` makes a directory of this name, with what it needs for it installed."""
    name = os.fsdecode(path)
    suffix = os.path.splitext(name.rstrip(os.sep))[1]
    if suffix not in ("", ".safetensors"):
        expected = ".safetensors, or a directory without suffix for an orbax checkpoint"
        raise mismatch(name, f"the suffix {suffix}", expected, error=FileError)
    if not suffix:
        require("orbax.checkpoint", f"Writing {name}", "cli")
    return not suffix


def _described(name: Any, pair: Any) -> Description:
    """The description of a table with its state, which were checked."""
    where = f"tables[{name!r}]"
    expect(isinstance(name, str), "tables", f"the name {name!r}", "a string", error=TypeError)
    if not isinstance(pair, tuple) or len(pair) != 2:
        train = isinstance(pair, Approximation)
        fix = ", jax_tt.tt.to_table(...) of it" if train else ""
        raise TypeError(f"{where}: got {type_of(pair)}; expected a table with its state{fix}.")
    table, state = pair
    try:
        description = describe(table)
        if table.update is not None:
            raise ValueError(
                "got a table with an optimizer, whose state such a file does not hold; expected a read-only one, "
                "jax_tt.extension.freeze(table, state). Save the whole state in a checkpoint to train on."
            )
        check_state(table, state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error
    return description


def warn_of_lost_bits(
    path: str | os.PathLike[str], name: str | None, arrays: Sequence[Any]
) -> None:
    """Warns of arrays of a table in a file that JAX rounds."""
    if any(array.dtype == np.float64 for array in arrays) and not x64_enabled():
        of_table = f" of {name!r}" if name else ""
        warnings.warn(
            f"{os.fsdecode(path)}: arrays{of_table} are float64, which JAX rounds to float32 while jax_enable_x64 is "
            "off. Turn it on to keep them as they are.",
            stacklevel=level_of_caller(),
        )


def _as_notes(errors: Mapping[str, Errors], tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    if unknown := [name for name in errors if name not in tables]:
        raise ValueError(f"errors: got {unknown}; expected names of tables, {list(tables)}.")
    notes = {}
    for name, given in errors.items():
        try:
            error, by_row = given
            error = None if error is None else float(error)
            by_row = [[float(at), float(e)] for at, e in by_row.items()]
        except (TypeError, ValueError, AttributeError) as problem:
            expected = "an error or None, and errors of rows by quantile"
            fix = "An example is (train.relative_error, train.row_errors)."
            raise mismatch(f"errors[{name!r}]", repr(given), expected, fix, TypeError) from problem
        notes[name] = {_ERROR: error, _ROW_ERRORS: by_row}
    return notes


def _notes(stored: StoredArrays, kind: str) -> Mapping[str, Any]:
    """The settings of the tables of a kind in the metadata, by name; only checked to be a mapping."""
    notes = stored.notes.get(kind)
    return notes if isinstance(notes, Mapping) else {}


def _prefix(name: str) -> str:
    return f"{name}." if name else ""
