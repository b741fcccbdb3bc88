"""Calls of the native operations, shared by kinds."""
