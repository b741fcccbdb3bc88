"""The NNX and linen layers: table construction, variables of the table state, and optimizers."""

from jax_tt._base.installed import require

require("flax", "jax_tt.nnx and jax_tt.linen", "flax")
