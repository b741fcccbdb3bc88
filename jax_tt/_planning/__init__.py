"""Choices of tables, sizes and devices."""
