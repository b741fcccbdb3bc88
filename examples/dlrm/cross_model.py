"""DLRM-DCNv2 in Flax NNX: a low-rank cross network takes the place of DLRM's dot products."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from examples.dlrm.batch import NUM_DENSE
from examples.dlrm.mlp import MLP


class CrossNetwork(nnx.Module):
    """Low-rank cross layers: ``x <- x_0 * (W V x + b) + x``, each with its own V, W and b.

    Args:
      width: of x.
      layers: their number.
      rank: rows of V and columns of W.
    """

    def __init__(self, width: int, layers: int, rank: int, *, rngs: nnx.Rngs):
        down = [nnx.Linear(width, rank, use_bias=False, rngs=rngs) for _ in range(layers)]
        self.down = nnx.List(down)
        self.up = nnx.List([nnx.Linear(rank, width, rngs=rngs) for _ in range(layers)])

    def __call__(self, first: jax.Array) -> jax.Array:
        x = first
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return x


class DCNv2(nnx.Module):
    """Click-through model: all embeddings side by side, crossed.

    Args:
      tables: the tables of T categorical features, int32 [B, L] -> [B, T, D].
      num_tables: T.
      features: D, the width of every table.
      bottom: hidden widths of the MLP that turns the numeric features into one more vector of D.
      top: hidden widths of the MLP that turns the crossed vectors into one log-odds.
      cross_layers, cross_rank: of the cross network.
    """

    def __init__(
        self,
        tables: nnx.Module,
        num_tables: int,
        features: int,
        bottom: Sequence[int],
        top: Sequence[int],
        cross_layers: int,
        cross_rank: int,
        *,
        rngs: nnx.Rngs,
    ):
        width = (num_tables + 1) * features
        self.tables = tables
        self.bottom = MLP([NUM_DENSE, *bottom, features], rngs=rngs)
        self.cross = CrossNetwork(width, cross_layers, cross_rank, rngs=rngs)
        self.top = MLP([width, *top, 1], rngs=rngs)

    def __call__(self, dense: jax.Array, ids: jax.Array) -> jax.Array:
        """Log-odds of a click [B] from dense [B, NUM_DENSE] and ids [B, L]."""
        x = jax.nn.relu(self.bottom(dense))
        vectors = self.tables(ids).reshape(len(ids), -1)
        return self.top(self.cross(jnp.concatenate([x, vectors], axis=1)))[:, 0]
