"""Values of command-line arguments, and arguments that several commands have."""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kKMGT]?)(?P<binary>i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def byte_size(text: str) -> int:
    """Bytes of ``500000``, ``1.5MB`` (decimal) or ``2GiB`` (binary)."""
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match and not (match["binary"] and not match["unit"]):
        size = int(
            float(match["number"]) * (1024 if match["binary"] else 1000) ** _POWERS[match["unit"]]
        )
    if size < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected bytes, e.g. 500000, 1.5MB, 2GiB")
    return size


def integers(text: str) -> tuple[int, ...]:
    """Positive integers, separated by commas or ``x``."""
    try:
        values = tuple(int(part) for part in re.split(r"[,x]", text))
    except ValueError:
        values = (0,)
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected integers >= 1, e.g. 200,220,250")
    return values


def positive(text: str) -> int:
    (*more, value) = integers(text)
    if more:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected one integer >= 1")
    return value


def add_common(parser: argparse.ArgumentParser) -> None:
    """``--picture``, ``--force`` and ``--no-progress``, of commands that write files."""
    parser.add_argument("--picture", metavar="PNG", help="draw the result to this file")
    parser.add_argument(
        "--force", action="store_true", help="replace existing outputs, but never an input"
    )
    add_progress(parser)


def add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-progress", dest="progress", action="store_false", help="no progress bars"
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the randomised parts; default: 0"
    )
