"""``jax-tt plan``: which tables become what, within a budget."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_tt import optimizers
from jax_tt._base.arguments import expect
from jax_tt._files.tables import read_table
from jax_tt._formats.mapped import open_arrays
from jax_tt._formats.stored import FileError, whole_file
from jax_tt._planning.bandwidths import Bandwidths
from jax_tt._planning.candidates import SMALL
from jax_tt._planning.plan import plan
from jax_tt.cli._arguments import add_progress, add_seed, byte_size, positive
from jax_tt.cli._inputs import Interactions
from jax_tt.cli._pictures import check_picture, draw_devices, figure
from jax_tt.order import spectral_rows

_RULES = {
    "none": None,
    "sgd": optimizers.SGD(0.1),
    "rowwise_adagrad": optimizers.RowWiseAdagrad(0.1),
    "adagrad": optimizers.Adagrad(0.1),
    "adam": optimizers.Adam(0.1),
}
_SIZES, _FILE = {"num_embeddings", "features"}, {"file", "name"}
_SPECTRAL = _SIZES | {"interactions"}
_LARGEST_TEXT = 1 << 24
_SAMPLE = 1 << 24  # ids of a sample that are used


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="divide a budget among tables",
        description="Chooses for every table whether it is dense, a tensor train or a low-rank product, and its size. "
        "Trained tables may become tables of other kinds of compress, too.",
    )
    parser.add_argument(
        "--tables",
        required=True,
        metavar="JSON|TOML",
        help="tables by name: {num_embeddings, features}, with {interactions} if there are some (and the {column} of "
        "the ids, 1 or 0), or {file} of a trained table (and {name} of the array)",
    )
    parser.add_argument(
        "--budget",
        type=byte_size,
        metavar="SIZE",
        help="e.g. 500MB or 2GiB; without it all tables are dense, which takes --devices",
    )
    parser.add_argument(
        "--ids",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="samples of ids for row caches: integers in .npy, .npz, or interactions as for order",
    )
    add_seed(parser)
    parser.add_argument(
        "--kinds",
        nargs="*",
        choices=SMALL,
        help="kinds of compress that trained tables may become, too; default: all, and none after --kinds alone",
    )
    _add_devices(parser)
    add_progress(parser)
    parser.set_defaults(run=run)


def _add_devices(parser: Any) -> None:
    group = parser.add_argument_group("several devices")
    group.add_argument(
        "--devices", type=positive, metavar="N", help="also place the tables on so many devices"
    )
    group.add_argument(
        "--steps", type=positive, default=1, help="batches in each sample of --ids; default: 1"
    )
    group.add_argument(
        "--optimizer",
        choices=sorted(_RULES),
        default="rowwise_adagrad",
        help="whose state is beside the rows; default: rowwise_adagrad",
    )
    group.add_argument(
        "--device-memory", type=byte_size, metavar="SIZE", help="for tables and messages"
    )
    group.add_argument(
        "--bandwidths",
        metavar="JSON",
        help="what jax-tt measure has written; default: round numbers",
    )
    group.add_argument(
        "--picture", metavar="PNG", help="draw the pages on the devices to this file"
    )
    group.add_argument("--force", action="store_true", help="replace an existing picture")


def run(args: argparse.Namespace) -> None:
    if args.devices is None and args.picture is not None:
        raise FileError("--picture: shows pages on devices; expected --devices N beside it.")
    check_picture(args, [args.tables, args.bandwidths])
    described = _described(args.tables)
    folder = Path(args.tables).parent
    tables = {name: _table(name, entry, folder, args) for name, entry in described.items()}
    samples = {}
    for pair in args.ids:
        name, sign, path = pair.partition("=")
        if not sign or name not in tables:
            raise FileError(f"--ids: got {pair!r}; expected NAME=FILE with a name of --tables.")
        samples[name] = _sample(path, args.progress)
    on_devices: dict[str, Any] = {}
    if args.devices is not None:
        on_devices = {
            "devices": args.devices,
            "steps": args.steps,
            "optimizer": _RULES[args.optimizer],
            "device_bytes": args.device_memory,
            "bandwidths": None if args.bandwidths is None else Bandwidths.load(args.bandwidths),
        }
    planned = plan(
        tables,
        args.budget,
        samples,
        seed=args.seed,
        progress=args.progress,
        kinds=args.kinds,
        **on_devices,
    )
    print(planned)
    placements = planned.placements
    if placements is not None:
        figure(args, 1, lambda axes: draw_devices(axes[0], placements))


def _described(path: str) -> Mapping[str, Any]:
    name = whole_file(path)
    readers = {".json": json.loads, ".toml": tomllib.loads}
    suffix = Path(name).suffix.lower()
    expect(suffix in readers, "--tables", name, "a file .json or .toml", error=FileError)
    if Path(name).stat().st_size > _LARGEST_TEXT:
        raise FileError(f"--tables: {name} is larger than {_LARGEST_TEXT:,} bytes.")
    try:
        described = readers[suffix](Path(name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"--tables: {name} is damaged ({error}).") from error
    if not isinstance(described, Mapping) or not described:
        raise FileError(f"--tables: {name} holds no object of tables.")
    return described


def _table(name: str, entry: Any, folder: Path, args: argparse.Namespace) -> Any:
    """Sizes, rows of interactions, or the array of a file; paths are relative to that of ``--tables``."""
    keys = set(entry) if isinstance(entry, Mapping) else None
    if keys == _SIZES:
        return entry["num_embeddings"], entry["features"]
    if keys and _SPECTRAL <= keys <= _SPECTRAL | {"column"}:
        path, column = str(folder / str(entry["interactions"])), entry.get("column", 1)
        if column not in (0, 1):
            raise FileError(f"--tables: {name} has column {column!r}; expected 1 or 0.")
        pairs = Interactions(path, column, None, args.progress)
        options = {"seed": args.seed, "progress": args.progress}
        return spectral_rows(pairs, entry["num_embeddings"], entry["features"], **options)[1]
    if keys and "file" in keys <= _FILE and all(isinstance(x, str) for x in entry.values()):
        return read_table(str(folder / entry["file"]), entry.get("name"))[1]
    raise FileError(
        f"--tables: {name} is {str(entry)[:80]}; expected num_embeddings and features, with or without interactions, "
        "or file and, where it holds several arrays, name."
    )


def _sample(path: str, progress: bool) -> np.ndarray:
    """The first ids of a file."""
    if path.endswith((".npy", ".npz")):
        arrays = open_arrays(path).arrays
        if len(arrays) != 1:
            raise FileError(f"--ids: {path} holds {len(arrays)} arrays; expected one, of integers.")
        (array,) = arrays.values()
        if array.dtype.kind not in "iu":
            raise FileError(f"--ids: {path} holds {array.dtype}; expected integers.")
        return np.asarray(array.by_rows()).reshape(-1)[:_SAMPLE]
    parts, total = [], 0
    for _, ids in Interactions(path, 1, None, progress)():
        parts.append(ids)
        total += len(ids)
        if total >= _SAMPLE:
            break
    return np.concatenate(parts)[:_SAMPLE] if parts else np.zeros(0, np.int64)
