"""``jax-tt info``: the tables in a file or checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._base.progress import Progress, text_table
from jax_tt._compress.source import measured_errors
from jax_tt._directories.hash_directory import KEYS
from jax_tt._files import trains
from jax_tt._files.kinds import Pair
from jax_tt._files.tables import (
    described_tables,
    errors_of,
    open_tables,
    read_table,
    train_shapes,
)
from jax_tt._files.trains import core_names, order_name
from jax_tt._formats.stored import FileError, StoredArray, StoredArrays
from jax_tt._ids.id_order import OrderedRows
from jax_tt._kinds.coded.table import CodedTable, in_words
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.composite.sum import SumTable
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable
from jax_tt._table.rotation import ROTATION
from jax_tt._table.state import State
from jax_tt._tt.approximation import measure
from jax_tt._tt.rows import Rows
from jax_tt._tt.shape import TTShape
from jax_tt.cli._arguments import add_progress

_COLUMNS = (
    "table",
    "kind",
    "rows",
    "columns",
    "factors",
    "ranks",
    "type",
    "bytes",
    "smaller by",
    "error",
    "row 50 %",
    "row 99 %",
)
_LEFT = 2  # columns of words
_HASH_KEYS = re.compile(rf"((?:.+\.)?){KEYS[0]}((?:\.value)?)")
_ROWS = "embedding"
# Floats of a quantized table without its description, e.g. of a linen layer.
_NO_ROWS = re.compile(rf"(?:.+\.)?(?:{PACKED}|{ROTATION})(?:\.value)?")


@dataclasses.dataclass(frozen=True)
class _Listed:
    """What is listed of a table; `--json` has the same fields."""

    table: str
    kind: str
    rows: int
    columns: int
    type: str
    bytes: int
    factors: list[list[int]] | None = None
    ranks: list[int] | None = None
    error: float | None = None
    row_errors: dict[float, float] | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        errors = ["", "", ""]
        if self.row_errors is not None:  # of a table that was made of another one
            found = self.error, self.row_errors.get(0.5), self.row_errors.get(0.99)
            errors = ["?" if error is None else f"{error:.3g}" for error in found]
        return (
            self.table or "(unnamed)",
            self.kind,
            f"{self.rows:,}",
            f"{self.columns:,}",
            " ".join(f"{p}x{q}" for p, q in self.factors or ()),
            " ".join(map(str, self.ranks or ())),
            self.type,
            f"{self.bytes:,}",
            f"{4 * self.rows * self.columns / max(self.bytes, 1):,.1f}x",
            *errors,
        )


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="list the tables in a file",
        description="Lists the tables in a file or checkpoint: sizes, ranks, bytes of all that a lookup needs, "
        "how much smaller that is than the rows in float32, and error.",
    )
    parser.add_argument(
        "path",
        help="a file in any format that compress reads, or the directory of an orbax checkpoint",
    )
    parser.add_argument(
        "--against", metavar="TABLE", help="the dense original, to measure the error"
    )
    parser.add_argument("--against-name", metavar="NAME", help="array in --against")
    parser.add_argument(
        "--name",
        help="table to compare; required if there are several",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for other programs")
    add_progress(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    stored = open_tables(args.path)
    shapes, small = train_shapes(stored), described_tables(stored)
    names = [*shapes, *small]
    if args.name is not None and args.name not in names:
        expected = f"one of {', '.join(names) or 'none'}, the compressed tables there"
        raise mismatch("--name", repr(args.name), expected, error=FileError)
    errors = {name: errors_of(stored, name) for name in names}
    if args.against is not None:
        name = _compared(args.name, names)
        errors[name] = _measured(args, name, small.get(name))
    tables = [_train(stored, name, shape, *errors[name]) for name, shape in shapes.items()]
    tables += [_small(name, pair, *errors[name]) for name, pair in small.items()]
    used = {key for keys in core_names(stored).values() for key in keys}
    used |= {
        f"{name}.{key}" if name else key for name, (_, state) in small.items() for key in state
    }
    used |= {name for table in shapes if (name := order_name(stored, table)) is not None}
    others = {name: array for name, array in stored.arrays.items() if name not in used}
    slots = [others.pop(name) for name in [*others] if trains.is_optimizer_state(name)]
    for name, keys in _hash_tables(others).items():
        tables.append(_hashed(name, {plain: others.pop(key) for plain, key in keys.items()}))
    dense = {
        name: array
        for name, array in others.items()
        if len(array.shape) == 2
        and jnp.issubdtype(array.dtype, jnp.floating)
        and not _NO_ROWS.fullmatch(name)
    }
    tables += [
        _Listed(name, "dense", array.shape[0], array.shape[1], array.dtype.name, array.nbytes)
        for name, array in dense.items()
    ]
    rest = [array for name, array in others.items() if name not in dense]
    sums = {
        "optimizer state": (len(slots), sum(array.nbytes for array in slots)),
        "other arrays": (len(rest), sum(array.nbytes for array in rest)),
    }
    if args.json:
        counted = {key: {"arrays": n, "bytes": size} for key, (n, size) in sums.items()}
        print(json.dumps({"tables": [*map(dataclasses.asdict, tables)], **counted}, indent=2))
        return
    if tables:
        print(text_table(_COLUMNS, [one.cells for one in tables], left=_LEFT))
    if slots:
        count, size = sums["optimizer state"]
        print(f"optimizer state: {count} arrays of {size:,} bytes")
    if rest or not (tables or slots):
        count, size = sums["other arrays"]
        print(f"{count} other arrays of {size:,} bytes")


def _train(
    stored: StoredArrays, name: str, shape: TTShape, error: float | None, rows: dict[float, float]
) -> _Listed:
    cores = [stored.arrays[key] for key in core_names(stored)[name]]
    order = order_name(stored, name)
    nbytes = sum(core.nbytes for core in cores)
    nbytes += 0 if order is None else stored.arrays[order].nbytes
    kind = "tensor train" if order is None else "tensor train, ordered"
    pairs = zip(shape.row_factors, shape.col_factors, strict=True)
    sizes = shape.num_embeddings, shape.features
    factors = [list(pair) for pair in pairs]
    ranks = list(shape.ranks)
    return _Listed(name, kind, *sizes, cores[0].dtype.name, nbytes, factors, ranks, error, rows)


def _small(name: str, pair: Pair, error: float | None, rows: dict[float, float]) -> _Listed:
    table, state = pair
    kind, dtype = _settings(table, state)
    nbytes = sum(array.nbytes for array in state.values())
    sizes = table.num_embeddings, table.features
    return _Listed(name, kind, *sizes, dtype, nbytes, error=error, row_errors=rows)


def _hash_tables(arrays: Mapping[str, StoredArray]) -> dict[str, dict[str, str]]:
    """The arrays of hash tables with dense rows: by table, from their names in its state to those in the file."""
    found = {}
    for key in arrays:
        match = _HASH_KEYS.fullmatch(key)
        if not match or len(arrays[key].shape) != 3:
            continue
        start, leaf = match.groups()
        sets, _, ways = arrays[key].shape
        inside = {
            other[len(start) : len(other) - len(leaf)]: other
            for other in arrays
            if other.startswith(start) and other.endswith(leaf)
        }
        held = {
            name: other
            for name, other in inside.items()
            if name.startswith("hash_") or (name == _ROWS and _has_rows(arrays[other], sets * ways))
        }
        if {_ROWS, *KEYS} <= held.keys():
            found[start.rstrip(".")] = held
    return found


def _has_rows(array: StoredArray, count: int) -> bool:
    return len(array.shape) == 2 and array.shape[0] == count


def _hashed(name: str, arrays: Mapping[str, StoredArray]) -> _Listed:
    keys = np.count_nonzero(np.asarray(arrays[KEYS[2]].read()))
    nbytes = sum(array.nbytes for array in arrays.values())
    rows = arrays[_ROWS]
    count, features = rows.shape
    kind = f"hash table, {keys:,} keys"
    return _Listed(name, kind, count, features, rows.dtype.name, nbytes)


def _compared(name: str | None, names: list[str]) -> str:
    if name is None and len(names) != 1:
        expected = f"one, or --name to say which: {', '.join(names)}"
        raise mismatch("--against", f"{len(names)} compressed tables", expected, error=FileError)
    return names[0] if name is None else name


def _measured(
    args: argparse.Namespace, name: str, small: tuple[Any, Any] | None
) -> tuple[float, dict[float, float]]:
    original = read_table(args.against, args.against_name)[1]

    def check(table: Any) -> None:
        size = (table.num_embeddings, table.features)
        if original.shape != size:
            got = f"{args.against} of shape {original.shape}"
            raise mismatch("--against", got, f"{size}, as {name!r}", error=FileError)

    with Progress(args.progress, unit="block", delay=0) as bar:
        if small is not None:
            check(small[0])
            return measured_errors(original, *small, bar)
        stored = open_tables(args.path)
        train = trains.read(stored, name, train_shapes(stored)[name])
        check(train.shape)
        rows = original if train.id_order is None else OrderedRows(original, train.id_order)
        cores = tuple(jnp.asarray(np.asarray(core)) for core in train.cores)
        errors = measure(Rows(rows), cores, train.shape, None, bar)
    return errors.relative_error, errors.row_errors


@functools.singledispatch
def _settings(table: Any, state: State) -> tuple[str, str]:
    """The kind of a table with its settings, and the type of its numbers or codebooks."""
    raise NotImplementedError(f"settings of {type_of(table)}")


@_settings.register
def _(table: QuantizedTable, state: State) -> tuple[str, str]:
    del state
    levels = "" if table.levels is None else ", non-uniform levels"
    rotated = ", rotated" if table.rotated else ""
    return f"{table.bits} bits a number{levels}{rotated}", f"int{table.bits}"


@_settings.register
def _(table: MixedTable, state: State) -> tuple[str, str]:
    del state
    parts = [f"{part.bits} bits in {part.num_embeddings:,}" for part in table.tables]
    return f"{', '.join(parts)} rows", "int" + "/".join(str(part.bits) for part in table.tables)


@_settings.register
def _(table: CodedTable, state: State) -> tuple[str, str]:
    return f"{table.kind}, {in_words(table)}", str(table.spec.storage(state))


@_settings.register
def _(table: SumTable, state: State) -> tuple[str, str]:
    return f"sum of {len(table.tables)} tensor trains", str(table.spec.storage(state))
