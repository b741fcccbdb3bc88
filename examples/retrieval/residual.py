"""Sums of TT tables, each in an order of its own, which start from the rows of a trained table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt

ORDER_SHARE = 0.4  # of the bytes of a table for orders, about; on held-out items, half or twice as much was no better


class ResidualTT(nnx.Module):
    """TT tables of two cores whose rows are added up, of which each holds what those before it leave of some rows.

    Args:
        start: the rows [rows, features].
        ratio: float32 bytes of the rows over bytes of the cores and of the orders of ids, at least.
        dtype: storage type of the cores.
        optimizer: fused one of `jax_tt.optimizers`.
    """

    def __init__(
        self, start: np.ndarray, *, ratio: float, dtype: str, optimizer: Any, rngs: nnx.Rngs
    ):
        shapes = shapes_within(*start.shape, ratio, jnp.dtype(dtype).itemsize)
        terms = jax_tt.tt_residuals(start, shapes, dtype=dtype, progress=False)
        self.terms = nnx.List([self._layer(term, dtype, optimizer, rngs) for term in terms])

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        first, *others = self.terms
        return sum((term(ids) for term in others), first(ids))

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


def shapes_within(rows: int, features: int, ratio: float, itemsize: int) -> list[jax_tt.TTShape]:
    """A shape for each term: two cores, [p_1, 1, features, r] and [p_2, r, 1, 1], of nearly equal ranks.

    Raises:
        ValueError: an order and cores of rank 1 take more than the ratio allows.
    """
    budget, order = rows * features * 4 / ratio, order_bytes(rows)
    p = jax_tt.TTShape.suggest(rows, features, 1, d=2).row_factors
    of_rank = (p[0] * features + p[1]) * itemsize
    terms = max(1, round(ORDER_SHARE * budget / order))
    while terms > 1 and budget - terms * order < terms * of_rank:
        terms -= 1
    ranks = int((budget - terms * order) // of_rank)
    if ranks < 1:
        raise ValueError(
            f"ratio: got {ratio:g} for tt_residual, but an order and cores of rank 1 for {rows} rows take "
            f"{order + of_rank:,} bytes; expected a smaller ratio."
        )
    by_term = [ranks // terms + (k < ranks % terms) for k in range(terms)]
    return [jax_tt.TTShape(rows, features, rank, p, (features, 1)) for rank in by_term]


def order_bytes(rows: int) -> int:
    """Bytes of an order of so many ids."""
    return jax_tt.order.IdOrder.identity(rows).rows.nbytes
