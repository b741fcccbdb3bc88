"""One op per file; the public names are re-exported by `jax_tt`."""
