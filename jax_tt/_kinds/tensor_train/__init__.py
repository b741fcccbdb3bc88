"""Tensor-train tables."""
