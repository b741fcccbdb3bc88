"""The ids of a feature in the type that its table takes under ``jit``, which no id is lost in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jax_tt._base import reports
from jax_tt._base.arguments import mismatch, narrow
from jax_tt._base.dtypes import x64_enabled
from jax_tt._collection.host_forms import GivenIds
from jax_tt._ids.batch import HIGHEST_BIT
from jax_tt._ids.keys import split_keys
from jax_tt._ids.split_ids import SplitIds, split_on_host
from jax_tt._lookup.warn import digits_in_words
from jax_tt._table.table import Table

_MARK32 = 2**32 - 1  # padding in uint32


class Bounds(NamedTuple):
    """The treatment of ids out of range.

    Attributes:
        mode: as `Lookup.bounds`.
        reported_as: the name of the table in warnings.
    """

    mode: str
    reported_as: str | None


def table_ids(table: Table, given: GivenIds, bounds: Bounds) -> Any:
    """Ids that mean the same under ``jit``: int32, uint32 or int64, always the same one for a table, or `SplitIds`.

    Padding is -1 (all bits set). Ids out of range stay out of range, on the same side, unless the bounds refuse them.
    """
    ids, padding = given.ids, given.padding
    if table.ids.takes_keys:
        return _keys(table, ids, padding)
    if isinstance(ids, SplitIds):
        table.ids.check_split(f"{table.ids.label}ids", ids.digits.shape[-1])
        digits = ids.digits.reshape(-1, len(table.ids.radices))
        outside = _digits_outside(table, ids.digits, padding)
        _treat(table, outside, bounds, lambda at: digits_in_words(table, digits[at]))
        return ids
    outside = _outside(ids, table.num_embeddings, padding)
    _treat(table, outside, bounds, lambda at: f"id {ids.reshape(-1)[at]}")
    if table.num_embeddings < HIGHEST_BIT:
        return _marked(narrow(ids), padding, np.int32(-2))
    if len(table.ids.radices) > 1:
        return _digits(table, ids, padding)
    if x64_enabled():
        return _marked(np.minimum(ids, _last(ids.dtype)).astype(np.int64), padding, np.int64(-2))
    return _unsigned(table, ids, padding, outside, bounds)


def _outside(ids: np.ndarray, rows: int, padding: np.ndarray | None) -> np.ndarray | None:
    """Which ids are out of range; None if no id is."""
    if not ids.size:
        return None
    last = min(rows - 1, int(np.iinfo(ids.dtype).max))
    if padding is None and ids.min() >= 0 and ids.max() <= last:
        return None
    outside = (ids < 0) | (ids > np.asarray(last, ids.dtype))
    if padding is not None:
        outside &= ~padding
    return outside if outside.any() else None


def _digits_outside(
    table: Table, digits: np.ndarray, padding: np.ndarray | None
) -> np.ndarray | None:
    factors = np.asarray(table.ids.radices)
    inside = ((digits >= 0) & (digits < factors)).all(axis=-1)
    row = np.zeros(inside.shape, np.int64)
    for k, factor in enumerate(table.ids.radices):
        row = row * factor + np.where(inside, digits[..., k], 0)
    outside = ~inside | (row >= table.num_embeddings)
    if padding is not None:
        outside &= ~padding
    return outside if outside.any() else None


def _treat(
    table: Table, outside: np.ndarray | None, bounds: Bounds, words: Callable[[int], str]
) -> None:
    """Raises for ids out of range, or warns of them, as the bounds say."""
    if outside is None or bounds.mode not in ("error", "warn"):
        return
    positions = np.flatnonzero(outside.reshape(-1))
    position, count, rows = int(positions[0]), len(positions), table.num_embeddings
    if bounds.mode == "warn":
        reports.report(bounds.reported_as or "", rows, count, words(position), position)
        return
    more = f" ({count} ids of the batch are out of range)" if count > 1 else ""
    raise ValueError(
        f"{table.ids.label}ids: got {words(position)} at position {position}{more}; expected 0 to {rows - 1}. To train "
        "on without such ids, and count them, use bounds='warn'."
    )


def _marked(ids: np.ndarray, padding: np.ndarray | None, stray: Any) -> np.ndarray:
    """Ids with -1 for padding, and ``stray`` for other ids of -1."""
    if padding is None:
        return ids
    return np.where(padding, np.asarray(-1, ids.dtype), np.where(ids == -1, stray, ids))


def _keys(table: Table, ids: Any, padding: np.ndarray | None) -> SplitIds:
    words = ids.digits if isinstance(ids, SplitIds) else split_keys(ids).digits
    if words.shape[-1] != 2:
        got = f"SplitIds of {words.shape[-1]} digits"
        raise mismatch(f"{table.ids.label}ids", got, "2, as from dynamic.split_keys")
    if padding is None:
        return SplitIds(words)
    stray = (words == -1).all(axis=-1) & ~padding
    if stray.any():
        at = int(np.flatnonzero(stray.reshape(-1))[0])
        got = f"the key with all bits set at position {at}, which marks padding in rectangles"
        expected = "other keys, or lengths, {'ids': ids, 'lengths': lengths}"
        raise mismatch(f"{table.ids.label}ids", got, expected)
    return SplitIds(np.where(padding[..., None], np.int32(-1), words))


def _digits(table: Table, ids: np.ndarray, padding: np.ndarray | None) -> SplitIds:
    table.ids.check_split(f"{table.ids.label}ids", len(table.ids.radices))
    digits = split_on_host(ids, table.num_embeddings, table.ids.radices).digits
    if padding is not None:
        # All digits -1 would be padding; the first one tells a negative id.
        digits[..., 1:][(ids < 0) & ~padding] = 0
        digits[padding] = -1
    return SplitIds(digits)


def _unsigned(
    table: Table,
    ids: np.ndarray,
    padding: np.ndarray | None,
    outside: np.ndarray | None,
    bounds: Bounds,
) -> np.ndarray:
    """Row numbers of 2**31 or more in uint32, where ids out of range become the largest id that is no padding."""
    unfit = outside is not None and (
        table.num_embeddings >= _MARK32
        or (bounds.mode == "clip" and bool((ids[outside] < 0).any()))
    )
    wide = ids if padding is None else np.where(padding, 0, ids)
    if unfit or (wide.size and wide.max() >= _MARK32 and outside is None):
        got = f"ids that 32 bits do not hold for a table of {table.num_embeddings} rows"
        raise mismatch(f"{table.ids.label}ids", got, "jax_enable_x64, or smaller ids")
    result = (wide if outside is None else np.where(outside, 0, wide)).astype(np.uint32)
    if outside is not None:
        result[outside] = _MARK32 - 1
    return result if padding is None else np.where(padding, np.uint32(_MARK32), result)


def _last(dtype: Any) -> Any:
    return np.asarray(min(np.iinfo(dtype).max, 2**63 - 1), dtype)
