"""Which tables can be divided over devices, and which of their arrays."""

from __future__ import annotations

import jax.numpy as jnp

from jax_tt import optimizers
from jax_tt._kinds.hashed.table import HashTable
from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._kinds.sharded.placement import Layout
from jax_tt._table.options import Update
from jax_tt._table.table import Table

# Rules whose step of an element depends on the gradients of this element alone.
_ELEMENTWISE = (
    optimizers.SGD,
    optimizers.Adagrad,
    optimizers.AdagradMomentum,
    optimizers.Adam,
    optimizers.FTRL,
)


def can_be_sharded(table: Table) -> bool:
    """Whether a `ShardedTable` can divide the rows of a table."""
    if isinstance(table, HashTable):
        return isinstance(table.missing, str) and can_be_sharded(table.table)
    if isinstance(table, QuantizedTable):
        return not table.rotated
    by_rows = bool(table.row_names) and table.row_names == table.param_names
    return by_rows and table.cached is None


def can_be_placed(table: Table) -> bool:
    """Whether a plan can choose which devices have the rows of a table."""
    return can_be_sharded(table) and not table.ids.takes_keys


def check_kind(table: Table) -> None:
    """Raises for a table whose rows cannot be divided."""
    if can_be_sharded(table):
        return
    if isinstance(table, HashTable) and not isinstance(table.missing, str):
        raise ValueError(
            f"{table.ids.label}missing: got {table.missing!r} for a hash table that is divided over devices; expected "
            "'initial' or 'zeros', since one device alone has the row of a number."
        )
    if isinstance(table, QuantizedTable):
        raise ValueError(
            f"{table.ids.label}rotated: got a table with a rotation, of which every device would need all; expected "
            "QuantizedTable(..., rotated=False). Multiply the sums that are looked up by the rotation instead."
        )
    raise TypeError(
        f"{table.ids.label}table: got a {type(table).__name__}; expected a DenseTable, a QuantizedTable, or a "
        "HashTable of "
        "a DenseTable, whose rows can be divided. The cores of a TTTable are small, and every device has all of them, "
        "as it has of row caches and orders of ids: leave them as they are."
    )


def divided_arrays(table: Table) -> dict[str, float | None]:
    """The arrays of which entry k is that of row k alone, as `Table.row_arrays`."""
    if isinstance(table, HashTable):
        return table.table.row_arrays
    if not isinstance(table, QuantizedTable):
        return table.row_arrays
    slots = () if table.update is None else table.update.optimizer.slots
    (names,) = table.slot_names
    return dict.fromkeys(table.param_names) | {
        name: slot.init for name, slot in zip(names, slots, strict=True)
    }


def check_layout(table: Table, layout: Layout) -> None:
    """Raises for a table that cannot be divided in this way."""
    if isinstance(table, HashTable):
        _check_hashed(table, layout)
    update = table.update
    if update is not None:
        _check_rule(table, update)
        storage = table.rounded_type or getattr(table, "param_dtype", jnp.float32)
        narrow = update.rounds_stochastically(storage)
        if narrow and not layout.same_places:
            raise ValueError(
                f"{table.ids.label}placement: got replicas at different places of their devices, whose rows would be "
                "rounded differently at random; expected Update(..., stochastic_rounding=False), "
                "Placement.replicated(), or no replicas."
            )
    if layout.columns > 1:
        _check_columns(table, layout.columns)


def _check_hashed(table: HashTable, layout: Layout) -> None:
    if not layout.hashed:
        raise ValueError(
            f"{table.ids.label}placement: got rows that are divided by their numbers for a HashTable; expected "
            "Placement.hashed(), as the hash of a key says which device has its row."
        )
    if table.num_embeddings % (layout.devices * table.ways):
        unit = layout.devices * table.ways
        raise ValueError(
            f"{table.ids.label}capacity: got {table.num_embeddings} rows for {layout.devices} devices and sets of "
            f"{table.ways} rows; expected a multiple of {unit}, e.g. {-(-table.num_embeddings // unit) * unit}."
        )

    if table.waiting_sets % layout.devices:
        got, unit = table.waiting_sets * table.ways, layout.devices * table.ways
        raise ValueError(
            f"{table.ids.label}admission: got {table.admission!r}, which is room for {got} waiting keys, for "
            f"{layout.devices} devices and sets of {table.ways} keys; expected a multiple of {unit}, e.g. "
            f"waiting={-(-got // unit) * unit}."
        )


def _check_rule(table: Table, update: Update) -> None:
    rule = update.optimizer
    if rule.changes_all(jnp.zeros(())) is not None:
        raise ValueError(
            f"{table.ids.label}optimizer: {type(rule).__name__} changes all rows between steps; expected a rule that "
            "changes the rows of a batch."
        )
    if any(slot.rows is not None for slot in rule.slots):
        raise ValueError(
            f"{table.ids.label}optimizer: {type(rule).__name__} has state that is not divided by rows; expected a rule "
            "with one entry per row or per element."
        )
    if rule.scales_reads:
        raise ValueError(
            f"{table.ids.label}optimizer: {type(rule).__name__} scales the rows that are read, by state that is on "
            "other devices; expected another rule, e.g. RowWiseAdagrad."
        )


def _check_columns(table: Table, columns: int) -> None:
    if not table.row_names:  # rows are coded as a whole
        raise TypeError(
            f"{table.ids.label}placement: got column shards of a {type(table).__name__}; expected a DenseTable, or "
            "whole rows."
        )
    if table.features % columns:
        raise ValueError(
            f"{table.ids.label}placement: got {columns} column shards of {table.features} columns; expected a divisor "
            "of them."
        )
    if table.update is None:
        return
    rule = table.update.optimizer
    if type(rule) not in _ELEMENTWISE or any(slot.rowwise for slot in rule.slots):
        raise ValueError(
            f"{table.ids.label}optimizer: {type(rule).__name__} steps an element by the whole row, of which every "
            "device "
            "has some columns; expected SGD, Adagrad, AdagradMomentum, Adam or FTRL, or a placement of whole rows."
        )
