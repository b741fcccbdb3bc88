"""``python -m jax_tt``: the program ``jax-tt``."""

import sys

from jax_tt.cli.__main__ import program

if __name__ == "__main__":
    sys.exit(program())
