"""`tt.to_dense`: the whole table."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._base.arguments import as_dtype
from jax_tt._base.environment import resolve_method
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._table.whole import to_dense


def tt_to_dense(
    cores: Sequence[jax.Array],
    num_embeddings: int | None = None,
    *,
    dtype: Any = None,
    method: str = "auto",
) -> jax.Array:
    """The dense table that the cores represent.

    Args:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        num_embeddings: rows to keep; default all that the cores address.
        dtype: type of the result; default that of the cores.
        method: checked for validity only; all methods are the same matrix products in XLA.

    Returns:
        ``[N, D]``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> jax_tt.tt.to_dense(jax_tt.tt.init(jax.random.key(0), shape), 1000).shape
    (1000, 8)
    """
    resolve_method(method)
    table, cores = TTTable.of(cores, num_embeddings)
    state = table.spec.named(cores)
    return to_dense(table, state).astype(as_dtype("dtype", dtype, cores[0].dtype))
