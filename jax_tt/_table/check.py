"""Checks of tables and their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._base.dtypes import accumulator
from jax_tt._base.storage import STORAGE, check_storage, require_arrays
from jax_tt._table.options import check_static
from jax_tt._table.state import Array, State
from jax_tt._table.table import Table
from jax_tt._table.wrapper import dispatched

_STORAGE = set(STORAGE)
_CAST = (
    " Leave fused tables out of casts of a model: param_dtype= of the table is the type of its rows, and dtype= of the "
    "layer or Lookup that of the results."
)
_OF_SHARDS = (
    " Inside a shard_map, lookups take a shard of the rows of a dense or quantized table, with the same shard of all "
    "arrays that have rows, whose types say over which one mesh axis; check_vma=False leaves that out. Pass the arrays "
    "of other tables whole, with in_specs P(), also to attend, top_k and softmax_cross_entropy. Or look the table up "
    "outside of the shard_map, where its arrays may have any sharding; jax_tt.shard_tables divides hash tables."
)


def check_table(table: Any, state: Any) -> None:
    """Raises unless these are a description of a table and arrays by name."""
    if not isinstance(table, Table):
        fix = "A Collection goes to jax_tt.lookup_features, arrays go to jax_tt.tt and jax_tt.functional."
        expected = "a jax_tt.Table, e.g. jax_tt.dense_table(1000, 16)"
        raise mismatch("table", type_of(table), expected, fix, TypeError)
    if not isinstance(state, Mapping):
        expected = "arrays by name, as Table.init returns"
        raise mismatch(f"{table.ids.label}state", type_of(state), expected, error=TypeError)
    if table.update is not None:
        check_static(f"{table.ids.label}optimizer", table.update.optimizer)


@dispatched
def check_state(table: Table, state: State) -> None:
    """Raises if arrays are missing from a state, or do not belong to this table. Wrappers register it.

    >>> import jax, jax_tt
    >>> table = jax_tt.dense_table(1000, 16)
    >>> jax_tt.extension.check_state(table, {})
    Traceback (most recent call last):
    ValueError: state: has no embedding; expected what Table.init returns, with the arrays embedding.
    """
    check_arrays(table, state, table.spec.arrays)


def check_whole_table(table: Table, state: State) -> None:
    """Raises inside a ``shard_map`` if a state has a shard of the rows."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        check_state(table, state)


def check_wrapper(wrapper: Any, state: State) -> None:
    """`check_state` of a wrapper, for registration: of its table, and of the arrays that it adds."""
    check_state(wrapper.table, state)
    inner = {array.name for array in wrapper.table.spec.arrays}
    check_arrays(wrapper, state, [x for x in wrapper.spec.arrays if x.name not in inner])


def check_arrays(table: Table, state: State, arrays: Sequence[Array]) -> None:
    """Raises if one of these arrays of a table is missing from a state, is none, or has another shape or type."""
    if any(array.name not in state for array in arrays):
        require_arrays(table, state, [array.name for array in arrays])
    storage: dict[int | None, set[str]] = {}
    for array in arrays:
        given, dtype = state[array.name], array.dtype
        if not hasattr(given, "dtype"):
            label = f"{table.ids.label}state: {array.name}"
            raise mismatch(label, given, "an array, as Table.init returns", error=TypeError)
        if array.role == "parameter" and dtype is None:
            storage.setdefault(array.unit, set()).add(given.dtype.name)
        # Not in one comparison, since np.dtype("float64") == None.
        if dtype is None:
            dtype = accumulator(state[array.of].dtype) if array.of else given.dtype
        shape = given.shape if array.shape is None else array.shape
        if given.shape != shape or given.dtype != dtype:
            trained = given.shape == shape and array.unit is not None
            inside = given.shape != shape and jax.sharding.get_abstract_mesh().manual_axes
            fix = f"{array.hint}{_CAST if trained else ''}{_OF_SHARDS if inside else ''}".lstrip()
            expected = f"{jnp.dtype(dtype)} of shape {shape}, as this table and its optimizer have"
            raise mismatch(f"{table.ids.label}{array.name}", given, expected, fix)
    for dtypes in storage.values():
        if len(dtypes) != 1 or not dtypes <= _STORAGE:
            check_storage(table.ids.label, "parameters", dtypes)
