"""Algebra of tensor-train tables: from dense tables, sums, products, norms, rounding, least squares."""
