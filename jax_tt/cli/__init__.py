"""The command line ``jax-tt``: orders, compression, plans, and the contents of files."""

from jax_tt.cli.main import main as main
