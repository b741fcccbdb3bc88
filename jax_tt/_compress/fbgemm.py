"""`from_fbgemm` and `to_fbgemm`: rows of FBGEMM's inference operators."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, as_positive, expect, mismatch, one_of
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.codec import check_headers
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable, check_bits, require_quantized
from jax_tt._table.copies import freeze
from jax_tt._table.state import State

HEADERS = ("start", "end")
_HINT = (
    ". 'start' is the layout of IntNBitTableBatchedEmbeddingBagsCodegen, 'end' that of "
    "FloatToFusedNBitRowwiseQuantizedSBHalf"
)


def from_fbgemm(
    rows: Any,
    features: int,
    bits: int,
    *,
    header: str = "start",
    alignment: int = 1,
    name: str | None = None,
) -> tuple[QuantizedTable, dict[str, jax.Array]]:
    """A `QuantizedTable` of quantized rows of FBGEMM, and its state. The numbers stay as they are.

    Args:
        rows: uint8 ``[N, W]``, e.g. ``layer.split_embedding_weights(split_scale_shifts=False)[k][0]``.
        features: number of columns, D.
        bits: bits of a number: 8, 4 or 2.
        header: where a row has its scale and its bias, both in float16: at the ``"start"``, as in
            ``IntNBitTableBatchedEmbeddingBagsCodegen``, or at the ``"end"``, as
            ``torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf`` returns them.
        alignment: ``row_alignment`` of the operator, 1 on the CPU and 16 on a GPU: rows with the header at the start
            have ``4 + ceil(bits * features / 8)`` bytes and padding up to the next multiple, which is not read.
        name: of the table in error messages.

    Returns:
        The table and its state.

    Raises:
        ValueError: the rows have another type or size, or a scale or bias that is not finite, as rows of another layout
            have.

    >>> import jax.numpy as jnp, jax_tt, numpy as np
    >>> table, state = jax_tt.quantize(jnp.eye(5, 16), bits=4)
    >>> rows = jax_tt.compression.to_fbgemm(table, state)
    >>> rows.shape, jax_tt.compression.from_fbgemm(rows, 16, 4)[0] == table
    ((5, 12), True)
    """
    _check_fbgemm_bits(check_bits(bits))
    one_of("header", header, HEADERS, _HINT)
    width = codec.row_bytes(as_positive("features", features), bits)
    padding = _padding(width, header, alignment)
    given = np.asarray(as_array("rows", rows))
    if given.dtype != np.uint8 or given.ndim != 2 or 0 in given.shape:
        raise mismatch("rows", given, "uint8 of shape [N, W], none 0")
    if given.shape[1] != width + padding:
        parts = f"{features} numbers of {bits} bits, 4 bytes of scale and bias, and {padding} of padding"
        expected = f"{width + padding}: {parts} for alignment={alignment}"
        raise mismatch("rows", f"{given.shape[1]} bytes a row", expected)
    at_start = header == "start"
    packed = given[:, :width].copy() if at_start else np.roll(given, codec.HEADER, axis=1)
    table = QuantizedTable(given.shape[0], features, bits, name=name)
    check_headers(f"{table.ids.label}rows", packed, 0)
    return table, {PACKED: jnp.asarray(packed)}


def to_fbgemm(
    table: QuantizedTable, state: State, *, header: str = "start", alignment: int = 1
) -> np.ndarray:
    """The rows of a quantized table in the layout of FBGEMM's inference operators.

    Args:
        table, state: the table, with 8, 4 or 2 bits a number.
        header: as in `from_fbgemm`.
        alignment: as in `from_fbgemm`; padding is 0.

    Returns:
        uint8 ``[N, W]`` on the host.

    Raises:
        ValueError: FBGEMM has no such rows, or the state is not one of the table.

    >>> import jax.numpy as jnp, jax_tt
    >>> table, state = jax_tt.quantize(jnp.eye(5, 16), bits=4)
    >>> jax_tt.compression.to_fbgemm(table, state, alignment=16).shape
    (5, 16)
    """
    _, read_only = freeze(require_quantized(table), state)
    _check_fbgemm_bits(table.bits)
    if table.levels is not None or table.rotated:
        has = "levels that are not uniform" if table.levels is not None else "a rotation"
        expected = (
            f"one of jax_tt.quantize(rows, {table.bits}, clip=True), as FBGEMM's rows have none"
        )
        raise mismatch(f"{table.ids.label}table", f"a table with {has}", expected)
    one_of("header", header, HEADERS, _HINT)
    packed = np.asarray(read_only[PACKED])
    padding = _padding(table.row_bytes, header, alignment)
    if header == "end":
        return np.roll(packed, -codec.HEADER, axis=1)
    return np.pad(packed, ((0, 0), (0, padding)))


def _padding(width: int, header: str, alignment: int) -> int:
    """Bytes that follow a row."""
    if as_positive("alignment", alignment) != 1 and header == "end":
        got = f"{alignment} with header='end'"
        raise mismatch("alignment", got, "1, since such rows have no padding")
    return -width % alignment


def _check_fbgemm_bits(bits: int) -> None:
    expect(bits != 3, "bits", "3", "8, 4 or 2, since FBGEMM has no rows of 3 bits")
