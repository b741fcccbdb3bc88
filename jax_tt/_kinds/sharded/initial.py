"""Initial rows of a large table, a block at a time on every device.

JAX draws entry k of an array from its key and k alone (``jax_threefry_partitionable``), so that a device can draw rows
without the rows before them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_tt._directories.initial import threefry
from jax_tt._ids.placement import Layout
from jax_tt._kinds.sharded.move import Blocks
from jax_tt._kinds.sharded.programs import Local, over_devices
from jax_tt._native.rows import RowTable
from jax_tt._table.initial_rows import default_embedding_init

# Rows that a device draws at a time.
_BLOCK = 2**12


def can_draw_rows(table: Any, key: jax.Array) -> bool:
    """Whether `drawn_rows` equals ``table.init``: other initialisers may depend on the shape of the table."""
    return (
        getattr(table, "embedding_init", None) is default_embedding_init
        and getattr(jax.config, "jax_threefry_partitionable", False)
        and str(jax.random.key_impl(key)) in ("threefry2x32", "fry")
    )


def drawn_rows(
    table: RowTable,
    layout: Layout,
    page_table: jax.Array,
    mesh: Mesh,
    axes: tuple[str, ...],
    key: jax.Array,
) -> jax.Array:
    """The parameter of a table in a layout, ``[devices * rows, D]``; no device has more than its pools and a block.

    Rows are sharded over ``axes`` of the mesh, all of whose axes are automatic.
    """
    local = Local(_drawn_on_device, (table, layout, axes))
    return over_devices(local, mesh, (P(), P()), P(axes))(jax.random.key_data(key), page_table)


def _drawn_on_device(
    table: RowTable,
    layout: Layout,
    axes: tuple[str, ...],
    words: jax.Array,
    page_table: jax.Array,
) -> jax.Array:
    dtype = jnp.dtype(table.param_dtype)

    def values(rows: jax.Array, here: jax.Array) -> jax.Array:
        return jnp.where(here[:, None], _drawn(table, words, rows), jnp.zeros((), dtype))

    start = jnp.zeros((layout.rows, table.features), dtype)
    blocks = Blocks(layout, min(layout.rows, _BLOCK), table.num_embeddings, axes)
    return blocks.filled(start, page_table, values)


def _drawn(table: RowTable, words: jax.Array, rows: jax.Array) -> jax.Array:
    def one(high: jax.Array, low: jax.Array) -> jax.Array:
        data = jnp.concatenate([words, jnp.stack([high, low])])
        key = jax.random.wrap_key_data(data, impl=_from_entry())
        return default_embedding_init(key, (1, table.features), table.param_dtype)[0]

    return jax.vmap(one)(*_product(rows, table.features))


@functools.cache
def _from_entry() -> Any:
    """A generator whose keys are keys of threefry and the number of the first entry, as high and low word."""

    def bits(data: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        low = data[3] + lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        high = data[2] + (low < data[3]).astype(jnp.uint32)
        first, second = threefry(data[0], data[1], high, low)
        return (first ^ second).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])

    def refused(*args: Any) -> Any:
        raise NotImplementedError("The default initialiser draws once.")

    return define_prng_impl(
        key_shape=(4,),
        seed=refused,
        split=refused,
        random_bits=bits,
        fold_in=refused,
        name="threefry_from_entry",
        tag="tfe",
    )


def _product(rows: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """``rows * columns`` as high and low words."""
    if rows.dtype.itemsize == 8:
        product = rows.astype(jnp.uint64) * np.uint64(columns)
        return (product >> np.uint64(32)).astype(jnp.uint32), product.astype(jnp.uint32)
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    rows = rows.astype(jnp.uint32)
    upper, lower = rows >> half, rows & mask
    times_upper, times_lower = np.uint32(columns >> 16), np.uint32(columns & 0xFFFF)
    low = lower * times_lower
    middle = upper * times_lower + (low >> half)
    other = lower * times_upper + (middle & mask)
    high = upper * times_upper + (middle >> half) + (other >> half)
    return high, (other << half) | (low & mask)
