"""The constant arrays of a coded table: which codes an id has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_tt._base.arguments import as_array, mismatch
from jax_tt._ids import places
from jax_tt._kinds.coded import codec
from jax_tt._kinds.coded.layout import CODES, HOT_CODES, HOT_PLACES, CodeLayout
from jax_tt._table.state import State


def codes_at(layout: CodeLayout, constants: State, ids: jax.Array) -> jax.Array:
    """Codes int32 ``[..., m]`` of ids, which must be in range; -1 where an id that is not hot has none."""
    codes = codec.unpacked(_rows_at(constants[CODES], ids), layout.num_codes, layout.bits)
    if not layout.hot:
        return codes
    hot, place = places.find_members(constants[HOT_PLACES], ids)
    packed = _rows_at(constants[HOT_CODES], jnp.where(hot, place, 0))
    more = codec.unpacked(packed, layout.column_parts * layout.hot_terms, layout.bits)
    more = jnp.where(hot[..., None], more, -1)
    by_term = [
        some.reshape(*ids.shape, layout.column_parts, some.shape[-1] // layout.column_parts)
        for some in (codes, more)
    ]
    return jnp.concatenate(by_term, axis=-1).reshape(*ids.shape, layout.all_codes)


def entries_at(layout: CodeLayout, constants: State, ids: jax.Array) -> jax.Array:
    """Codebook rows int32 ``[..., m]`` of ids, which must be in range; -1 where there is no code."""
    codes = codes_at(layout, constants, ids)
    codebook = lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1)
    entries = codes + (codebook << layout.bits)
    return jnp.where(codes < 0, -1, entries) if layout.hot else entries


def constants_of(layout: CodeLayout, codes: Any) -> dict[str, Any]:
    """The constant arrays with codes ``[N, m]`` as `codes_at` returns them."""
    codes = as_array(f"{layout.label}codes", codes)
    shape = layout.num_embeddings, layout.all_codes
    if codes.shape != shape or codes.dtype.kind not in "iu":
        raise mismatch(f"{layout.label}codes", codes, f"integers of shape {shape}")
    if not isinstance(codes, Tracer):
        _check_codes(layout, np.asarray(codes))
    terms = layout.part_terms - layout.hot_terms
    parts = jnp.asarray(codes).reshape(shape[0], layout.column_parts, layout.part_terms)
    constants = {CODES: codec.packed(parts[..., :terms].reshape(shape[0], -1), layout.bits)}
    if layout.hot:
        more = parts[..., terms:].reshape(shape[0], -1)
        hot = more[:, 0] >= 0
        (rows,) = jnp.nonzero(hot, size=layout.hot)
        constants[HOT_CODES] = codec.packed(more[rows], layout.bits)
        constants[HOT_PLACES] = places.mark_members(hot)
    return constants


def _check_codes(layout: CodeLayout, codes: np.ndarray) -> None:
    """Raises for a code that is no row of its codebook, or for another number of hot ids."""
    absent = np.zeros(codes.shape, bool)
    if layout.hot:
        terms = np.arange(layout.all_codes) % layout.part_terms
        last = terms >= layout.part_terms - layout.hot_terms
        absent = (codes == -1) & last
        hot = (~absent[:, last]).all(axis=1)
        if hot.sum() != layout.hot or not absent[~hot][:, last].all():
            got = f"{hot.sum()} ids with all codes of hot ids"
            expected = f"{layout.hot}, and -1 for all these codes of the others"
            raise mismatch(f"{layout.label}codes", got, expected)
    wrong = ~absent & ((codes < 0) | (codes >= 1 << layout.bits))
    if wrong.any():
        row, k = map(int, np.argwhere(wrong)[0])
        got, most = f"{codes[row, k]} for code {k} of row {row}", (1 << layout.bits) - 1
        expected = f"0 to {most}, as codes have {layout.bits} bits"
        raise mismatch(f"{layout.label}codes", got, expected)


def _rows_at(codes: jax.Array, ids: jax.Array) -> jax.Array:
    # Wrapping negative ids adds the number of rows, which may overflow the type of the ids.
    return codes.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
