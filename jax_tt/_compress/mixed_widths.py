"""`quantize_mixed`: rows of different numbers of bits, chosen by their importance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_int, as_positive, one_of
from jax_tt._base.rows_of_arrays import dense_table, row_weights
from jax_tt._compress.quantize import Encoder, encoder_of
from jax_tt._ids import places
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.codec import check_headers
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable, check_bits

# Numbers that are rounded at a time.
_BLOCK = 2**22


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
    """A table of rows with different numbers of bits, chosen such that its weighted squared error is small.

    Every row gets the number of bits with the smallest sum of its weighted squared error and ``m`` times its bytes,
    with the smallest Lagrange multiplier m for which the table has at most ``max_bytes``. As the arrays that tell the
    number of bits of every row take bytes as well, this is done for all choices of the numbers of bits that are used,
    and the one with the smallest error is taken.

    Rows are read in blocks, three times.

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
    >>> table, state = jax_tt.compression.quantize_mixed(rows, 12_000, weights=1 / np.arange(1, 1001))
    >>> [(one.bits, one.num_embeddings) for one in table.tables]
    [(8, 48), (4, 624), (3, 328)]
    """
    rows = dense_table(rows, "rows")
    n, features = map(int, rows.shape)
    if not isinstance(bits, Iterable):
        raise TypeError(
            f"bits: got {bits!r}; expected a sequence of numbers of bits, e.g. (8, 4, 2)."
        )
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
    one_of("levels", levels, ("uniform", "fit"))
    encoders = [
        encoder_of(rows, own, "uniform" if own == 8 else levels, own_weights, as_int("seed", seed))
        for own in widths
    ]
    errors = _errors(rows, encoders)
    chosen = _allocated(errors if own_weights is None else errors * own_weights, costs, room)
    used = [k for k in range(len(widths)) if (chosen == k).any()]
    packed = [np.empty((int((chosen == k).sum()), int(costs[k])), np.uint8) for k in used]
    filled = [0] * len(used)
    for start, block in _blocks(rows):
        for place, k in enumerate(used):
            own = encoders[k](block)[chosen[start : start + len(block)] == k]
            packed[place][filled[place] : filled[place] + len(own)] = own
            filled[place] += len(own)
    tables = [
        QuantizedTable(len(own), features, widths[k], levels=encoders[k].levels)
        for k, own in zip(used, packed, strict=True)
    ]
    table = MixedTable(tuple(tables), name=name)
    state = table.joined([{PACKED: jnp.asarray(own)} for own in packed])
    return table, table.with_parts(state, np.searchsorted(used, chosen))


def _errors(rows: Any, encoders: Sequence[Encoder]) -> np.ndarray:
    """Squared errors of the rows with each number of bits, ``[widths, N]``."""
    found = np.empty((len(encoders), rows.shape[0]))
    for start, block in _blocks(rows):
        for k, encode in enumerate(encoders):
            packed = encode(block)
            check_headers("rows", packed, start, block)
            errors = np.sum((encode.decoded(packed, block.shape[1]) - block) ** 2, axis=1)
            found[k, start : start + len(block)] = errors
    return found


def _blocks(rows: Any) -> Iterator[tuple[int, np.ndarray]]:
    step = max(1, _BLOCK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        yield start, np.asarray(rows[start : start + step]).astype(np.float32)


def _allocated(errors: np.ndarray, costs: np.ndarray, max_bytes: int) -> np.ndarray:
    """For each row the place of its number of bits, among errors ``[widths, N]`` and costs that fall."""
    n = errors.shape[1]
    best, least = np.full(n, len(costs) - 1), math.inf
    for size in range(1, len(costs) + 1):
        # The places of rows take bytes for each number of bits that there is.
        room = max_bytes - _places_bytes(n, size)
        for some in itertools.combinations(range(len(costs) - 1, -1, -1), size):
            if n * costs[some[0]] > room:
                continue
            own = _among(errors[list(some)], costs[list(some)], room)
            chosen = np.array(some)[own]
            total = float(errors[chosen, np.arange(n)].sum())
            if total < least:
                best, least = chosen, total
    return best


def _among(errors: np.ndarray, costs: np.ndarray, room: int) -> np.ndarray:
    """For each row the place of its number of bits, of which all may be used and the first takes the fewest bytes.

    A row goes from one to another in the steps in which its error falls most for a byte. All steps of all rows are
    taken in the order of what they gain for a byte, as long as there is room: each is the choice for a multiplier.
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


def _places_bytes(n: int, tables: int) -> int:
    """Bytes that the places of a `MixedTable` of so many tables take at most."""
    return 4 * (tables - 1) * math.prod(places.shape_of(n))
