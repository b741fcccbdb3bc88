"""``jax-tt compress``: a dense table as a smaller one, in a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jax_tt._base.arguments import as_dtype, expect, mismatch
from jax_tt._base.progress import Progress
from jax_tt._compress.candidates import KINDS
from jax_tt._compress.compress import compress
from jax_tt._compress.residuals import residual_table, tt_residuals
from jax_tt._compress.source import loss, measured_errors
from jax_tt._files.kinds import Pair
from jax_tt._files.tables import Errors, check_tables_path, read_table, save
from jax_tt._ids.id_order import OrderedRows
from jax_tt._ops.trains import tt_to_table
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.residual_shapes import tt_residual_shapes
from jax_tt._tt.shape import TTShape
from jax_tt.cli import _pictures
from jax_tt.cli._arguments import add_common, add_seed, byte_size, integers
from jax_tt.cli._inputs import read_numbers, read_order

# What says of a table that it is one tensor train.
_OF_A_TRAIN = ("ranks", "tolerance", "row_factors", "col_factors", "order")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compress",
        help="compress a dense table",
        description="Compresses a dense table and writes the result: the best table of all kinds or of --kind, as "
        "jax_tt.compress, or a tensor train where --ranks, --tolerance, --row-factors, --col-factors or --order say "
        "what it is to be.",
    )
    parser.add_argument(
        "table",
        help=".npy, .npz, .safetensors, a torch .pt (never unpickled), or the directory of an orbax checkpoint",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="PATH",
        help="a .safetensors file, or a new directory for an orbax checkpoint",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--ranks", type=integers, metavar="R1,R2,...", help="one rank for all, or the inner ranks"
    )
    size.add_argument(
        "--tolerance",
        type=float,
        metavar="E",
        help="smallest ranks with at most this relative error",
    )
    size.add_argument(
        "--max-bytes",
        type=byte_size,
        metavar="SIZE",
        help="largest size of the table, e.g. 4MB or 2GiB",
    )
    size.add_argument(
        "--min-quality",
        type=float,
        metavar="Q",
        help="the smallest table whose squared error is at most 1 - Q of the squares of the rows",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--kind",
        choices=("auto", *KINDS),
        help="measure tables of this kind, or of all (auto, the default), and write the best",
    )
    parser.add_argument("--name", help="array in the file; also the name of the table in --out")
    parser.add_argument("--row-factors", type=integers, metavar="P1,P2,...")
    parser.add_argument("--col-factors", type=integers, metavar="Q1,Q2,...")
    parser.add_argument(
        "--order", metavar="NPZ", help="order of the ids, made by jax-tt order; stored in --out"
    )
    parser.add_argument(
        "--weights",
        metavar="NPY",
        help="weight of each row [N], e.g. the number of its requests",
    )
    way.add_argument(
        "--residuals",
        action="store_true",
        help="a sum of tensor trains with different orders of ids, for tables with little structure; --max-bytes "
        "includes the orders",
    )
    parser.add_argument(
        "--dtype",
        help="type of cores and codebooks; default: bfloat16, or that of the rows for a tensor train of given sizes",
    )
    add_seed(parser)
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    directory = check_tables_path(args.out)
    _pictures.check_outputs(args, (args.table, args.order, args.weights), directory)
    of_a_train = any(getattr(args, name) is not None for name in _OF_A_TRAIN)
    if args.residuals:
        _run_residuals(args)
    elif of_a_train and args.kind is None:
        _run_train(args)
    else:
        _run_kind(args)


def _run_kind(args: argparse.Namespace) -> None:
    _refuse(args, _OF_A_TRAIN, "--kind", "the table with the best quality for its size is found")
    name, table = read_table(args.table, args.name)
    compressed = compress(
        table,
        kind=args.kind or "auto",
        max_bytes=args.max_bytes,
        min_quality=args.min_quality,
        weights=None if args.weights is None else read_numbers(args.weights),
        param_dtype=as_dtype("--dtype", args.dtype, "bfloat16"),
        seed=args.seed,
        progress=args.progress,
    )
    chosen = compressed.chosen
    print(compressed)
    with Progress(args.progress, unit="block", delay=0) as bar:
        errors = measured_errors(table, compressed.table, compressed.state, bar)
    pair = compressed.table, compressed.state
    _write(args, name, pair, errors, f"{chosen.kind} with {chosen.detail}")
    _pictures.figure(args, 1, lambda axes: compressed.draw(axes[0]))


def _run_train(args: argparse.Namespace) -> None:
    given = next(name for name in _OF_A_TRAIN if getattr(args, name) is not None)
    _refuse(
        args, ["min_quality"], _option(given), "a tensor train of given sizes has a --tolerance"
    )
    name, table = read_table(args.table, args.name)
    weights = None if args.weights is None else read_numbers(args.weights)
    p, q = args.row_factors, args.col_factors
    order = None
    if args.order is not None:
        order, made_for = read_order(args.order)
        p = p or made_for
        table = OrderedRows(table, order)
        if weights is not None and len(weights) == len(order.rows):
            weights = weights[order.inverse.rows]
    if (p is None) != (q is None):
        d = len(p or q)
        suggested = TTShape.suggest(*table.shape, d=d)
        p, q = p or suggested.row_factors, q or suggested.col_factors
    ranks = args.ranks if args.ranks is None or len(args.ranks) > 1 else args.ranks[0]
    train = tt_from_dense(
        table,
        ranks,
        tolerance=args.tolerance,
        max_bytes=args.max_bytes,
        row_factors=p,
        col_factors=q,
        weights=weights,
        dtype=as_dtype("--dtype", args.dtype, None),
        seed=args.seed,
        progress=args.progress,
    )
    print(train)
    stored = sum(core.nbytes for core in train.cores)
    stored += 0 if order is None else order.nbytes
    what = _size(stored, *table.shape)
    what += "" if order is None else ", with the order of its ids"
    errors = train.relative_error, train.row_errors
    _write(args, name, tt_to_table(train, order), errors, what)
    _pictures.figure(args, 1, lambda axes: _pictures.draw_errors(axes[0], *errors))


def _run_residuals(args: argparse.Namespace) -> None:
    refused = ("order", "weights", "row_factors", "col_factors")
    why = "every term has a separate order and factors, and all rows have the same weight"
    _refuse(args, refused, "--residuals", why)
    if args.max_bytes is None:
        raise mismatch("--residuals", "no --max-bytes", "the bytes of all cores and orders")
    name, table = read_table(args.table, args.name)
    dtype = as_dtype("--dtype", args.dtype, table.dtype)
    rows, features = table.shape
    shapes = tt_residual_shapes(rows, features, args.max_bytes, dtype=dtype)
    terms = tt_residuals(table, shapes, dtype=dtype, seed=args.seed, progress=args.progress)
    errors = [term.relative_error for term in terms]
    for k, term in enumerate(terms):
        rank = term.approximation.shape.ranks[0]
        print(f"term {k}: rank {rank}, relative error of the sum {term.relative_error:.3g}")
    cores = sum(core.nbytes for term in terms for core in term.approximation.cores)
    orders = sum(term.id_order.nbytes for term in terms)
    size = _size(cores + orders, rows, features)
    what = f"{size}, with the orders of ids, a sum of {len(terms)} tensor trains"
    _write(args, name, residual_table(terms), (errors[-1], {}), what)
    _pictures.figure(args, 1, lambda axes: _pictures.draw_terms(axes[0], errors))


def _write(args: argparse.Namespace, name: str, pair: Pair, errors: Errors, what: str) -> None:
    """Writes a table, and says what became of it."""
    save(args.out, {name: pair}, errors={name: errors}, overwrite=args.force)
    print(f"wrote {name} to {args.out}: {what}")
    if lost := loss(errors[0] or 0.0):
        print(f"jax-tt: warning: {name}: {lost}", file=sys.stderr)


def _size(nbytes: int, rows: int, features: int) -> str:
    """Bytes of a table, and how much smaller it is than its rows in float32."""
    return f"{nbytes:,} bytes, smaller by {4 * rows * features / nbytes:,.1f}x"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(args: argparse.Namespace, names: Sequence[str], option: str, why: str) -> None:
    """Raises for arguments that are given beside an option that does not go with them."""
    given = [_option(name) for name in names if getattr(args, name) is not None]
    expect(not given, ", ".join(given), f"with {option}", f"none, because {why}")
