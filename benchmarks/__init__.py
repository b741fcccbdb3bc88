"""Times jax_tt against its peers; see README.md in this folder."""
