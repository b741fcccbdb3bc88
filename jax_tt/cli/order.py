"""``jax-tt order``: an order of ids, from a file of interactions, counts, rows or categories."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_tt._base.arguments import mismatch
from jax_tt._files.tables import read_table
from jax_tt._formats.mapped import open_arrays
from jax_tt._formats.stored import FileError
from jax_tt._ids.id_order import IdOrder
from jax_tt._tt.shape import TTShape
from jax_tt.cli import _pictures
from jax_tt.cli._arguments import add_common, add_seed, integers, positive
from jax_tt.cli._inputs import Interactions, read_integers, read_numbers, write_order
from jax_tt.order import from_counts, from_interactions, from_table, from_tree

_FEATURES = 64  # that row factors are suggested for where columns are not known


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "order",
        help="make an order of ids",
        description="Makes an order of ids in which similar ids share parameters of a table.",
    )
    parser.add_argument(
        "input",
        help="interactions: text `context id id ...` (plain, .gz, .xz) or pairs in .npy, .npz; counts: the same, or a "
        "vector; table: rows [N, D] in any format of compress; tree: integer labels [N, levels] in .npy or .npz",
    )
    parser.add_argument("--out", required=True, metavar="NPZ", help="file to write the order to")
    parser.add_argument(
        "--method", choices=tuple(_METHODS), default="interactions", help="default: interactions"
    )
    parser.add_argument(
        "--column",
        type=int,
        choices=(0, 1),
        default=1,
        help="position of the ids in a line: 1, after the first number (default), or 0, the first number",
    )
    parser.add_argument(
        "--num-embeddings", type=positive, metavar="N", help="default: largest id + 1"
    )
    parser.add_argument(
        "--row-factors",
        type=integers,
        metavar="P1,P2,...",
        help="row factors of the table; default: suggested for N",
    )
    parser.add_argument("--name", help="array in the file")
    add_seed(parser)
    add_common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if not args.out.endswith(".npz"):
        raise FileError(f"--out: got {args.out}; expected a name that ends with .npz.")
    _pictures.check_outputs(args, (args.input,))
    order, factors, draw = _METHODS[args.method](args)
    write_order(args.out, order, factors, args.force)
    by = "" if factors is None else f", for rows of {' x '.join(map(str, factors))}"
    print(f"order of {order.num_embeddings:,} ids by {args.method}{by}: wrote {args.out}")
    _pictures.figure(args, 2, draw)


# An order, the row factors that it is for, and what draws it.
_Made = tuple[IdOrder, tuple[int, ...] | None, Callable[[Any], None]]


def _by_interactions(args: argparse.Namespace) -> _Made:
    pairs = Interactions(args.input, args.column, args.name, args.progress)
    counts = pairs.counts()
    shape = _shape(args, len(counts))
    order = from_interactions(pairs, shape, seed=args.seed, progress=args.progress)
    print(f"{counts.sum():,} interactions with {np.count_nonzero(counts):,} ids")
    return (
        order,
        shape.row_factors,
        lambda axes: _pictures.draw_together(axes, next(iter(pairs())), order),
    )


def _by_counts(args: argparse.Namespace) -> _Made:
    counts = None
    if args.input.endswith((".npy", ".npz")):
        arrays = open_arrays(args.input).arrays
        if any(len(array.shape) == 1 for array in arrays.values()):
            counts = read_numbers(args.input, args.name)
    if counts is None:
        counts = Interactions(args.input, args.column, args.name, args.progress).counts()
    count = args.num_embeddings or len(counts)
    _check_count(count, len(counts))
    counts = np.pad(counts, (0, count - len(counts)))
    order = from_counts(counts)
    return order, None, lambda axes: _pictures.draw_counts(axes, counts, order)


def _by_table(args: argparse.Namespace) -> _Made:
    table = np.asarray(read_table(args.input, args.name)[1])
    shape = _shape(args, *table.shape)
    order = from_table(table, shape, seed=args.seed, progress=args.progress)
    return order, shape.row_factors, lambda axes: _pictures.draw_rows(axes, table, order)


def _by_tree(args: argparse.Namespace) -> _Made:
    labels = read_integers(args.input, args.name, 2)
    shape = _shape(args, len(labels))
    order = from_tree(labels, shape)
    return order, shape.row_factors, lambda axes: _pictures.draw_rows(axes, labels, order)


_METHODS = {
    "interactions": _by_interactions,
    "counts": _by_counts,
    "table": _by_table,
    "tree": _by_tree,
}


def _shape(args: argparse.Namespace, seen: int, features: int = _FEATURES) -> TTShape:
    """A shape with the row factors; an order knows nothing of columns."""
    count = args.num_embeddings or seen
    _check_count(count, seen)
    factors = args.row_factors or TTShape.suggest(count, features).row_factors
    return TTShape(count, 1, 1, factors, (1,) * len(factors))


def _check_count(count: int, seen: int) -> None:
    if count < seen:
        expected = f"at least {seen}, as the file holds the id {seen - 1}"
        raise mismatch("--num-embeddings", count, expected, error=FileError)
