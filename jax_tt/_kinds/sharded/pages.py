"""From rows of a table to pages, and to places in the pools of devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.mix import mix
from jax_tt._kinds.sharded.placement import Layout


class Paged(NamedTuple):
    """Rows as pages and as rows within these, int32 arrays of one shape.

    Of keys, whose rows their owners know, the page is the owner, and the row is the first of their words, of which
    ``rest`` is the second.
    """

    page: jax.Array
    row: jax.Array
    rest: jax.Array | None = None


def paged(layout: Layout, rows: jax.Array) -> Paged:
    """The pages of rows that are in range."""
    if layout.hashed:
        pages = np.asarray(layout.num_pages, rows.dtype)
        block = (rows // pages).astype(jnp.int32)
        # Within a block of neighbouring rows, one in each page, a rotation by a hash of the block.
        turn = (mix(block.astype(jnp.uint32)) % np.uint32(layout.num_pages)).astype(jnp.int32)
        page = ((rows % pages).astype(jnp.int32) + turn) % np.int32(layout.num_pages)
        return Paged(page, block)
    size = min(layout.page_size, int(jnp.iinfo(rows.dtype).max))
    size = np.asarray(size, rows.dtype)
    return Paged((rows // size).astype(jnp.int32), (rows % size).astype(jnp.int32))


def stored_rows(layout: Layout, page_table: Any, rows: Any) -> jax.Array:
    """Rows of the stored arrays, which hold the pools of all devices, that the first replicas are in."""
    page, row, _ = paged(layout, jnp.asarray(rows))
    return jnp.asarray(page_table)[page, 0] * layout.page_size + row
