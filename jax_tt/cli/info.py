"""``jax-tt info``: the tables in a file or checkpoint."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import type_of
from jax_tt._base.progress import Progress, text_table
from jax_tt._compress.source import measured_errors
from jax_tt._files import trains
from jax_tt._files.kinds import Pair
from jax_tt._files.tables import described_tables, errors_of, read_table, train_shapes
from jax_tt._files.trains import core_names, order_name
from jax_tt._formats.mapped import open_arrays
from jax_tt._formats.stored import FileError, StoredArrays
from jax_tt._ids.id_order import OrderedRows
from jax_tt._kinds.coded.table import CodedTable, in_words
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.composite.sum import SumTable
from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._table.types import State
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
    add_progress(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    stored = open_arrays(args.path)
    shapes, small = train_shapes(stored), described_tables(stored)
    names = [*shapes, *small]
    if args.name is not None and args.name not in names:
        raise FileError(
            f"--name: got {args.name!r}; expected one of {', '.join(names) or 'none'}, the compressed tables there."
        )
    errors = {name: errors_of(stored, name) for name in names}
    if args.against is not None:
        name = _compared(args.name, names)
        errors[name] = _measured(args, name, small.get(name))
    lines = [_tt_line(stored, name, shape, *errors[name]) for name, shape in shapes.items()]
    lines += [_small_line(name, pair, *errors[name]) for name, pair in small.items()]
    used = {key for keys in core_names(stored).values() for key in keys}
    used |= {f"{name}.{key}" for name, (_, state) in small.items() for key in state}
    used |= {name for table in shapes if (name := order_name(stored, table)) is not None}
    others = {name: array for name, array in stored.arrays.items() if name not in used}
    slots = [others.pop(name) for name in [*others] if trains.is_optimizer_state(name)]
    dense = {
        name: array
        for name, array in others.items()
        if len(array.shape) == 2 and jnp.issubdtype(array.dtype, jnp.floating)
    }
    lines += [
        (name or "(unnamed)", "dense", *(f"{n:,}" for n in array.shape), "", "", array.dtype.name, f"{array.nbytes:,}",
         f"{4 / array.dtype.itemsize:.1f}x", "", "", "")
        for name, array in dense.items()
    ]  # fmt: skip
    if lines:
        print(text_table(_COLUMNS, lines, left=_LEFT))
    if slots:
        print(f"optimizer state: {len(slots)} arrays of {sum(a.nbytes for a in slots):,} bytes")
    rest = [array for name, array in others.items() if name not in dense]
    if rest or not (lines or slots):
        print(f"{len(rest)} other arrays of {sum(array.nbytes for array in rest):,} bytes")


def _tt_line(
    stored: StoredArrays, name: str, shape: TTShape, error: float | None, rows: dict[float, float]
) -> tuple[str, ...]:
    cores = [stored.arrays[key] for key in core_names(stored)[name]]
    order = order_name(stored, name)
    nbytes = sum(core.nbytes for core in cores)
    nbytes += 0 if order is None else stored.arrays[order].nbytes
    kind = "tensor train" if order is None else "tensor train, ordered"
    pairs = zip(shape.row_factors, shape.col_factors, strict=True)
    return (
        name or "(unnamed)",
        kind,
        f"{shape.num_embeddings:,}",
        f"{shape.features:,}",
        " ".join(f"{p}x{q}" for p, q in pairs),
        " ".join(map(str, shape.ranks)),
        cores[0].dtype.name,
        f"{nbytes:,}",
        _smaller(shape, nbytes),
        *_in_words(error, rows),
    )


def _small_line(
    name: str, pair: Pair, error: float | None, rows: dict[float, float]
) -> tuple[str, ...]:
    table, state = pair
    kind, dtype = _settings(table, state)
    nbytes = sum(array.nbytes for array in state.values())
    return (
        name or "(unnamed)",
        kind,
        f"{table.num_embeddings:,}",
        f"{table.features:,}",
        "",
        "",
        dtype,
        f"{nbytes:,}",
        _smaller(table, nbytes),
        *_in_words(error, rows),
    )


def _smaller(sizes: Any, nbytes: int) -> str:
    """By how much a table is smaller than its rows in float32."""
    return f"{4 * sizes.num_embeddings * sizes.features / nbytes:,.1f}x"


def _in_words(error: float | None, rows: dict[float, float]) -> list[str]:
    return ["?" if e is None else f"{e:.3g}" for e in (error, rows.get(0.5), rows.get(0.99))]


def _compared(name: str | None, names: list[str]) -> str:
    if name is None and len(names) != 1:
        raise FileError(
            f"--against: there are {len(names)} compressed tables; expected one, or --name to say which: "
            f"{', '.join(names)}."
        )
    return names[0] if name is None else name


def _measured(
    args: argparse.Namespace, name: str, small: tuple[Any, Any] | None
) -> tuple[float, dict[float, float]]:
    original = read_table(args.against, args.against_name)[1]

    def check(table: Any) -> None:
        size = (table.num_embeddings, table.features)
        if original.shape != size:
            raise FileError(
                f"--against: {args.against} is {original.shape}; expected {size}, as {name!r}."
            )

    with Progress(args.progress, unit="block", delay=0) as bar:
        if small is not None:
            check(small[0])
            return measured_errors(original, *small, bar)
        stored = open_arrays(args.path)
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
