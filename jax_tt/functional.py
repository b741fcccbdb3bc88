"""Operations on dense arrays, in place of a `Table` and its state; `jax_tt.tt` has those on tensor trains.

They have no optimizer: a table that is updated in the backward pass is one of `dense_table` or `tt_table`.

>>> import jax.numpy as jnp, jax_tt
>>> bags = jax_tt.Bags.from_ragged([[0, 0], [2]])
>>> jax_tt.functional.embed_bag(jnp.arange(3.0)[:, None] + 1, bags).ravel().tolist()
[2.0, 3.0]
"""

from jax_tt._ops.arrays import count_out_of_range as count_out_of_range
from jax_tt._ops.arrays import embed_bag as embed_bag
