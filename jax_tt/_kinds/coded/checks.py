"""Checks of the sizes, the constant arrays and the codes of coded tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_int, as_positive, one_of
from jax_tt._base.storage import check_param_dtype
from jax_tt._ids import places
from jax_tt._kinds.coded import codec
from jax_tt._kinds.coded.names import HOT_PLACES
from jax_tt._table.options import check_update
from jax_tt._table.rotation import check_rotation
from jax_tt._tt.shape import TTShape

if TYPE_CHECKING:
    from jax_tt._kinds.coded.table import CodedTable
    from jax_tt._table.types import State

KINDS = ("product", "additive")


def check_fields(table: CodedTable) -> None:
    """Raises for fields of a table that do not fit together."""
    as_positive("num_embeddings", table.num_embeddings)
    as_positive("features", table.features)
    as_positive("num_codes", table.num_codes)
    one_of("kind", table.kind, KINDS)
    check_param_dtype(table.param_dtype)
    check_update(table.update)
    if not 1 <= as_int("bits", table.bits) <= codec.MAX_BITS:
        raise ValueError(
            f"{table.ids.label}bits: got {table.bits}; expected 1 to {codec.MAX_BITS}."
        )
    if table.num_codes % as_positive("terms", table.terms):
        raise ValueError(
            f"{table.ids.label}terms: got {table.terms}; expected a divisor of num_codes={table.num_codes}."
        )
    if table.kind == "additive" and table.terms > 1:
        raise ValueError(
            f"{table.ids.label}terms: got {table.terms} with kind='additive', which adds all codes; expected 1."
        )
    if table.features % table.column_parts:
        times = "" if table.terms == 1 else f"{table.terms} times "
        raise ValueError(
            f"{table.ids.label}num_codes: got {table.num_codes}; expected {times}a divisor of "
            f"features={table.features}, "
            "as every part of a product gives as many columns. Additive codes may be any number."
        )
    if not 0 <= as_int("hot", table.hot) <= table.num_embeddings:
        raise ValueError(
            f"{table.ids.label}hot: got {table.hot}; expected 0 to num_embeddings={table.num_embeddings}."
        )
    if (as_int("hot_terms", table.hot_terms) > 0) != (table.hot > 0) or table.hot_terms < 0:
        raise ValueError(
            f"{table.ids.label}hot_terms: got {table.hot_terms} with hot={table.hot}; expected a positive number with "
            "hot ids, and 0 without."
        )
    if table.num_entries > 2**31 - 1:
        of_hot = f" and hot_terms={table.hot_terms}" if table.hot else ""
        raise ValueError(
            f"{table.ids.label}num_codes: got {table.num_codes}{of_hot}, which are {table.num_entries} "
            f"codebook rows at {table.bits} bits; expected fewer than 2**31."
        )
    _check_shape(table)


def _check_shape(table: CodedTable) -> None:
    shape = table.codebook_shape
    if shape is None:
        return
    if not isinstance(shape, TTShape):
        raise TypeError(
            f"{table.ids.label}codebook_shape: got {shape!r}; expected a TTShape of the rows of all codebooks, "
            f"jax_tt.TTShape.suggest({table.num_entries}, {table.width}, ranks), or None."
        )
    if (shape.num_embeddings, shape.features) != (table.num_entries, table.width):
        raise ValueError(
            f"{table.ids.label}codebook_shape: got {shape.num_embeddings} x {shape.features}; expected "
            f"{table.num_entries} x {table.width}, the rows of all codebooks and their columns."
        )


def check_constants(table: CodedTable, state: State) -> None:
    """Raises for constant arrays of other types or shapes."""
    for name, shape in table.code_shapes.items():
        own = state[name]
        if own.dtype != jnp.uint8 or own.shape != shape:
            raise ValueError(
                f"{table.ids.label}{name}: got {own.dtype} of shape {own.shape}; expected uint8 of shape {shape}, "
                f"codes of {table.bits} bits. jax_tt.encode makes them of rows, CodedTable.with_codes of integers."
            )
    if table.hot:
        own, shape = state[HOT_PLACES], places.shape_of(table.num_embeddings)
        if own.dtype != jnp.uint32 or own.shape != shape:
            raise ValueError(
                f"{table.ids.label}{HOT_PLACES}: got {own.dtype} of shape {own.shape}; expected uint32 of shape "
                f"{shape}."
            )
    check_rotation(table, state)


def check_codes(table: CodedTable, codes: np.ndarray) -> None:
    """Raises for codes ``[N, m]`` of which one is no row of its codebook, or with another number of hot ids."""
    # Codes of hot ids may be absent.
    absent = np.zeros(codes.shape, bool)
    if table.hot:
        last = np.arange(table.all_codes) % table.part_terms >= table.part_terms - table.hot_terms
        absent = (codes == -1) & last
        hot = (~absent[:, last]).all(axis=1)
        if hot.sum() != table.hot or not absent[~hot][:, last].all():
            raise ValueError(
                f"{table.ids.label}codes: got {hot.sum()} ids with all codes of hot ids; expected {table.hot}, and -1 "
                "for all these codes of the others."
            )
    wrong = ~absent & ((codes < 0) | (codes >= 1 << table.bits))
    if wrong.any():
        row, k = map(int, np.argwhere(wrong)[0])
        raise ValueError(
            f"{table.ids.label}codes: code {k} of row {row} is {codes[row, k]}; expected 0 to "
            f"{(1 << table.bits) - 1}, as codes have {table.bits} bits."
        )
