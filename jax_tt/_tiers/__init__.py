"""Rows beyond the memory of the device: in host memory, and on disk."""
