"""Layers of Flax linen."""
