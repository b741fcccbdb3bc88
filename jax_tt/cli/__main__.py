"""``python -m jax_tt.cli``, and the program ``jax-tt``."""

import logging
import sys
from typing import Any

from jax_tt.cli.main import main


def program() -> int:
    """`main` as a program."""
    quieten_orbax()
    return main()


def quieten_orbax() -> None:
    """Leaves one error of a damaged checkpoint: arrays are read at once, and the errors of the others arrive later."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    others = sys.unraisablehook

    def hook(error: Any) -> None:
        if "Event loop is closed" not in str(error.exc_value):
            others(error)

    sys.unraisablehook = hook


if __name__ == "__main__":
    sys.exit(program())
