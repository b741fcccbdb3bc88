"""The command line ``jax-tt``: orders, compression, plans, and what a file holds."""

from jax_tt.cli.main import main as main
