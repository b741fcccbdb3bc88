"""Quantized tables."""
