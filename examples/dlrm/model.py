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
        return self.top(jnp.concatenate([x, dot_products(vectors)], axis=1))[:, 0]


@jax.custom_vjp
def dot_products(vectors: jax.Array) -> jax.Array:
    """Dot products [B, V (V - 1) / 2] of all pairs of vectors [B, V, D].

    Its derivative is written by hand: that of choosing each pair once would be a scatter, which takes XLA longer on a
    CPU than all products.
    """
    return _forward(vectors)[0]


def _forward(vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, count, _ = vectors.shape
    s, t = np.tril_indices(count, -1)  # each pair once
    products = vectors @ vectors.swapaxes(1, 2)
    return products.reshape(batch, -1)[:, s * count + t], vectors


def _backward(vectors: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    batch, count, _ = vectors.shape
    s, t = np.tril_indices(count, -1)
    place = np.full(
        (count, count), g.shape[1]
    )  # of a pair in g; that of the diagonal is a column of zeros
    place[s, t] = place[t, s] = np.arange(len(s))
    g = jnp.pad(g, ((0, 0), (0, 1)))
    return (g[:, place.reshape(-1)].reshape(batch, count, count) @ vectors,)


dot_products.defvjp(_forward, _backward)
