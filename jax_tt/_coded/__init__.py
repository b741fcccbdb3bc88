"""Tables whose rows are entries of codebooks."""
