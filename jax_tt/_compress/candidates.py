"""The tables of every kind that a number of bytes has room for."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from jax_tt._compress import trains
from jax_tt._compress.candidate import Candidate, Found
from jax_tt._compress.encode import encode
from jax_tt._compress.mixed_widths import allotted, check_room, errors_of
from jax_tt._compress.quantize import Encoder, encoder_of, quantize
from jax_tt._compress.source import Made, Source
from jax_tt._kinds.coded.codec import row_bytes
from jax_tt._kinds.coded.layout import CodeLayout
from jax_tt._kinds.coded.table import CodedTable, in_words
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._ops.describe import with_codebooks

# Codebooks of longer codes take more bytes than they save, unless a table is very large.
_CODE_BITS = (8, 7, 6, 5, 4)
# Rounding and product codes are better where there is room for more codes than these, and are fitted much faster.
_MAX_SUM = 16
# Fits that show which kinds are worth a better one.
_QUICK_SUMS = {"iterations": 4}
# Codes of separate parts take little time, and rotations become better for longer.
_QUICK_PARTS = {"iterations": 12}
# Errors of codes on a sample, which has too few rows for their codebooks, are up to so many times as large as in the
# end, and errors of quick fits.
OF_SAMPLES, OF_QUICK = {"product": 3.5, "additive": 7.0}, 2.0
# Numbers of codes that are added in each part of the columns.
_TERMS = (1, 2)
# Parts of products in which some rows have more codes.
_HOT_PARTS = (2, 4, 8, 16)
# Some rows have more codes if the quarter with the largest weighted squares has this share of all squares; of equal
# rows it has a quarter.
_CONCENTRATED = 0.4
# Shares of these rows, and of codes that all rows have in the bytes of codes: about these, at most twice or half.
_HOT_ROWS = 0.25
_BASE_BYTES = 0.5
# With more bits for each number of a table, all rows are accurate, and some would become worse.
_MOST_BITS = 3
# Rotations of such tables take at most this share of all bytes, and so do codebooks unless codes are the shortest.
_OF_CODEBOOKS = 1 / 8


def candidates(source: Source, kind: str, max_bytes: int) -> list[Candidate]:
    """The tables of a kind that are measured for a size; none if the kind has no table that is so small."""
    return list(KINDS[kind](source, max_bytes))


def smallest(source: Source, kind: str) -> int:
    """The fewest bytes that a kind has a table for."""
    return _SMALLEST[kind](source)


def _quantized(source: Source, max_bytes: int) -> Found:
    n, features = source.sizes
    for bits in sorted(codec.BITS, reverse=True):
        if QuantizedTable(n, features, bits).nbytes <= max_bytes:
            yield from _of_bits(source, bits, max_bytes)
            return


def _of_bits(source: Source, bits: int, max_bytes: int) -> Found:
    n, features = source.sizes

    def rounded(detail: str, **options: Any) -> Candidate:
        nbytes = QuantizedTable(n, features, bits, rotated="rotation" in options).nbytes
        make = functools.partial(_rounded, bits=bits, **options)
        return Candidate("quantized", f"{bits} bits a number{detail}", nbytes, make)

    yield rounded("")
    if bits == max(codec.BITS):  # there is nothing to gain
        return
    yield rounded(", clipped", clip=True)
    yield rounded(", non-uniform levels", levels="fit")
    turned = rounded(", non-uniform levels, rotated", levels="fit", rotation="fit")
    if turned.nbytes <= max_bytes:
        yield turned


def _rounded(source: Source, bits: int, **options: Any) -> Made:
    if "rotation" in options:
        options |= {"weights": source.weights, "seed": source.seed}
    elif "levels" in options:
        encoder = _encoder(source, bits, "fit")
        options |= {"levels": encoder.levels or "uniform", "clip": encoder.clip}
    return quantize(source.rows, bits, **options)


def _encoder(source: Source, bits: int, levels: str) -> Encoder:
    options = source.rows, bits, levels, source.weights, source.seed
    return source.once((bits, levels), functools.partial(encoder_of, *options))


def _of_widths(source: Source, max_bytes: int) -> Found:
    if QuantizedTable(*source.sizes, codec.BITS[-1]).nbytes > max_bytes:
        return
    detail = f"{codec.BITS[-1]} to {codec.BITS[0]} bits a number, up to {max_bytes:,} bytes"
    make = functools.partial(_allotted, max_bytes=max_bytes)
    yield Candidate("mixed", detail, max_bytes, make)
    fit = functools.partial(make, levels="fit")
    yield Candidate("mixed", f"{detail}, non-uniform levels", max_bytes, fit)


def _allotted(source: Source, max_bytes: int, levels: str = "uniform") -> Made:
    widest, *others = codec.BITS
    room = source.share(max_bytes)
    check_room(source.rows, room, others[-1])
    encoders = [_encoder(source, widest, "uniform")]
    encoders += [_encoder(source, bits, levels) for bits in others]
    errors = source.once(levels, lambda: errors_of(source.rows, encoders))
    return allotted(source.rows, room, source.weights, encoders, errors)


def _product(source: Source, max_bytes: int) -> Found:
    plain = None
    for one in _products(source, max_bytes):
        yield one if plain is None else dataclasses.replace(one, plain=plain)
        plain = plain or one


def _products(source: Source, max_bytes: int) -> Found:
    """Tables of all settings, a plain one first."""
    _, features = source.sizes
    # A code of one column is a number that is rounded to levels which all rows share.
    divisors = [m for m in range(1, features + 1) if features % m == 0]
    # Of several that fit, one whose codes have the most bits in all; then the one with the longest codes.
    for terms, rotation in itertools.product(_TERMS, (None, "fit")):
        options = {"kind": "product", "terms": terms}
        fit = [
            (terms * parts * bits, bits, terms * parts)
            for parts in divisors
            for bits in _CODE_BITS
            if table_bytes(
                _coded(source, terms * parts, bits, rotated=rotation is not None, **options)
            )
            <= max_bytes
        ]
        if fit:
            _, bits, m = max(fit)
            yield _encoded(source, m, bits, rotation=rotation, **options)
    yield from _mixed(source, max_bytes, "product", [m for m in _HOT_PARTS if m in divisors])


def _additive(source: Source, max_bytes: int) -> Found:
    for bits in _CODE_BITS:
        fit = [
            m
            for m in range(1, _MAX_SUM + 1)
            if table_bytes(_coded(source, m, bits, kind="additive")) <= max_bytes
        ]
        # With the most codes there is room left, which longer ones use better.
        if fit and (fit[-1] < _MAX_SUM or bits == _CODE_BITS[0]):
            yield _encoded(source, fit[-1], bits, kind="additive")
    yield from _mixed(source, max_bytes, "additive", [1])


def _mixed(source: Source, max_bytes: int, kind: str, parts: Iterable[int]) -> Found:
    """Tables whose hot rows, with the largest weighted squares, have more codes, for each number of parts."""
    n, features = source.sizes
    if 8 * max_bytes > _MOST_BITS * n * features or source.concentration < _CONCENTRATED:
        return
    for count in parts:
        rotated = count > 1 and 4 * features**2 <= _OF_CODEBOOKS * max_bytes
        for bits in _CODE_BITS:
            fit = list(_splits(source, max_bytes, kind, count, bits, rotated))
            if not fit:
                continue
            _, table = min(fit, key=lambda one: one[0])
            codebooks = (
                jnp.dtype(source.param_dtype).itemsize * (table.all_codes << bits) * table.width
            )
            if codebooks > _OF_CODEBOOKS * max_bytes and bits > _CODE_BITS[-1]:
                continue
            options = {"kind": kind, "terms": table.terms}
            options |= {"hot": table.hot, "hot_terms": table.hot_terms}
            rotation = "fit" if rotated else None
            yield _encoded(source, table.num_codes, bits, rotation=rotation, **options)
            break


def _splits(
    source: Source, max_bytes: int, kind: str, parts: int, bits: int, rotated: bool
) -> Iterator[tuple[float, CodedTable]]:
    """Tables with as many hot rows as fit, and how far their shares are from the usual ones."""
    n, _ = source.sizes
    # Numbers of codes that fill their bytes.
    full = [
        k
        for k in range(1, _MAX_SUM)
        if row_bytes(parts * k, bits) < row_bytes(parts * (k + 1), bits)
    ]
    for terms, hot_terms in itertools.product(full, repeat=2):
        if terms + hot_terms > _MAX_SUM:
            continue
        options: dict[str, Any] = {
            "kind": kind,
            "rotated": rotated,
            "hot": 1,
            "hot_terms": hot_terms,
        }
        options |= {"terms": terms} if kind == "product" else {}
        table = _coded(source, parts * terms, bits, **options)
        hot = 1 + (max_bytes - table_bytes(table)) // table.hot_bytes
        if not 0 < hot < n:
            continue
        base = n * table.row_bytes
        share = base / (base + hot * table.hot_bytes)
        away = [abs(math.log2(hot / n / _HOT_ROWS)), abs(math.log2(share / _BASE_BYTES))]
        if max(away) < 1:
            yield sum(away), dataclasses.replace(table, hot=hot)


KINDS: dict[str, Callable[[Source, int], Found]] = {
    "quantized": _quantized,
    "mixed": _of_widths,
    "product": _product,
    "additive": _additive,
    "low_rank": trains.low_rank,
    "tt": trains.one_train,
    "tt_sum": trains.sum_of_trains,
}


def _two_bits(source: Source) -> int:
    return QuantizedTable(*source.sizes, codec.BITS[-1]).nbytes


def _one_code(source: Source, kind: str) -> int:
    return min(table_bytes(_coded(source, 1, bits, kind=kind)) for bits in _CODE_BITS)


_SMALLEST: dict[str, Callable[[Source], int]] = {
    "quantized": _two_bits,
    "mixed": _two_bits,
    "product": functools.partial(_one_code, kind="product"),
    "additive": functools.partial(_one_code, kind="additive"),
    "low_rank": trains.least_low_rank,
    "tt": trains.least_train,
    "tt_sum": trains.least_sum,
}


def _coded(source: Source, m: int, bits: int, **options: Any) -> CodedTable:
    layout = CodeLayout(*source.sizes, m, bits, **options)
    return with_codebooks(layout, param_dtype=source.param_dtype)


def table_bytes(table: CodedTable) -> int:
    """``nbytes`` of a table, without tracing an initial state: thousands of tables are compared."""
    return sum(
        math.prod(array.shape or ()) * jnp.dtype(array.dtype or table.param_dtype).itemsize
        for array in table.spec.arrays
    )


def _encoded(
    source: Source,
    m: int,
    bits: int,
    kind: str,
    rotation: str | None = None,
    **options: Any,
) -> Candidate:
    table = _coded(source, m, bits, kind=kind, rotated=rotation is not None, **options)
    options |= {"kind": kind, "rotation": rotation, "param_dtype": source.param_dtype}
    make = functools.partial(_in_codes, num_codes=m, bits=bits, **options)
    quick = _QUICK_PARTS if table.all_codes == table.column_parts else _QUICK_SUMS
    return Candidate(kind, in_words(table), table_bytes(table), make, quick)


def _in_codes(source: Source, hot: int = 0, **options: Any) -> Made:
    options |= {"weights": source.weights, "seed": source.seed, "progress": False}
    if source.whole is not None:
        # Errors of rows that few codebooks are fitted to are too small, and those of other rows too large.
        options["sample"] = len(source.rows) // 2
    return encode(source.rows, hot=max(source.share(hot), min(hot, 1)), **options)
