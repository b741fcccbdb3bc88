"""The codes of given rows in given codebooks, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jax_tt._base.arguments import as_array, expect, expect_ids
from jax_tt._base.host_table import host_table
from jax_tt._base.rows_of_arrays import finite
from jax_tt._kinds.coded import codec
from jax_tt._kinds.coded.codebooks import choose_codes
from jax_tt._kinds.coded.layout import CodeLayout

# Rows that are encoded at a time.
BLOCK = 2**14


def encoded_rows(
    layout: CodeLayout,
    codebooks: Any,
    rotation: Any,
    rows: Any,
    hot: np.ndarray | None,
    step: Callable[[], object] = lambda: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes uint8 ``[n, W]`` of rows ``[n, D]``, and those that only hot rows have, ``[h, V]``.

    Reads the rows in blocks and calls ``step`` after each. ``codebooks`` are their rows ``[m * 2 ** bits, width]``,
    ``rotation`` the matrix of a rotated table or None, ``hot`` which rows are hot, bool ``[n]``, or None for no row.
    """
    shape = layout.column_parts, -1, 1 << layout.bits, layout.width
    codebooks = np.asarray(codebooks, np.float32).reshape(shape)
    terms, n = layout.part_terms - layout.hot_terms, rows.shape[0]
    hot = np.zeros(n, bool) if hot is None else hot
    packed = np.empty((n, layout.row_bytes), np.uint8)
    of_hot = np.empty((int(hot.sum()), layout.hot_bytes), np.uint8)
    before = 0
    for start in range(0, n, BLOCK):
        ids = range(start, min(start + BLOCK, n))
        block, here = (
            finite(f"{layout.label}rows", rows[start : ids.stop], ids),
            hot[start : ids.stop],
        )
        if rotation is not None:
            block = block @ np.asarray(rotation).T
        codes = np.empty((len(block), layout.num_codes), np.int32)
        codes[~here] = choose_codes(block[~here], codebooks[:, :terms])
        if here.any():
            both = choose_codes(block[here], codebooks).reshape(-1, *codebooks.shape[:2])
            codes[here] = both[:, :, :terms].reshape(len(both), -1)
            more = both[:, :, terms:].reshape(len(both), -1)
            of_hot[before : before + len(both)] = codec.packed_on_host(more, layout.bits)
            before += len(both)
        packed[start : ids.stop] = codec.packed_on_host(codes, layout.bits)
        step()
    return packed, of_hot


def checked_rows(layout: CodeLayout, rows: Any, ids: Any) -> tuple[Any, np.ndarray]:
    """Given rows and the ids that they belong to, all of them for None; raises if they do not fit."""
    given, n = host_table(f"{layout.label}rows", rows), layout.num_embeddings
    at = np.arange(n) if ids is None else np.asarray(as_array(f"{layout.label}ids", ids))
    expect(at.ndim == 1 and at.dtype.kind in "iu", f"{layout.label}ids", at, "integers [n]")
    expect_ids(f"{layout.label}ids", at, n)
    shape = len(at), layout.features
    expect(tuple(given.shape) == shape, f"{layout.label}rows", given, shape)
    return given, at
