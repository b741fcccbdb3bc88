"""`quantize_mixed`: rows of different numbers of bits, chosen by their importance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_tt._base.arguments import as_int, as_positive, expect, instance_of, mismatch, one_of
from jax_tt._base.rows_of_arrays import dense_table, row_blocks, row_weights
from jax_tt._compress.quantize import Encoder, encoder_of
from jax_tt._compress.source import BLOCK
from jax_tt._ids import places
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.codec import check_headers
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable, check_bits


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
    """Quantizes each row with a number of bits of its own, chosen for a small weighted squared error.

    Every row gets the number of bits that minimises its weighted squared error plus ``m`` times its bytes, with the
    smallest Lagrange multiplier m for which the table has at most ``max_bytes``. The arrays that tell the number of
    bits of every row take bytes as well; so this is done for every subset of ``bits``, and the table with the smallest
    error is kept. Rows are read in blocks, three times.

    Args:
        rows: ``[N, D]`` of floats on the host; may be a memory map.
        max_bytes: largest size of the table: rows, and the arrays that tell their numbers of bits.
        bits: the numbers of bits to choose from, some of 8, 4, 3 and 2.
        levels: ``"uniform"``; or ``"fit"`` for levels and ranges with smaller errors, as in `quantize`.
        weights: importance of every row ``[N]``, at least 0, e.g. the root of its count.
        seed: of the sample that levels are fitted to.
        name: of the table in error messages.

    Returns:
        A `MixedTable` of one `QuantizedTable` for each number of bits that some rows have, and its state.

    Raises:
        ValueError: the smallest rows take more than ``max_bytes``.

    >>> import jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    >>> table, state = jax_tt.compression.quantize_mixed(rows, 12_000, weights=1 / np.arange(1, 1001))
    >>> [(one.bits, one.num_embeddings) for one in table.tables]
    [(8, 48), (4, 624), (3, 328)]
    """
    rows = dense_table(rows, "rows")
    instance_of("bits", bits, Iterable, "a sequence of numbers of bits, e.g. (8, 4, 2)")
    widths = sorted({check_bits(width) for width in bits}, reverse=True)
    expect(widths, "bits", "none", "some of 8, 4, 3 and 2")
    room = as_positive("max_bytes", max_bytes)
    check_room(rows, room, widths[-1])
    weights = row_weights(weights, rows.shape[0])
    one_of("levels", levels, ("uniform", "fit"))
    encoders = [
        encoder_of(rows, width, "uniform" if width == 8 else levels, weights, as_int("seed", seed))
        for width in widths
    ]
    return allotted(rows, room, weights, encoders, errors_of(rows, encoders), name)


def check_room(rows: Any, max_bytes: int, bits: int) -> None:
    """Raises if rows with the fewest bits take more than ``max_bytes``."""
    n, features = map(int, rows.shape)
    least = n * codec.row_bytes(features, bits)
    if least > max_bytes:
        expected = f"at least {least:,} bytes, the size of {n:,} rows with {bits} bits a number"
        raise mismatch("max_bytes", f"{max_bytes:,} bytes", expected)


def allotted(
    rows: Any,
    max_bytes: int,
    weights: np.ndarray | None,
    encoders: Sequence[Encoder],
    errors: np.ndarray,
    name: str | None = None,
) -> tuple[MixedTable, dict[str, jax.Array]]:
    """`quantize_mixed` with given encoders, most bits first, and the squared errors of the rows with each."""
    features = int(rows.shape[1])
    costs = np.array([codec.row_bytes(features, encode.bits) for encode in encoders])
    chosen = _allocated(errors if weights is None else errors * weights, costs, max_bytes)
    used = np.unique(chosen).tolist()
    blocks: list[list[np.ndarray]] = [[] for _ in used]
    for start, block in row_blocks(rows, BLOCK):
        here = chosen[start : start + len(block)]
        for some, k in zip(blocks, used, strict=True):
            some.append(encoders[k](block)[here == k])
    packed = [np.concatenate(some) for some in blocks]
    tables = [
        QuantizedTable(len(some), features, encoders[k].bits, levels=encoders[k].levels)
        for k, some in zip(used, packed, strict=True)
    ]
    table = MixedTable(tuple(tables), name=name)
    state = table.joined([{PACKED: jax.device_put(some)} for some in packed])
    return table, table.with_parts(state, np.searchsorted(used, chosen))


def errors_of(rows: Any, encoders: Sequence[Encoder]) -> np.ndarray:
    """Squared errors of the rows with each number of bits, ``[widths, N]``."""
    errors = np.empty((len(encoders), rows.shape[0]))
    for start, block in row_blocks(rows, BLOCK):
        for k, encode in enumerate(encoders):
            rounded = encode.rounded(block)
            check_headers("rows", rounded.headers, start, block)
            errors[k, start : start + len(block)] = rounded.errors
    return errors


def _allocated(errors: np.ndarray, costs: np.ndarray, max_bytes: int) -> np.ndarray:
    """Chooses a width for each row, ``[N]``, by its errors ``[widths, N]``; costs are in descending order."""
    n = errors.shape[1]
    best, least = np.full(n, len(costs) - 1), math.inf
    for size in range(1, len(costs) + 1):
        # A `MixedTable` of so many tables has this many bytes of places.
        room = max_bytes - 4 * (size - 1) * math.prod(places.shape_of(n))
        for some in itertools.combinations(range(len(costs) - 1, -1, -1), size):
            if n * costs[some[0]] > room:
                continue
            chosen = np.array(some)[_among(errors[list(some)], costs[list(some)], room)]
            total = float(errors[chosen, np.arange(n)].sum())
            if total < least:
                best, least = chosen, total
    return best


def _among(errors: np.ndarray, costs: np.ndarray, room: int) -> np.ndarray:
    """Chooses a width for each row, ``[N]``; costs are in ascending order.

    A row goes from width to width such that each step reduces its error most per byte. The steps of all rows are taken
    in the order of their gain per byte, as long as there is room: each prefix is the choice for some multiplier.
    """
    n = errors.shape[1]
    each, at, gain = np.arange(n), np.zeros(n, np.int64), np.full(n, np.inf)
    steps = []
    for _ in range(len(costs) - 1):
        gains = (errors[at, each] - errors) / np.maximum(costs[:, None] - costs[at], 1)
        gains[np.arange(len(costs))[:, None] <= at] = 0.0
        to = np.argmax(gains, axis=0)
        # Rounding errors may not turn the steps of a row around.
        gain = np.minimum(gains[to, each], gain)
        rows = np.flatnonzero(gain > 0)
        steps.append((rows, gain[rows], to[rows], costs[to[rows]] - costs[at[rows]]))
        at = np.where(gain > 0, to, at)
    rows, gains, to, more = (
        (np.concatenate(part) for part in zip(*steps, strict=True))
        if steps
        else (np.zeros(0, np.int64),) * 4
    )
    order = np.argsort(-gains, kind="stable")
    order = order[np.cumsum(more[order]) <= room - n * costs[0]]
    chosen = np.zeros(n, np.int64)
    # The last step of a row is the one that goes furthest.
    np.maximum.at(chosen, rows[order], to[order])
    return chosen
