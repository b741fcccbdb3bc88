"""`tt.refine`: cores fitted to sampled rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, expect, expect_ids
from jax_tt._base.rows_of_arrays import number_of_sweeps, ridge_weight, row_weights
from jax_tt._tt.cores import TrainSizes, checked_cores
from jax_tt._tt.least_squares import Equations, alternate, kron_sum
from jax_tt._tt.trains import to_cores


def tt_refine(
    cores: Sequence[Any],
    ids: Any,
    rows: Any,
    *,
    weights: Any = None,
    sweeps: int = 2,
    ridge: float = 1e-3,
) -> tuple[jax.Array, ...]:
    """Cores fitted to samples of rows by alternating least squares, without gradients or a learning rate.

    Minimises ``sum_i weights[i] |rows[i] - table[ids[i]]|^2 + ridge * density * |change of the table|^2``, where the
    density is the sum of the weights divided by the number of rows that the cores address. With ``ridge=1`` a row that
    was not sampled is held at its value about as strongly as an average sample pulls; with 0.001 it changes freely
    unless the samples leave a choice. The change is that of one core at a time. Every step solves its normal equations
    exactly, in float64 on the host.

    Args:
        cores: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]``.
        ids: int ``[n]``, the sampled rows; they may repeat.
        rows: ``[n, D]``, their target values.
        weights: ``[n]``, at least 0; default 1.
        sweeps: number of passes over the cores, in alternating directions.
        ridge: how strongly the other rows are held at their values; 0 only if the samples determine the cores.

    Returns:
        ``d`` cores of the same shapes and type, balanced.

    Raises:
        ValueError: an id is out of range, shapes do not match, or a value is not finite.

    >>> import jax, jax_tt, numpy as np
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> ids = np.arange(0, 1000, 2)
    >>> rows = jax_tt.tt.lookup(jax_tt.tt.init(jax.random.key(1), shape), ids)
    >>> def error(cores):
    ...     return float(((jax_tt.tt.lookup(cores, ids) - rows) ** 2).sum())
    >>> error(jax_tt.tt.refine(cores, ids, rows)) < 0.1 * error(cores)
    True
    """
    table, cores = checked_cores(cores, name="cores")
    ids, rows, weights = _samples(table, ids, rows, weights)
    sweeps, ridge = number_of_sweeps(sweeps), ridge_weight(ridge)
    if not len(ids):
        return cores
    dense = [np.asarray(core).astype(np.float64) for core in cores]
    density = float(weights.sum()) / table.num_embeddings
    equations = sampled_equations(table, ids, rows, weights)
    found = alternate(dense, equations, sweeps, ridge * density)
    return tuple(jnp.asarray(core, cores[0].dtype) for core in found)


def _samples(
    table: TrainSizes, ids: Any, rows: Any, weights: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, rows = np.asarray(as_array("ids", ids)), np.asarray(as_array("rows", rows))
    expect(ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size), "ids", ids, "integers [n]")
    expect_ids("ids", ids, table.num_embeddings, "the rows that the cores address")
    columns = int(np.prod(table.col_factors))
    expect(rows.shape == (len(ids), columns), "rows", rows, (len(ids), columns))
    rows = rows.astype(np.float64)
    expect(np.all(np.isfinite(rows)), "rows", "NaN or infinity", "finite numbers")
    given = row_weights(weights, len(ids))
    return ids.astype(np.int64), rows, np.ones(len(ids)) if given is None else given


def sampled_equations(
    table: TrainSizes, ids: np.ndarray, rows: np.ndarray, weights: np.ndarray
) -> Equations:
    """Normal equations over sampled rows."""
    p, q = table.row_factors, table.col_factors
    digits = np.unravel_index(ids, p)

    def equations(
        links: Sequence[np.ndarray], k: int
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        slices = to_cores(links, p, q)
        order = np.argsort(digits[k], kind="stable")
        values, starts = np.unique(digits[k][order], return_index=True)
        for i, at in zip(values.tolist(), np.split(order, starts[1:]), strict=True):
            left = np.ones((len(at), 1, 1))  # [n, q left, r]
            for j in range(k):
                core = slices[j][digits[j][at]]
                left = np.einsum("nar,nrbs->nabs", left, core, optimize=True)
                left = left.reshape(len(at), -1, core.shape[3])
            right = np.ones((len(at), 1, 1))  # [n, r', q right]
            for j in reversed(range(k + 1, table.d)):
                core = slices[j][digits[j][at]]
                right = np.einsum("nrbs,nsa->nrba", core, right, optimize=True)
                right = right.reshape(len(at), core.shape[1], -1)
            r, s = left.shape[2], right.shape[1]
            weight = weights[at]
            left_gram = np.matmul(left.transpose(0, 2, 1), left).reshape(len(at), r * r)
            right_gram = np.matmul(right, right.transpose(0, 2, 1)).reshape(len(at), s * s)
            matrix = (left_gram * weight[:, None]).T @ right_gram
            wanted = rows[at] * weight[:, None]
            wanted = wanted.reshape(len(at), left.shape[1], q[k], right.shape[2])
            half = np.einsum("nar,nabc->nrbc", left, wanted, optimize=True)
            target = np.einsum("nrbc,nsc->rsb", half, right, optimize=True)
            yield i, kron_sum(matrix, r, s), target.reshape(r * s, q[k])

    return equations
