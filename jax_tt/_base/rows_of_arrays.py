"""Checks of the tables and options that algebra and compression take, and samples of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, as_int, as_number, concrete, expect, mismatch, type_of
from jax_tt._base.host_table import host_table


def exactly_one(**choices: Any) -> None:
    """Checks that exactly one of several exclusive arguments is given."""
    given = [name for name, value in choices.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"{', '.join(choices)}: got {' and '.join(given) or 'none of them'}; expected exactly one."
        )


def relative_tolerance(value: Any) -> float:
    expected = "a relative error of at least 0 and below 1, e.g. 0.1"
    return as_number("tolerance", value, expected, lambda x: 0 <= x < 1)


def ridge_weight(value: Any) -> float:
    return as_number("ridge", value, "a finite number of at least 0", lambda x: 0 <= x < math.inf)


def number_of_sweeps(value: Any) -> int:
    return as_int("sweeps", value, 0)


def row_weights(value: Any, n: int) -> np.ndarray | None:
    """Weights of ``n`` rows, float64, or None."""
    if value is None:
        return None
    weights = np.asarray(as_array("weights", value)).astype(np.float64)
    expect(weights.shape == (n,), "weights", weights, f"{(n,)}, one for every row")
    finite = np.isfinite(weights).all() and weights.min(initial=0.0) >= 0
    expect(finite, "weights", "some that are negative or not finite", "numbers of at least 0")
    expect(not n or weights.max() > 0, "weights", "zeros alone", "some above")
    return weights


def dense_table(table: Any, name: str = "table") -> Any:
    """Floats ``[N, D]`` on the host, as they are: numpy arrays and memory maps are not copied."""
    concrete(name, table, "It is compressed on the host, outside of jit.")
    given, table = table, host_table(name, table)
    if not jnp.issubdtype(table.dtype, np.number):
        got, expected = (
            f"{type_of(given)} of dtype {table.dtype}",
            "floats [num_embeddings, features]",
        )
        fix = "Of a table and its state it is jax_tt.tables.to_dense(table, state)."
        raise mismatch(name, got, expected, fix, TypeError)
    if len(table.shape) != 2 or 0 in table.shape:
        raise mismatch(name, table, "[num_embeddings, features], none of them 0")
    expect(jnp.issubdtype(table.dtype, jnp.floating), name, table, "floats")
    return table


def row_blocks(
    table: Any, numbers: int, dtype: Any = np.float32
) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks ``[n, D]`` of about so many numbers of a table, and the id of the first row of each."""
    step = max(1, numbers // table.shape[1])
    for start in range(0, table.shape[0], step):
        yield start, np.asarray(table[start : start + step]).astype(dtype)


# Rows that are read at a time.
_BLOCK = 2**14
# The squares of a million million of such numbers add up in float32.
_LARGEST = 1e13


def sample_of(
    argument: str, rows: Any, weights: np.ndarray | None, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids ``[s]`` of at most ``size`` rows, drawn by weight, their rows ``[s, D]`` and the weights of these ``[s]``.

    Rows are read in blocks, in the order of their ids; ``argument`` is what the error for one that is not finite begins
    with.
    """
    n = rows.shape[0]
    ids, drawn = _drawn(weights, n, min(size, n), rng)
    blocks = np.split(ids, np.arange(_BLOCK, len(ids), _BLOCK))
    return ids, np.concatenate([finite(argument, rows[some], some) for some in blocks]), drawn


def _drawn(
    weights: np.ndarray | None, n: int, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    if size == n:
        return np.arange(n), np.ones(n) if weights is None else weights
    if weights is None:
        return np.sort(rng.choice(n, size, replace=False)), np.ones(size)
    drawn = np.searchsorted(np.cumsum(weights), rng.random(size) * weights.sum(), side="right")
    ids, counts = np.unique(np.minimum(drawn, n - 1), return_counts=True)
    return ids, counts.astype(np.float64)


def finite(argument: str, block: Any, numbers: Any) -> np.ndarray:
    """Rows in float32; raises for one whose numbers are not finite, or too large, with its number."""
    block = np.asarray(block).astype(np.float32)
    largest = np.abs(block).max(axis=1)
    good = largest <= _LARGEST  # not of NaN
    if not good.all():
        at = int(np.argmin(good))
        row = f"{argument}: row {numbers[at]}"
        if np.isfinite(largest[at]):
            raise ValueError(
                f"{row} holds numbers of size {largest[at]:.3g}; expected at most {_LARGEST:g}, as the squares of all "
                "rows are added in float32. Divide the rows by a number."
            )
        raise ValueError(f"{row} holds NaN or infinity; expected finite numbers.")
    return block
