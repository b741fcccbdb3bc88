"""Sharding of quantized tables: a row travels as its codes, scale and offset."""

from __future__ import annotations

from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._table.sharding import rows_to_shard


@rows_to_shard.register(QuantizedTable)
def quantized_rows(table: QuantizedTable) -> dict[str, float | None]:
    if table.rotated:
        raise ValueError(
            f"{table.ids.label}rotated: got a table with a rotation, of which every device would need all; expected "
            "QuantizedTable(..., rotated=False). Multiply the sums that are looked up by the rotation instead."
        )
    slots = () if table.update is None else table.update.optimizer.slots
    (names,) = table.spec.slot_names
    return dict.fromkeys(table.spec.param_names) | {
        name: slot.init for name, slot in zip(names, slots, strict=True)
    }
