"""Sums of TT tables with different orders of ids, which start from the rows of a trained table."""

from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from examples.retrieval.sizes import residual_shapes


class ResidualTT(nnx.Module):
    """TT tables of two cores whose rows are added; each starts from the remainder of given rows after those before it.

    Args:
        start: the rows [rows, features].
        ratio: float32 bytes of the rows over bytes of the cores and of the orders of ids, at least.
        dtype: storage type of the cores.
        optimizer: fused one of `jax_tt.optimizers`.
    """

    def __init__(
        self, start: np.ndarray, *, ratio: float, dtype: str, optimizer: Any, rngs: nnx.Rngs
    ):
        rows, features = start.shape
        shapes = residual_shapes(rows, features, ratio, dtype)
        terms = jax_tt.tt_residuals(start, shapes, dtype=dtype, progress=False)
        self.terms = nnx.List([self._layer(term, dtype, optimizer, rngs) for term in terms])

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        return reduce(add, (term(ids) for term in self.terms))

    def arrays(self) -> list[jax.Array]:
        """What is trained."""
        return [core for term in self.terms for core in jax.tree.leaves(term.cores)]

    @staticmethod
    def _layer(
        term: jax_tt.TTResidual, dtype: str, optimizer: Any, rngs: nnx.Rngs
    ) -> jax_tt.TTEmbed:
        layer = jax_tt.TTEmbed(
            **term.approximation.shape.layer_arguments(),
            param_dtype=jnp.dtype(dtype),
            dtype=jnp.float32,
            optimizer=optimizer,
            id_order=term.id_order,
            rngs=rngs,
        )
        for k, core in enumerate(term.approximation.cores):
            getattr(layer, f"core_{k}")[...] = core
        return layer
