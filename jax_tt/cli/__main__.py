"""``python -m jax_tt.cli``."""

import sys

from jax_tt.cli.main import main

sys.exit(main())
