"""Lookups in any table: canonical batches, pooled sums and their differentiation rule, and the public functions."""
