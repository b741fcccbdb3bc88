"""The kinds of tables, a folder each."""
