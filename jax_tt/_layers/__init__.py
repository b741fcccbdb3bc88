"""What the NNX and linen layers share: argument checks, fused variables, calls into the ops."""

from jax_tt._requires import require

require("flax", "jax_tt.nnx and jax_tt.linen", "flax")
