"""The contract of all kinds of tables, with defaults in plain JAX."""
