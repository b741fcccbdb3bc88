"""Operations on dense arrays, and fused operations that update their table in the backward pass.

They take arrays in place of a `Table` and its state: an array ``[N, D]``, or a `Fused` record of parameters and
optimizer state. `jax_tt.tt` has the same for tensor trains.

>>> import jax, jax.numpy as jnp, jax_tt
>>> rule = jax_tt.optimizers.SGD(0.5)
>>> table = jax_tt.functional.init_fused(jnp.zeros((4, 1)), rule)
>>> bags = jax_tt.Bags.from_ragged([[1, 1], [3]])
>>> def loss(table):
...     return jax_tt.functional.fused_embed_bag(table, bags, rule).sum()
>>> jax.grad(loss)(table).cores[0].ravel().tolist()
[0.0, -1.0, 0.0, -0.5]
"""

from jax_tt._ops.arrays import count_out_of_range as count_out_of_range
from jax_tt._ops.arrays import embed_bag as embed_bag
from jax_tt._ops.arrays import fused_embed_bag as fused_embed_bag
from jax_tt._ops.fused_table import Fused as Fused
from jax_tt._ops.fused_table import init_fused as init_fused
