"""Tables of tables."""
