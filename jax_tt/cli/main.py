"""`main`: runs a command and reports errors in one line."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

import jax_tt
from jax_tt._formats.output import OVERWRITE
from jax_tt.cli import compress, info, measure, order, plan

_COMMANDS = (order, compress, plan, measure, info)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``jax-tt``.

    Args:
        argv: arguments without the name of the program; by default those of the process.

    Returns:
        The exit status: 0, or 2 for an invalid file or argument, which is reported in one line on stderr.

    >>> import jax_tt.cli, numpy as np, os, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> table, out = os.path.join(folder, "table.npy"), os.path.join(folder, "table.safetensors")
    >>> np.save(table, np.ones((1000, 8), np.float32))
    >>> jax_tt.cli.main(["compress", table, "--out", out, "--ranks", "1", "--no-progress"])  # doctest: +ELLIPSIS
    TTShape 1,000 x 8: ...
    0
    """
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            # Of numpy, of numbers that are refused a moment later.
            warnings.simplefilter("ignore", RuntimeWarning)
            arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except MemoryError as error:
        return _failed(f"out of memory ({error})")
    # The library's own errors name the argument and the fix; they are the user's to read, not a traceback.
    except (ValueError, TypeError, OSError, ImportError) as error:
        return _failed(str(error))
    return 0


def _failed(message: str) -> int:
    words = " ".join(message.split()).replace(OVERWRITE, "--force")
    print(f"jax-tt: error: {words}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jax-tt",
        description="Tensor-train embedding tables: order ids, compress tables, plan sizes, inspect files.",
    )
    parser.add_argument("--version", action="version", version=f"jax-tt {jax_tt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
