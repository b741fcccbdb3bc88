"""Tables of 64-bit keys: the directory of keys, initial rows, insertion, removal and growth."""
