"""`tt.residual_shapes`: the shapes of a sum of tensor trains of a given size."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_tt._base.arguments import as_dtype, as_positive, mismatch
from jax_tt._ids.stored_order import kept_bytes
from jax_tt._tt.shape import TTShape

# Of the bytes for orders, about: on tables trained for retrieval 0.4 and 0.6 are as good.
_ORDERS = 0.5


def tt_residual_shapes(
    num_embeddings: int, features: int, max_bytes: int, *, dtype: Any = jnp.float32
) -> tuple[TTShape, ...]:
    """Shapes for `tt.residuals` whose cores and orders of ids take at most ``max_bytes``.

    About half of the bytes are used for orders, one per term, and the rest for the cores. The terms are tensor trains
    of two cores with the columns in the first one: the rows of ids that share a first digit are combinations of vectors
    that belong to this digit alone.

    Args:
        num_embeddings, features: N and D of the table.
        max_bytes: of the sum, including an order of `IdOrder.nbytes` for each term.
        dtype: storage type of the cores.

    Returns:
        At least one `TTShape`, the largest ranks first.

    Raises:
        ValueError: an order and cores of rank 1 already exceed ``max_bytes``, or a size is not positive.

    >>> import jax_tt, jax.numpy as jnp
    >>> shapes = jax_tt.tt.residual_shapes(50_000, 64, 1_280_000, dtype=jnp.bfloat16)  # 10 times smaller than float32
    >>> [shape.ranks for shape in shapes]
    [(4,), (4,), (4,), (4,), (4,), (3,)]
    """
    rows, columns = as_positive("num_embeddings", num_embeddings), as_positive("features", features)
    budget = as_positive("max_bytes", max_bytes)
    order, (p, of_rank) = kept_bytes(rows), _of_rank(rows, columns, dtype)
    least = order + of_rank
    if budget < least:
        expected = f"at least {least:,} bytes, for an order and cores of rank 1"
        raise mismatch("max_bytes", f"{budget:,} bytes for {rows} x {columns}", expected)
    full = min(p[0] * columns, p[1])
    if budget >= order + full * of_rank:  # one term is the whole table
        return (TTShape(rows, columns, full, p, (columns, 1)),)
    terms = max(1, round(_ORDERS * budget / order))
    while terms > 1 and budget - terms * order < terms * of_rank:
        terms -= 1
    ranks = (budget - terms * order) // of_rank
    return tuple(
        TTShape(rows, columns, ranks // terms + (k < ranks % terms), p, (columns, 1))
        for k in range(terms)
    )


def least_residual_bytes(num_embeddings: int, features: int, dtype: Any) -> int:
    """The fewest bytes that `tt_residual_shapes` has shapes for: an order and cores of rank 1."""
    return kept_bytes(num_embeddings) + _of_rank(num_embeddings, features, dtype)[1]


def _of_rank(rows: int, columns: int, dtype: Any) -> tuple[tuple[int, ...], int]:
    """The row factors of a term, and the bytes of its cores for each rank."""
    p = TTShape.suggest(rows, columns, 1, d=2).row_factors
    return p, (p[0] * columns + p[1]) * as_dtype("dtype", dtype, jnp.float32).itemsize
