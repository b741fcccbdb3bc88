"""The same work done by jax_tt and by the peers, one per file; each function returns a callable of i."""
