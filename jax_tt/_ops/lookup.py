"""`tt.lookup`: rows of a tensor-train table."""

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._lookup.calls import lookup_rows
from jax_tt._table.options import Lookup


def tt_lookup(
    cores: Sequence[jax.Array],
    ids: Any,
    *,
    num_embeddings: int | None = None,
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Rows of a tensor-train table, one per id.

    Args:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        ids: integers of any shape, or `SplitIds`.
        num_embeddings: number of valid rows; default all that the cores address.
        bounds: treatment of ids outside ``[0, num_embeddings)``: ``"error"`` raises on CPU (NaN from the
            reference), ``"clip"`` reads the nearest row, ``"zero"`` reads zeros, ``"warn"`` reads zeros with an
            `OutOfRangeWarning`, ``"unchecked"`` assumes that there are none.
        dtype: type of the result; default that of the cores. Sums are in float32 or better.
        method: ``"auto"``, ``"reference"`` (pure JAX) or ``"native"`` (native).
        axis_name: mesh axes to sum the cores' gradients over, inside a ``shard_map`` with ``check_vma=False``; with
            ``check_vma=True`` JAX does this itself.
        name: name of the table in error messages.
        precision: of float32 products on a GPU; default `jax.default_matmul_precision`, or full if that is not set.
            The native CPU kernels always compute in float32, or in float64 for float64 cores.

    Returns:
        ``[*ids.shape, D]``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> jax_tt.tt.lookup(cores, jax.numpy.array([[1, 2, 999]]), method="reference").shape
    (1, 3, 8)
    """
    lookup = Lookup("sum", bounds, dtype, precision, method, axis_name)
    table, cores = TTTable.of(cores, num_embeddings, name=name)
    state = table.spec.named(cores)
    return lookup_rows(table, state, ids, lookup)[0]
