"""DLRM in Flax NNX: bottom MLP, embedding tables, dot products of all pairs, top MLP."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.dlrm.batch import NUM_DENSE
from examples.dlrm.mlp import MLP


class DLRM(nnx.Module):
    """Click-through model: the features are the dot products of all pairs of embeddings.

    Args:
      tables: the tables of T categorical features, int32 [B, L] -> [B, T, D].
      num_tables: T.
      features: D, the width of every table.
      bottom: hidden widths of the MLP that turns the numeric features into one more vector of D.
      top: hidden widths of the MLP that turns all dot products into one log-odds.
    """

    def __init__(
        self,
        tables: nnx.Module,
        num_tables: int,
        features: int,
        bottom: Sequence[int],
        top: Sequence[int],
        *,
        rngs: nnx.Rngs,
    ):
        vectors = num_tables + 1
        self.tables = tables
        self.bottom = MLP([NUM_DENSE, *bottom, features], rngs=rngs)
        self.top = MLP([features + vectors * (vectors - 1) // 2, *top, 1], rngs=rngs)

    def __call__(self, dense: jax.Array, ids: jax.Array) -> jax.Array:
        """Log-odds of a click [B] from dense [B, NUM_DENSE] and ids [B, L]."""
        x = jax.nn.relu(self.bottom(dense))
        vectors = jnp.concatenate([x[:, None], self.tables(ids)], axis=1)
        products = jnp.einsum("bsd,btd->bst", vectors, vectors)
        s, t = np.tril_indices(vectors.shape[1], -1)  # each pair once
        return self.top(jnp.concatenate([x, products[:, s, t]], axis=1))[:, 0]
