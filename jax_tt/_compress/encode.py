"""`encode`: codes and codebooks of trained rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_positive, mismatch
from jax_tt._base.progress import Progress
from jax_tt._base.rows_of_arrays import row_weights, sample_of
from jax_tt._compress.source import stored_rows, weighted_squares
from jax_tt._ids import places
from jax_tt._kinds.coded.assign import BLOCK, encoded_rows
from jax_tt._kinds.coded.codebooks import fit_codebooks
from jax_tt._kinds.coded.layout import CODEBOOKS, CODES, HOT_CODES, HOT_PLACES, CodeLayout
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._ops.describe import with_codebooks
from jax_tt._table.options import Update
from jax_tt._table.rotation import ROTATION, as_rotation
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.shape import TTShape
from jax_tt.order._table import from_table

# All codebooks of a sum are fitted together, which takes more rows than one of them.
_SUM_SAMPLE = 2**16


def encode(
    rows: Any,
    num_codes: int,
    bits: int = 8,
    *,
    kind: str = "product",
    weights: Any = None,
    rotation: Any = None,
    iterations: int = 20,
    sample: int | None = None,
    seed: int = 0,
    param_dtype: Any = jnp.float32,
    update: Update | None = None,
    name: str | None = None,
    terms: int = 1,
    hot: int = 0,
    hot_terms: int = 0,
    codebook_rank: int | None = None,
    progress: bool = True,
) -> tuple[CodedTable, dict[str, jax.Array]]:
    """Makes a `CodedTable` of trained rows, and its state.

    Codebooks are fitted to a sample of the rows, such that the weighted sum of squared errors is small; then the codes
    of every row are chosen. Rows are read in blocks on the host and may be a memory map. The result depends on the
    arguments alone.

    Args:
        rows: ``[N, D]`` in float32, float16, bfloat16 or float64, e.g. ``state["embedding"]`` of a `DenseTable`.
        num_codes: codes of an id.
        bits: bits of a code.
        kind: ``"product"``: codes give one part of the columns each, by k-means. ``"additive"``: rows are sums of
            codebook rows; codes and codebooks are improved in turn.
        weights: the importance of every row ``[N]``, not negative, e.g. the root of its count; None if they are equal.
        rotation: for products: ``"fit"`` fits an orthogonal matrix by which rows are multiplied in the end, so that
            errors are smaller; or such a matrix, ``[D, D]``; None for none.
        iterations: iterations of k-means, or rounds of codes and codebooks.
        sample: number of rows that codebooks are fitted to, drawn by weight; by default ``256 * 2 ** bits``, for sums
            at least 65,536.
        seed: seed of the sample and of the first codebooks.
        param_dtype: type of the codebooks.
        update: `Update` of a fused table, or None.
        name: for error messages.
        terms: codes of a product that are added in each part of the columns.
        hot: number of ids with more codes than the others: the ids of the rows with the largest weighted squares.
        hot_terms: how many more each part of these rows has.
        codebook_rank: keep all codebooks in one tensor train of two cores of this rank. Codebooks are fitted first and
            then compressed, so that errors are larger than with dense codebooks. None for dense codebooks.
        progress: show a progress bar if it takes longer than a second.

    Returns:
        The table and its state.

    Raises:
        ValueError: rows or weights are not finite.

    >>> import jax.numpy as jnp, jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    >>> table, state = jax_tt.encode(rows, num_codes=8, bits=4)
    >>> table.row_bytes, state["codes"].shape, state["codebooks"].shape
    (4, (1000, 4), (128, 2))
    """
    given = stored_rows(rows)
    n, features = map(int, given.shape)
    rotated = rotation is not None
    layout = CodeLayout(n, features, num_codes, bits, kind, rotated, terms, hot, hot_terms, name)
    shape = None
    if codebook_rank is not None:
        shape = _shape_of_rank(layout, as_positive("codebook_rank", codebook_rank))
    table = with_codebooks(layout, shape, param_dtype=param_dtype, update=update)
    if rotated and kind != "product":
        got = "one with kind='additive', whose errors do not depend on it"
        raise mismatch("rotation", got, "None")
    rng = np.random.default_rng(seed)
    size = max(256 << bits, _SUM_SAMPLE if layout.all_codes > layout.column_parts else 0)
    size = size if sample is None else as_positive("sample", sample)
    weights = row_weights(weights, n)
    weights = None if weights is None else weights / weights.max()
    ids, points, of_points = sample_of(f"{layout.label}rows", given, weights, size, rng)
    are_hot = _hot(given, weights, hot)
    with Progress(progress, "encode", 0) as bar:
        matrix = as_rotation(rotation, features, ("fit",))
        codebooks, matrix = fit_codebooks(
            layout, points, of_points, are_hot[ids], matrix, iterations, rng, bar
        )
        state = (
            {CODEBOOKS: jax.device_put(codebooks.astype(jnp.dtype(param_dtype)))}
            if shape is None
            else _train_of(layout, shape, codebooks, param_dtype)
        )
        if rotated:
            state[ROTATION] = jax.device_put(matrix)
        step = bar.begin("codes of rows", -(-n // BLOCK))
        books = table.codebook_rows(state) if CODEBOOKS not in state else state[CODEBOOKS]
        codes, of_hot = encoded_rows(layout, books, matrix, given, are_hot, step)
    state[CODES] = jax.device_put(codes)
    if hot:
        state[HOT_CODES] = jax.device_put(of_hot)
        state[HOT_PLACES] = jax.device_put(places.mark_members(are_hot))
    return table, table.init_rest(state) | state


def _hot(rows: Any, weights: np.ndarray | None, count: int) -> np.ndarray:
    """Which rows have the largest squares times weights, bool ``[N]``; the first of equal ones."""
    hot = np.zeros(rows.shape[0], bool)
    if count:
        hot[np.argsort(-weighted_squares(rows, weights), kind="stable")[:count]] = True
    return hot


def _shape_of_rank(layout: CodeLayout, rank: int) -> TTShape:
    """Two cores: the rows of a codebook that share the first half of the bits of their codes share ``rank`` vectors."""
    low = layout.bits // 2
    rows = layout.num_entries >> low, 1 << low
    return TTShape(layout.num_entries, layout.width, rank, rows, (layout.width, 1))


def _train_of(
    layout: CodeLayout, shape: TTShape, codebooks: np.ndarray, dtype: Any
) -> dict[str, jax.Array]:
    """Cores that approximate codebooks ``[m * K, width]`` in another order of rows: codes have to be chosen anew.

    Similar rows of a codebook then share the first digit. The order need not be stored, as codes are mere numbers.
    """
    first, second = shape.row_factors
    factors = (first // layout.all_codes, second), (layout.width, 1)
    of_one = TTShape(1 << layout.bits, layout.width, 1, *factors)
    ordered = [
        codebook[from_table(codebook, of_one, progress=False).inverse.rows]
        for codebook in np.split(codebooks, layout.all_codes)
    ]
    options: dict[str, Any] = {"shape": shape, "dtype": dtype}
    cores = tt_from_dense(np.concatenate(ordered), **options).cores
    return {f"core_{k}": core for k, core in enumerate(cores)}
