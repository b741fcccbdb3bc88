"""What a kind of tables says about sharding its rows over devices; kinds register the functions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jax_tt import optimizers
from jax_tt._base.arguments import mismatch, type_of
from jax_tt._ids.placement import Layout
from jax_tt._table.options import Update
from jax_tt._table.table import Table
from jax_tt._table.wrapper import Wrapper, dispatched
from jax_tt.optimizers import ChangesAll, ReadsScaled

# Optimizers whose step of an element depends on the gradients of this element alone.
_ELEMENTWISE = (
    optimizers.SGD,
    optimizers.Adagrad,
    optimizers.AdagradMomentum,
    optimizers.Adam,
    optimizers.FTRL,
)


@functools.singledispatch
def rows_to_shard(table: Table) -> dict[str, float | None]:
    """The arrays of which entry k belongs to row k alone, with the entries of a new row, as `StateSpec.row_arrays`.

    A `ShardedTable` shards them along their first axis, and all devices have the other arrays. Kinds whose every
    parameter has a row per id need not register it; a wrapper does, and says what `check_sharding` and `shard_of` do.

    Raises:
        TypeError, ValueError: the rows of the table cannot be sharded.

    >>> import jax_tt
    >>> table = jax_tt.dense_table(1000, 16, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1))
    >>> jax_tt.extension.rows_to_shard(table)
    {'embedding': None, 'slot_sum_0': 0.0}
    """
    if table.spec.row_names and table.spec.row_names == table.spec.param_names:
        return table.spec.row_arrays
    raise _not_sharded(table)


@rows_to_shard.register(Wrapper)
def _(wrapper: Wrapper) -> dict[str, float | None]:
    # Its shards would be tables without what the wrapper adds, unless its kind registers all functions of this file.
    raise _not_sharded(wrapper)


@dispatched
def check_sharding(table: Table, layout: Layout) -> None:
    """Raises if the table cannot be sharded in a layout. Wrappers register it.

    Args:
        table: its rows can be sharded, as `rows_to_shard` says.
        layout: the pages of the table, as `Placement.layout` returns them.

    Raises:
        TypeError, ValueError: the optimizer does not fit, or the columns are sharded and cannot be.

    >>> import jax_tt
    >>> layout = jax_tt.Placement.columns(3).layout(num_embeddings=1000, devices=4)
    >>> jax_tt.extension.check_sharding(jax_tt.dense_table(1000, 16), layout)
    Traceback (most recent call last):
    ValueError: placement: got 3 column shards of 16 columns; expected a divisor of them.
    """
    update = table.update
    if update is not None:
        _check_optimizer(table, update)
        check_slots(table)
        storage = table.spec.rounded_type or getattr(table, "param_dtype", jnp.float32)
        narrow = update.rounds_stochastically(storage)
        if narrow and not layout.same_places:
            got = "replicas at different places of their devices, whose rows would be rounded differently at random"
            expected = "no stochastic_rounding, Placement.replicated(), or no replicas"
            raise mismatch(f"{table.ids.label}placement", got, expected)
    if layout.columns > 1:
        _check_columns(table, layout.columns)


@dispatched
def shard_of(table: Any, num_embeddings: int, features: int) -> Any:
    """The table of some rows and columns of a table, such as a device holds. Wrappers register it.

    >>> import jax_tt
    >>> jax_tt.extension.shard_of(jax_tt.dense_table(1000, 16), 500, 16).spec.param_shapes
    {'embedding': (500, 16)}
    """
    return dataclasses.replace(table, num_embeddings=num_embeddings, features=features)


def can_be_sharded(table: Table) -> bool:
    """Whether the rows of a table can be sharded."""
    try:
        rows_to_shard(table)
    except (TypeError, ValueError):
        return False
    return True


def can_be_placed(table: Table) -> bool:
    """Whether a plan can choose which devices have the rows of a table."""
    return can_be_sharded(table) and not table.ids.takes_keys


def _not_sharded(table: Table) -> TypeError:
    return TypeError(
        f"{table.ids.label}table: got {type_of(table)}; expected a DenseTable, a QuantizedTable, or a "
        "HashTable of a DenseTable, whose rows can be sharded. The cores of a TTTable are small, and every device has "
        "all of them, as it has of row caches and orders of ids: leave them as they are."
    )


def _check_optimizer(table: Table, update: Update) -> None:
    optimizer = update.optimizer
    label, rule = f"{table.ids.label}optimizer", type(optimizer).__name__
    if isinstance(optimizer, ChangesAll):
        got = f"{rule}, which changes all rows between steps"
        raise mismatch(label, got, "one that changes the rows of a batch")
    if isinstance(optimizer, ReadsScaled):
        got = f"{rule}, which scales the rows that are read by state on other devices"
        raise mismatch(label, got, "another optimizer, e.g. RowWiseAdagrad")


def check_slots(table: Table) -> None:
    """Raises if the optimizer has state of which a shard is not the state of a shard."""
    optimizer = None if table.update is None else table.update.optimizer
    if optimizer is not None and any(slot.rows is not None for slot in optimizer.slots):
        got = f"{type(optimizer).__name__}, whose state is not sharded by rows"
        expected = "one whose state has an entry per row or per element"
        raise mismatch(f"{table.ids.label}optimizer", got, expected)


def _check_columns(table: Table, columns: int) -> None:
    if not table.spec.row_names:  # rows are coded as a whole
        got = f"column shards of {type_of(table)}"
        expected = "a DenseTable, or whole rows"
        raise mismatch(f"{table.ids.label}placement", got, expected, error=TypeError)
    if table.features % columns:
        got = f"{columns} column shards of {table.features} columns"
        raise mismatch(f"{table.ids.label}placement", got, "a divisor of them")
    if table.update is None:
        return
    optimizer = table.update.optimizer
    if type(optimizer) not in _ELEMENTWISE or any(slot.rowwise for slot in optimizer.slots):
        rule = type(optimizer).__name__
        got = f"{rule}, which steps an element by the whole row, of which devices have some columns"
        expected = "SGD, Adagrad, AdagradMomentum, Adam or FTRL, or a placement of whole rows"
        raise mismatch(f"{table.ids.label}optimizer", got, expected)
