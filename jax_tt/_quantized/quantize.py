"""`quantize`: rows of numbers of a few bits, from trained rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._host_table import host_table
from jax_tt._quantized import codec
from jax_tt._quantized.table import PACKED, QuantizedTable, check_bits
from jax_tt._tables.checks import STORAGE
from jax_tt._tables.options import Update

# Numbers that are rounded at a time.
_BLOCK = 2**22


def quantize(
    rows: Any, bits: int = 8, *, update: Update | None = None, name: str | None = None
) -> tuple[QuantizedTable, dict[str, jax.Array]]:
    """A `QuantizedTable` of these rows, and its state.

    The levels of a row are uniform: the lowest is the minimum of the row, rounded to float16, and the highest is about
    the maximum. Every number is rounded to the nearest level. Rows of which all numbers are levels are unchanged.

    It runs on the host and reads a block of rows at a time, so that ``rows`` may be a memory map.

    Args:
        rows: ``[N, D]`` in float32, float16, bfloat16 or float64, e.g. ``state["embedding"]`` of a `DenseTable`, or
            ``table.to_dense(state)`` of any kind.
        bits: bits of a number: 8, 4, 3 or 2.
        update: `Update` of a table that is trained on, with 8 or 4 bits; None for a read-only table.
        name: of the table in error messages.

    Returns:
        The table and its state.

    Raises:
        ValueError: the rows have another shape or type, are not finite, or exceed the range of float16, in which scale
            and offset are stored.

    >>> import jax.numpy as jnp, jax_tt
    >>> table, state = jax_tt.quantize(jnp.array([[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]]), bits=2)
    >>> state["packed"].dtype.name, table.to_dense(state).tolist()
    ('uint8', [[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    """
    check_bits(bits)
    given = host_table("rows", rows)
    if len(given.shape) != 2 or 0 in given.shape:
        raise ValueError(f"rows: got shape {tuple(given.shape)}; expected [N, D], none 0.")
    dtype = jnp.dtype(given.dtype)
    if dtype.name not in STORAGE:
        raise ValueError(f"rows: got dtype {dtype}; expected one of {', '.join(STORAGE)}.")
    table = QuantizedTable(*map(int, given.shape), bits=bits, update=update, name=name)
    packed = np.empty((table.num_embeddings, table.row_bytes), np.uint8)
    step = max(1, _BLOCK // table.features)
    for start in range(0, table.num_embeddings, step):
        block = np.asarray(given[start : start + step]).astype(np.float32)
        own = packed[start : start + step]
        own[:] = _encoded(block, bits)
        check_headers(f"{table.label}rows", own, start, block)
    params = {PACKED: jnp.asarray(packed if update is None else packed.view(np.float32))}
    return table, params | table.init_rest(params)


@functools.partial(jax.jit, static_argnums=1)
def _encoded(rows: jax.Array, bits: int) -> jax.Array:
    return codec.encoded(rows, bits)


def check_headers(
    argument: str, packed: np.ndarray, start: int, rows: np.ndarray | None = None
) -> None:
    """Raises if a scale or an offset is not finite.

    Args:
        argument: what the error begins with.
        packed: rows uint8 ``[n, W]``.
        start: the number of the first.
        rows: what they were made of, if that is known.
    """
    headers = np.ascontiguousarray(packed[:, : codec.HEADER]).view("<f2")
    bad = ~np.isfinite(headers).all(axis=1)
    if not bad.any():
        return
    first = int(np.argmax(bad))
    where = f"{argument}: row {start + first}"
    if rows is None:
        scale, offset = headers[first].tolist()
        raise ValueError(
            f"{where} has the scale {scale} and the offset {offset}; expected finite numbers. The rows may have "
            "another layout, or another number of bits or features."
        )
    if not np.isfinite(rows[first]).all():
        raise ValueError(f"{where} holds NaN or infinity; expected finite numbers.")
    raise ValueError(
        f"{where} has values from {rows[first].min()} to {rows[first].max()}; expected a range whose minimum and step "
        "are within +-65504, since scale and offset are stored in float16. Divide the rows by a constant."
    )
