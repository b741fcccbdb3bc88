"""Maps ids to rows on the device, and columns of scores back to the order of ids."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import narrow
from jax_tt._base.dtypes import x64_enabled
from jax_tt._ids.bags import as_ids, id_array
from jax_tt._ids.explicit import over_explicit_axes, spec_of
from jax_tt._ids.split_ids import SplitIds
from jax_tt._ids.stored_order import LAST_PACKED, StoredRows


def type_of_ids(num_embeddings: int) -> Any:
    """An integer type for all ids of an order and for padding, which is negative."""
    return np.int32 if num_embeddings <= LAST_PACKED else np.int64


def mapped_ids(rows: StoredRows, ids: Any, name: str = "ids") -> jax.Array:
    """Row of every id; padding and ids out of range are returned unchanged."""
    if isinstance(ids, SplitIds):
        raise TypeError(
            f"{name}: got SplitIds for a table with an id_order, which maps integers. Map them on the host first, "
            "shape.split_ids(order.apply(ids)), and build the layer with id_order=None."
        )
    array = id_array(ids, name)
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and not x64_enabled():
        # This changes only ids out of range, and they stay so: without x64 the table has fewer than 2**31 - 1 rows.
        ids = narrow(array) if array.itemsize == 8 and array.size else ids
    array = jnp.asarray(as_ids(ids, name))
    last = rows.num_embeddings - 1
    if last > int(jnp.iinfo(array.dtype).max):
        if array.dtype == jnp.uint32:
            raise TypeError(
                f"{name}: got uint32 ids for an order of {rows.num_embeddings} ids; expected int64 ids, e.g. "
                "ids.astype(jnp.int64)."
            )
        array = array.astype(type_of_ids(rows.num_embeddings))

    def look_up(operands: tuple[StoredRows, jax.Array]) -> jax.Array:
        rows, ids = operands
        inside = jnp.clip(ids, 0, last)
        return jnp.where(inside == ids, rows.at(inside).astype(ids.dtype), ids)

    return over_explicit_axes(look_up, (rows, array), lambda: spec_of(array))


def columns_by_id(rows: StoredRows, scores: jax.Array) -> jax.Array:
    """Scores ``[..., N]`` of rows in the order of ids."""

    def pick(operands: tuple[StoredRows, jax.Array]) -> jax.Array:
        rows, scores = operands
        return scores.at[..., rows.whole()].get(mode="promise_in_bounds", unique_indices=True)

    return over_explicit_axes(pick, (rows, scores), lambda: spec_of(scores))
