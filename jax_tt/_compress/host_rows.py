"""Rows of tables on the host, for kinds of which many tables are measured: each would compile a program of its own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._ids import places
from jax_tt._kinds.coded import codec as codes_codec
from jax_tt._kinds.coded.layout import CODEBOOKS, CODES, HOT_CODES, HOT_PLACES
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable
from jax_tt._lookup.rows import lookup_rows
from jax_tt._table.options import Lookup
from jax_tt._table.rotation import ROTATION
from jax_tt._table.state import State
from jax_tt._table.table import Table


@functools.singledispatch
def host_rows(table: Table, state: State, ids: range) -> np.ndarray:
    """The rows of consecutive ids, float32 ``[n, D]``, as a lookup returns them but for rounding."""
    return np.asarray(_looked_up(table, state, np.arange(ids.start, ids.stop)))


@functools.partial(jax.jit, static_argnums=0)
def _looked_up(table: Table, state: State, ids: jax.Array) -> jax.Array:
    rows, _ = lookup_rows(table, state, ids, Lookup(dtype=jnp.float32))
    return rows


@host_rows.register
def _quantized(table: QuantizedTable, state: State, ids: range) -> np.ndarray:
    packed = _some(state[PACKED], ids).view(np.uint8)
    scale, offset = packed[:, : codec.HEADER].copy().view("<f2").astype(np.float32).T[..., None]
    codes = codec.unpacked_on_host(packed[:, codec.HEADER :], table.features, table.bits)
    levels = np.arange(1 << table.bits) if table.levels is None else np.asarray(table.levels)
    return _turned(scale * levels.astype(np.float32)[codes] + offset, state)


@host_rows.register
def _coded(table: CodedTable, state: State, ids: range) -> np.ndarray:
    books = table.codebook_rows(state) if CODEBOOKS not in state else state[CODEBOOKS]
    shape = table.column_parts, table.part_terms, 1 << table.bits, table.width
    books = np.asarray(books).astype(np.float32).reshape(shape)
    terms = table.part_terms - table.hot_terms
    rows = _sums(state[CODES], ids, books[:, :terms], table.bits)
    if table.hot and len(ids):
        hot, before = places.members_on_host(np.asarray(state[HOT_PLACES]), ids)
        some = range(before, before + int(hot.sum()))
        rows[hot] += _sums(state[HOT_CODES], some, books[:, terms:], table.bits)
    return _turned(rows, state)


def _sums(packed: Any, ids: range, books: np.ndarray, bits: int) -> np.ndarray:
    """Sums ``[n, D]`` of the rows that packed codes select in codebooks ``[parts, terms, K, D / parts]``."""
    parts, terms, _, width = books.shape
    codes = codes_codec.unpacked_on_host(_some(packed, ids), parts * terms, bits)
    codes = codes.reshape(len(codes), parts, terms)
    rows = np.zeros((len(codes), parts, width), np.float32)
    for k in range(terms):
        rows += books[np.arange(parts), k, codes[:, :, k]]
    return rows.reshape(len(codes), parts * width)


@host_rows.register
def _mixed(table: MixedTable, state: State, ids: range) -> np.ndarray:
    rows = np.empty((len(ids), table.features), np.float32)
    # Places in the result of the ids whose tables are not known yet, and which ids of all such ones they are.
    left, at = np.arange(len(ids)), ids
    pairs = zip(table.tables, table.separated(state), strict=True)
    for k, (member, part) in enumerate(pairs):
        if not len(left):
            break
        if k + 1 == len(table.tables):
            rows[left] = host_rows(member, part, at)
            break
        here, before = places.members_on_host(np.asarray(state[f"places_{k}"]), at)
        rows[left[here]] = host_rows(member, part, range(before, before + int(here.sum())))
        left = left[~here]
        at = range(at.start - before, at.start - before + len(left))
    return rows


def _some(array: Any, ids: range) -> np.ndarray:
    return np.asarray(array)[ids.start : ids.stop]


def _turned(rows: np.ndarray, state: State) -> np.ndarray:
    return rows @ np.asarray(state[ROTATION]) if ROTATION in state else rows
