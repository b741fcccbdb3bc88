"""Which tables are tensor trains, and how large, so that all fit into a budget."""
