"""`quantize_mixed`: rows of different numbers of bits, chosen by their importance."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_tt._algebra.checks import dense_table, row_weights
from jax_tt._arguments import as_positive, one_of
from jax_tt._composite.mixed import MixedTable
from jax_tt._quantized import codec
from jax_tt._quantized.quantize import quantize
from jax_tt._quantized.table import PACKED, QuantizedTable, check_bits
from jax_tt._tables import places

# Numbers that are rounded at a time.
_BLOCK = 2**22
# Halvings of the interval of the multiplier; more do not change the rows.
_HALVINGS = 60


def quantize_mixed(
    rows: Any,
    max_bytes: int,
    *,
    bits: Sequence[int] = codec.BITS,
    levels: str = "uniform",
    weights: Any = None,
    seed: int = 0,
    name: str | None = None,
) -> tuple[MixedTable, dict[str, jax.Array]]:
    """A table of rows with different numbers of bits, whose weighted squared error is small for its bytes.

    All rows get the number of bits with the smallest sum of weighted squared error and ``m`` times their bytes, with
    the smallest multiplier m for which the table has at most ``max_bytes``: no other choice with as many bytes has a
    smaller error. Rows of which an additional byte helps most then get the bytes that are left.

    Args:
        rows: ``[N, D]`` of floats on the host; may be a memory map, of which blocks are read.
        max_bytes: largest size of the table, of rows and of the arrays that tell which rows have how many bits.
        bits: the numbers of bits among which it is chosen, of 8, 4, 3 and 2.
        levels: ``"uniform"``; or ``"fit"`` for levels and ranges with smaller errors, as those of `quantize`.
        weights: importance of every row ``[N]``, at least 0, e.g. the root of its count.
        seed: of the sample that levels are fitted to.
        name: of the table in error messages.

    Returns:
        A `MixedTable` of one `QuantizedTable` for each number of bits that some rows have, and its state.

    Raises:
        ValueError: the smallest rows take more than ``max_bytes``, or an argument does not fit.

    >>> import jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    >>> table, state = jax_tt.quantize_mixed(rows, 12_000, weights=1 / np.arange(1, 1001))
    >>> [(one.bits, one.num_embeddings > 0) for one in table.tables]
    [(8, True), (4, True), (3, True), (2, True)]
    """
    rows = dense_table(rows)
    n, features = map(int, rows.shape)
    widths = sorted({check_bits(own) for own in bits}, reverse=True)
    if not widths:
        raise ValueError("bits: got none; expected some of 8, 4, 3 and 2.")
    costs = np.array([codec.row_bytes(features, own) for own in widths])
    room = as_positive("max_bytes", max_bytes)
    if n * costs[-1] > room:
        raise ValueError(
            f"max_bytes: got {room:,}; expected at least {n * costs[-1]:,}, the bytes of {n:,} rows with {widths[-1]} "
            "bits a number."
        )
    own_weights = row_weights(weights, n)
    fitted = {"levels": "fit", "weights": own_weights, "seed": seed}
    fits = one_of("levels", levels, ("uniform", "fit")) == "fit"
    made = [quantize(rows, own, **(fitted if fits and own < 8 else {})) for own in widths]
    errors = np.stack([_errors(rows, table, state[PACKED]) for table, state in made])
    chosen = _allocated(errors if own_weights is None else errors * own_weights, costs, room)
    used = [k for k in range(len(widths)) if (chosen == k).any()]
    states = [{PACKED: made[k][1][PACKED][np.flatnonzero(chosen == k)]} for k in used]
    tables = [
        dataclasses.replace(made[k][0], num_embeddings=len(own[PACKED]))
        for k, own in zip(used, states, strict=True)
    ]
    table = MixedTable(tuple(tables), name=name)
    return table, table.with_parts(table.joined(states), np.searchsorted(used, chosen))


def _errors(rows: Any, table: QuantizedTable, packed: jax.Array) -> np.ndarray:
    """Squared errors of the rows of a table, ``[N]``."""
    found = np.empty(table.num_embeddings)
    step = max(1, _BLOCK // table.features)
    for start in range(0, len(found), step):
        own = slice(start, start + step)
        given = np.asarray(rows[own]).astype(np.float32)
        found[own] = np.sum((np.asarray(_decoded(table, packed[own])) - given) ** 2, axis=1)
    return found


@functools.partial(jax.jit, static_argnums=0)
def _decoded(table: QuantizedTable, packed: jax.Array) -> jax.Array:
    return table.to_dense({PACKED: packed})


def _allocated(errors: np.ndarray, costs: np.ndarray, max_bytes: int) -> np.ndarray:
    """For each row the place of its number of bits, of which later ones take fewer bytes."""
    n = errors.shape[1]

    def of(multiplier: float) -> np.ndarray:
        # Of equals, the smallest.
        best = np.argmin((errors + multiplier * costs[:, None])[::-1], axis=0)
        return len(costs) - 1 - best

    def nbytes(chosen: np.ndarray) -> int:
        counts = np.bincount(chosen, minlength=len(costs))
        return int(counts @ costs) + _places_bytes(counts)

    if nbytes(every := np.zeros(n, np.int64)) <= max_bytes:
        return every
    smallest = np.full(n, len(costs) - 1)
    # With the second, no row is worth another byte.
    low, high = 0.0, float(errors.max()) + 1.0
    best = smallest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        own = of(middle)
        low, high, best = (low, middle, own) if nbytes(own) <= max_bytes else (middle, high, best)
    return _filled(errors, costs, best, max_bytes - nbytes(best), nbytes, max_bytes)


def _filled(
    errors: np.ndarray,
    costs: np.ndarray,
    chosen: np.ndarray,
    left: int,
    nbytes: Any,
    max_bytes: int,
) -> np.ndarray:
    """With more bits for the rows that gain most by a byte, as long as there are bytes left."""
    more = np.maximum(chosen - 1, 0)
    each = np.arange(len(chosen))
    extra = costs[more] - costs[chosen]
    gain = np.where(chosen > 0, errors[chosen, each] - errors[more, each], -1.0)
    order = np.argsort(-gain / np.maximum(extra, 1), kind="stable")
    order = order[gain[order] > 0]
    order = order[np.cumsum(extra[order]) <= left]
    found = chosen.copy()
    found[order] = more[order]
    # A number of bits that no row had takes places.
    return found if nbytes(found) <= max_bytes else chosen


def _places_bytes(counts: np.ndarray) -> int:
    """Bytes of the places of a `MixedTable` of tables with these numbers of rows, of which some may be 0."""
    sizes = [int(size) for size in counts if size]
    left, total = sum(sizes), 0
    for size in sizes[:-1]:
        total += 4 * int(np.prod(places.shape_of(left)))
        left -= size
    return total
