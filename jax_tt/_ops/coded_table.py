"""`coded_table`: descriptions of coded tables, whose codebooks are a dense table or a tensor train."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jax_tt._base.keywords import checks_keywords
from jax_tt._kinds.coded.layout import CodeLayout
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._native.native import NativeTable
from jax_tt._ops.describe import update_of
from jax_tt._table.initial_rows import NormalRows
from jax_tt._table.options import Update
from jax_tt._tt.initial_cores import ScaledCores
from jax_tt._tt.shape import TTShape
from jax_tt.optimizers import Optimizer


@checks_keywords
def coded_table(
    num_embeddings: int,
    features: int,
    num_codes: int,
    bits: int = 8,
    *,
    kind: str = "product",
    terms: int = 1,
    hot: int = 0,
    hot_terms: int = 0,
    rotated: bool = False,
    codebook_shape: TTShape | None = None,
    codebook_init: Callable[..., Any] | None = None,
    param_dtype: Any = jnp.float32,
    optimizer: Optimizer | None = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    name: str | None = None,
) -> CodedTable:
    """The description of a table of codes, which are random at first; `encode` makes one of trained rows.

    Args:
        num_embeddings, features, num_codes, bits, kind, terms, hot, hot_terms, rotated: as in `CodedTable`.
        codebook_shape: `TTShape` of the rows of all codebooks, which are then a tensor train; None for dense codebooks.
        codebook_init: initialiser ``(key, shape, dtype) -> codebooks``, or of each core; None for rows of about unit
            length.
        param_dtype: type of the codebooks.
        optimizer, skip_nonfinite, stochastic_rounding, max_gradient, name: as in `EmbedBag`.

    Returns:
        `CodedTable`.

    >>> import jax_tt
    >>> table = jax_tt.coded_table(1000, 16, num_codes=4, optimizer=jax_tt.optimizers.Adagrad(0.05))
    >>> table.row_bytes, table.spec.param_shapes
    (4, {'codebooks': (1024, 4)})
    """
    layout = CodeLayout(
        num_embeddings, features, num_codes, bits, kind, rotated, terms, hot, hot_terms, name
    )
    update = update_of(optimizer, skip_nonfinite, stochastic_rounding, max_gradient)
    return with_codebooks(layout, codebook_shape, codebook_init, param_dtype, update)


def with_codebooks(
    layout: CodeLayout,
    codebook_shape: TTShape | None = None,
    codebook_init: Callable[..., Any] | None = None,
    param_dtype: Any = jnp.float32,
    update: Update | None = None,
) -> CodedTable:
    """The table of a layout; the other arguments are those of `coded_table`."""
    shape = layout.num_entries, layout.width
    # The sum of m rows is as long as the concatenation of m rows of their columns.
    deviation = 1 / math.sqrt(layout.width * layout.num_codes)
    codebooks: NativeTable
    if codebook_shape is None:
        init = codebook_init or NormalRows(deviation)
        codebooks = DenseTable(*shape, param_dtype, update, embedding_init=init)
    elif isinstance(codebook_shape, TTShape):
        # The default cores of a tensor train are for rows of the variance 1 / (3 N).
        scale = (deviation * math.sqrt(3 * layout.num_entries)) ** (1 / codebook_shape.d)
        init = codebook_init or ScaledCores(scale)
        fields: dict[str, Any] = {"param_dtype": param_dtype, "update": update}
        codebooks = TTTable.of_shape(codebook_shape, **fields, core_init=init)
    else:
        raise TypeError(
            f"{layout.label}codebook_shape: got {codebook_shape!r}; expected a TTShape of the rows of all codebooks, "
            f"jax_tt.TTShape.suggest({shape[0]}, {shape[1]}, ranks), or None."
        )
    return CodedTable(**dataclasses.asdict(layout), codebooks=codebooks)
