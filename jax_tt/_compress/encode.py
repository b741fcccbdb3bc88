"""`encode`: codes and codebooks of trained rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, as_positive
from jax_tt._base.host_table import host_table
from jax_tt._base.progress import Progress
from jax_tt._base.sample import sample_of
from jax_tt._base.storage import STORAGE
from jax_tt._compress import coded_trains
from jax_tt._ids import places
from jax_tt._kinds.coded import product
from jax_tt._kinds.coded.assign import BLOCK, encoded_rows
from jax_tt._kinds.coded.layout import CODEBOOKS, CODES, HOT_CODES, HOT_PLACES, CodeLayout
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._ops.coded_table import with_codebooks
from jax_tt._table.options import Update
from jax_tt._table.rotation import ROTATION, as_rotation

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
    """A `CodedTable` of these rows, and its state.

    Codebooks are fitted to a sample of the rows, such that the weighted sum of squared errors is small; then every row
    is given its codes. Rows are read in blocks on the host and may be a memory map. The result depends on the arguments
    alone.

    Args:
        rows: ``[N, D]`` in float32, float16, bfloat16 or float64, e.g. ``state["embedding"]`` of a `DenseTable`.
        num_codes: codes of an id.
        bits: bits of a code.
        kind: ``"product"``: codes give one part of the columns each, by k-means. ``"additive"``: rows are sums of
            codebook rows, found by turns of codes and codebooks.
        weights: the importance of every row ``[N]``, not negative, e.g. the root of its count; None if they are equal.
        rotation: of products: ``"fit"`` fits an orthogonal matrix by which rows are multiplied in the end, so that
            errors are smaller; or such a matrix, ``[D, D]``; None for none.
        iterations: of k-means, or rounds of codes and codebooks.
        sample: number of rows that codebooks are fitted to, drawn by weight; by default ``256 * 2 ** bits``, for sums
            at least 65,536.
        seed: of the sample and of the first codebooks.
        param_dtype: type of the codebooks.
        update: `Update` of a fused table, or None.
        name: of the table in error messages.
        terms: codes of a product that are added in each part of the columns.
        hot: number of ids with more codes than the others: those whose rows have the largest squares times weights.
        hot_terms: how many more each part of these rows has.
        codebook_rank: make the rows of all codebooks those of a tensor train of two cores of this rank. Codebooks are
            fitted first and then compressed, so that errors are larger than those of dense codebooks. None for these.
        progress: show a progress bar if it takes longer than a second.

    Returns:
        The table and its state.

    Raises:
        ValueError: an argument does not fit, or rows or weights are not finite.

    >>> import jax.numpy as jnp, jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    >>> table, state = jax_tt.encode(rows, num_codes=8, bits=4)
    >>> table.row_bytes, state["codes"].shape, state["codebooks"].shape
    (4, (1000, 4), (128, 2))
    """
    given = host_table("rows", rows)
    if len(given.shape) != 2 or 0 in given.shape:
        raise ValueError(f"rows: got shape {tuple(given.shape)}; expected [N, D], none 0.")
    if jnp.dtype(given.dtype).name not in STORAGE:
        raise ValueError(f"rows: got dtype {given.dtype}; expected one of {', '.join(STORAGE)}.")
    n, features = map(int, given.shape)
    rotated = rotation is not None
    layout = CodeLayout(n, features, num_codes, bits, kind, rotated, terms, hot, hot_terms, name)
    shape = None
    if codebook_rank is not None:
        shape = coded_trains.shape_of_rank(layout, as_positive("codebook_rank", codebook_rank))
    table = with_codebooks(layout, shape, param_dtype=param_dtype, update=update)
    if rotated and kind != "product":
        raise ValueError(
            "rotation: got one with kind='additive', whose errors do not depend on it; expected None."
        )
    rng = np.random.default_rng(seed)
    size = max(256 << bits, _SUM_SAMPLE if layout.all_codes > layout.column_parts else 0)
    size = size if sample is None else as_positive("sample", sample)
    own = _checked_weights(weights, n)
    ids, points, of_points = sample_of(f"{layout.label}rows", given, own, size, rng)
    are_hot = _hot(given, own, hot)
    with Progress(progress, "encode", 0) as bar:
        matrix = as_rotation(rotation, features, ("fit",))
        found, matrix = product.fitted(
            layout, points, of_points, are_hot[ids], matrix, iterations, rng, bar
        )
        state = (
            {CODEBOOKS: jnp.asarray(found).astype(param_dtype)}
            if shape is None
            else coded_trains.compressed(layout, shape, found, param_dtype)
        )
        if rotated:
            state[ROTATION] = jnp.asarray(matrix)
        step = bar.begin("codes of rows", -(-n // BLOCK))
        codes, of_hot = encoded_rows(
            layout, table.codebook_rows(state), matrix, given, are_hot, step
        )
    state[CODES] = jnp.asarray(codes)
    if hot:
        state[HOT_CODES] = jnp.asarray(of_hot)
        state[HOT_PLACES] = places.of_members(jnp.asarray(are_hot))
    return table, table.init_rest(state) | state


def _hot(rows: Any, weights: np.ndarray | None, count: int) -> np.ndarray:
    """The rows with the largest squares times weights, bool ``[N]``; the first of several."""
    n = rows.shape[0]
    found = np.zeros(n, bool)
    if count:
        found[np.argsort(-weighted_squares(rows, weights), kind="stable")[:count]] = True
    return found


def weighted_squares(rows: Any, weights: np.ndarray | None) -> np.ndarray:
    """The squared lengths of rows ``[N, D]``, read in blocks, times weights."""
    found = np.empty(rows.shape[0])
    for start in range(0, len(found), BLOCK):
        block = np.asarray(rows[start : start + BLOCK]).astype(np.float32)
        found[start : start + BLOCK] = np.einsum("nd,nd->n", block, block)
    return found if weights is None else weights * found


def _checked_weights(weights: Any, n: int) -> np.ndarray | None:
    if weights is None:
        return None
    own = np.asarray(as_array("weights", weights)).astype(np.float64)
    if own.shape != (n,) or not (np.isfinite(own) & (own >= 0)).all() or not own.any():
        raise ValueError(
            f"weights: got {own.dtype} of shape {own.shape}; expected shape [{n}]: for each row one "
            "finite number that is not negative, and not all 0."
        )
    return own / own.max()
