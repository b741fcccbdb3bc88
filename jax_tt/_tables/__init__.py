"""Kinds of tables: their parameters, how rows are read, and how parameters are trained.

`table` has the interface with defaults in pure JAX, `native` the base class of kinds with native ops. Everything else
in the package works on any `Table`; to add a kind, add a file here.
"""
