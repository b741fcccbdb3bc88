"""``jax-tt measure``: the constants by which placements on devices are planned."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any

import jax

from jax_tt._base.arguments import mismatch
from jax_tt._formats.output import check_output
from jax_tt._formats.stored import FileError
from jax_tt._planning.bandwidths import measure_bandwidths
from jax_tt.cli._arguments import add_progress, positive


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "measure",
        help="measure the devices, for plan --devices",
        description="Measures what devices exchange, read and step per second, all of them working at the same time.",
    )
    parser.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="default: all; as many as asked for where JAX runs on the CPU",
    )
    parser.add_argument("--out", required=True, metavar="JSON", help="for plan --bandwidths")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    add_progress(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_output(args.out, overwrite=args.force)
    if args.devices is not None:
        with contextlib.suppress(RuntimeError):  # JAX has started, and has the devices that it has
            jax.config.update("jax_num_cpu_devices", args.devices)
    count = jax.device_count() if args.devices is None else args.devices
    if args.devices is None and count < 2:
        got = f"none, and there is one device of {jax.default_backend()}"
        fix = "On a CPU, --devices N makes N devices."
        raise mismatch("--devices", got, "two or more", fix, error=FileError)
    if not 2 <= count <= jax.device_count():
        expected = f"2 to {jax.device_count()}, the devices of {jax.default_backend()}"
        raise mismatch("--devices", count, expected, error=FileError)
    mesh = jax.make_mesh((count,), ("devices",), devices=jax.devices()[:count])
    bandwidths = measure_bandwidths(mesh, "devices", progress=args.progress)
    for name, value in dataclasses.asdict(bandwidths).items():
        print(f"{name:16} {value if isinstance(value, str) else format(value, '.3g')}")
    bandwidths.save(args.out, overwrite=args.force)
