"""`tt.round`: reduces the ranks of a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_positive, concrete, mismatch
from jax_tt._base.dtypes import accumulator
from jax_tt._base.rows_of_arrays import exactly_one, relative_tolerance
from jax_tt._tt.budget import ranks_for
from jax_tt._tt.cores import TrainSizes, checked_cores
from jax_tt._tt.shape import TTShape
from jax_tt._tt.trains import (
    FixedRanks,
    orthogonal_from_right,
    spectra,
    squared_tolerance,
    to_cores,
    to_links,
    truncate,
)


def tt_round(
    cores: Sequence[Any],
    ranks: int | Sequence[int] | None = None,
    *,
    tolerance: float | None = None,
    max_bytes: int | None = None,
) -> tuple[jax.Array, ...]:
    """A nearby table of smaller ranks: TT rounding, an SVD at every cut of the train.

    The error is at most the square root of the sum of the squared singular values that the cuts discard, and therefore
    at most ``sqrt(d - 1)`` times the least possible error at these ranks. All rows that the cores address are included,
    also those after the last row of the table. The new cores are balanced: each singular value is divided evenly
    between the two adjacent cores.

    Args:
        cores: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]``.
        ranks: one integer or ``d - 1``; a rank above that of the cores, or above the useful maximum, is lowered to it.
            Works under ``jit``.
        tolerance: use the smallest ranks with a Frobenius error of at most this times the norm of the table. On the
            host, in float64.
        max_bytes: the cores take at most this many bytes, with ranks chosen by the singular values. On the host, in
            float64.

    Returns:
        ``d`` cores of the same type.

    Raises:
        ValueError: not exactly one of ``ranks``, ``tolerance`` and ``max_bytes`` is given, or it is invalid.
        TypeError: ``tolerance`` or ``max_bytes`` under ``jit``, where the shapes must be static.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> a = jax_tt.tt.init(jax.random.key(0), shape)
    >>> twice = jax_tt.tt.add(a, a)  # ranks 8, but it needs 4
    >>> [core.shape for core in jax_tt.tt.round(twice, tolerance=1e-5)]
    [(10, 1, 2, 4), (10, 4, 2, 4), (10, 4, 2, 1)]
    """
    exactly_one(ranks=ranks, tolerance=tolerance, max_bytes=max_bytes)
    table, cores = checked_cores(cores, name="cores")
    dtype = cores[0].dtype
    if ranks is not None:
        n, width, p, q = table.num_embeddings, table.features, table.row_factors, table.col_factors
        return _rounded(cores, TTShape(n, width, ranks, p, q).ranks)
    links = _on_host(table, cores, tolerance, max_bytes)
    return tuple(
        jnp.asarray(core, dtype) for core in to_cores(links, table.row_factors, table.col_factors)
    )


@partial(jax.jit, static_argnums=1)
def _rounded(cores: Sequence[jax.Array], ranks: tuple[int, ...]) -> tuple[jax.Array, ...]:
    dtype = cores[0].dtype
    links = to_links([core.astype(accumulator(dtype)) for core in cores])
    with jax.default_matmul_precision("highest"):
        links = truncate(orthogonal_from_right(links, jnp), FixedRanks(ranks), jnp)
    rounded = to_cores(links, [c.shape[0] for c in cores], [c.shape[2] for c in cores])
    return tuple(core.astype(dtype) for core in rounded)


def _on_host(
    table: TrainSizes, cores: Sequence[jax.Array], tolerance: float | None, max_bytes: int | None
) -> list[np.ndarray]:
    by = "tolerance" if max_bytes is None else "max_bytes"
    fix = f"By {by}= the ranks follow from their values: round outside of jit, or give ranks."
    concrete("cores", list(cores), fix)
    links = to_links([np.asarray(core).astype(np.float64) for core in cores])
    links = orthogonal_from_right(links)
    if max_bytes is None:
        relative = relative_tolerance(tolerance)
        energy = float(np.sum(np.square(links[0])))
        return truncate(links, squared_tolerance(relative, energy, len(links)))
    return to_budget(
        links,
        table.row_factors,
        table.col_factors,
        as_positive("max_bytes", max_bytes),
        cores[0].dtype,
    )


def to_budget(
    links: Sequence[np.ndarray],
    row_factors: Sequence[int],
    col_factors: Sequence[int],
    max_bytes: int,
    dtype: Any,
) -> list[np.ndarray]:
    """A train that is orthogonal from the right, cut to the ranks whose cores take at most ``max_bytes``."""
    sizes = check_budget(row_factors, col_factors, max_bytes, dtype)
    tails = [_tails(s) for s in spectra(links)]
    ranks = ranks_for(tails, sizes, max_bytes // jnp.dtype(dtype).itemsize)
    assert ranks is not None  # rank 1 fits
    return truncate(links, FixedRanks(ranks))


def check_budget(
    row_factors: Sequence[int], col_factors: Sequence[int], max_bytes: int, dtype: Any
) -> list[int]:
    """Refuses a budget below cores of rank 1; the numbers in each of these."""
    sizes = [p * q for p, q in zip(row_factors, col_factors, strict=True)]
    least = sum(sizes) * jnp.dtype(dtype).itemsize
    if max_bytes < least:
        expected = f"at least {least} bytes, those of cores with these factors at rank 1"
        raise mismatch("max_bytes", f"{max_bytes} bytes", expected, "Or take more cores.")
    return sizes


def _tails(s: np.ndarray) -> np.ndarray:
    """``tails[r]``: what rank r discards, the sum of squares from singular value r on; ``[len(s) + 1]``."""
    return np.concatenate([np.cumsum(np.square(s[::-1]))[::-1], [0.0]])
