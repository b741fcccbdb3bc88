"""Tables of 64-bit keys."""
