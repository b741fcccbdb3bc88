"""The NNX and linen layers: constructors of tables, variables of their states, and optimizers."""

from jax_tt._requires import require

require("flax", "jax_tt.nnx and jax_tt.linen", "flax")
