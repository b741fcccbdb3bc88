"""`tt_embed_bag`: pooled rows of a tensor-train table."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._arguments import as_dtype
from jax_tt._bags import Bags
from jax_tt._dtypes import accumulator
from jax_tt._ops._canonical import check_combiner, tt_table
from jax_tt._ops._combine import batch_to_sum, combine
from jax_tt._ops._dispatch import pooled_sum
from jax_tt._ops._inputs import bag_batch


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
            squares (the count and its root without weights), ``"mean_count"`` by the count, weights or not. A zero
            divisor gives 0. ``"max"`` is the maximum of each column and takes no weights; its gradient goes to the
            first id of the bag that holds the maximum.
        num_embeddings, bounds, dtype, method, axis_name, name, precision: as in `tt_lookup`.

    Returns:
        ``[B, D]``; an empty bag is 0. Differentiable in the cores and in ``bags.weights``.

    Raises:
        ValueError: an argument does not fit; the message names it and the fix.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.init_cores(jax.random.key(0), shape)
    >>> bags = jax_tt.Bags.from_ragged([[1, 2, 3], [], [4]])
    >>> jax_tt.tt_embed_bag(cores, bags, combiner="mean", method="reference").shape
    (3, 8)
    """
    check_combiner(combiner)
    spec, cores = tt_table(cores, num_embeddings, bounds, name, precision)
    spec, batch, count = bag_batch(spec, bags, accumulator(cores[0].dtype))
    result_type = as_dtype("dtype", dtype, cores[0].dtype)
    sums = pooled_sum(spec, cores, batch_to_sum(combiner, spec, batch), method, axis_name)
    result = combine(combiner, spec, batch, sums)
    return result.reshape(count, spec.features).astype(result_type)
