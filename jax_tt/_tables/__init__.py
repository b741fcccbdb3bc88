"""Kinds of tables: what a table is made of, how its rows are read, and how its parameters are trained.

`table` holds the contract with defaults in pure JAX, `native` what kinds with native ops share. Everything else in the
package works on any `Table`; to add a kind, add a file here.
"""
