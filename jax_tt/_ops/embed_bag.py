"""`tt.embed_bag`: pooled rows of a tensor-train table."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._ids.bags import Bags
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._lookup.calls import pooled_rows
from jax_tt._table.options import Lookup


def tt_embed_bag(
    cores: Sequence[jax.Array],
    bags: Bags | Any,
    *,
    combiner: str = "sum",
    num_embeddings: int | None = None,
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """One vector per bag: the sum, the mean, ``sqrtn`` or the maximum of its rows.

    Args:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
        combiner: ``"sum"``; ``"mean"`` divides by the sum of the weights, ``"sqrtn"`` by the root of the sum of their
            squares (the count and its root without weights), ``"mean_count"`` always by the count. A zero divisor
            gives 0. ``"max"`` is the maximum of each column and takes no weights; its gradient goes to the first id of
            the bag with the maximum.
        num_embeddings, bounds, dtype, method, axis_name, name, precision: as in `tt.lookup`.

    Returns:
        ``[B, D]``; an empty bag is 0. Differentiable in the cores and in ``bags.weights``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> bags = jax_tt.Bags.from_ragged([[1, 2, 3], [], [4]])
    >>> jax_tt.tt.embed_bag(cores, bags, combiner="mean", method="reference").shape
    (3, 8)
    """
    lookup = Lookup(combiner, bounds, dtype, precision, method, axis_name)
    table, cores = TTTable.of(cores, num_embeddings, name=name)
    state = table.spec.named(cores)
    return pooled_rows(table, state, bags, lookup)[0]
