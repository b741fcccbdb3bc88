"""``python -m jax_tt.cli``."""

import sys

from jax_tt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
