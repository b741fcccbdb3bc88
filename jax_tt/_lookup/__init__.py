"""Lookups of any table: from what users pass to sums, their differentiation rule, and the public functions."""
