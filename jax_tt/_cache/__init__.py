"""The row cache: a set-associative store of uncompressed hot rows in front of a tensor-train table.

`directory` says which row is in which slot and how hot it is; `reference` holds the policy in plain JAX and `backend`
chooses between it and the native ops.
"""
