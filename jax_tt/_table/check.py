"""Checks of tables and their states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_tt._base.storage import STORAGE, check_storage, require_arrays
from jax_tt._table.dispatch import dispatched
from jax_tt._table.table import Table
from jax_tt._table.types import State

_STORAGE = set(STORAGE)
_CAST = (
    " Leave fused tables out of casts of a model: param_dtype= of the table is the type of its rows, and dtype= of the "
    "layer or Lookup that of the results."
)


def check_table(table: Any, state: Any) -> None:
    """Raises unless these are a description of a table and arrays by name."""
    if not isinstance(table, Table):
        raise TypeError(
            f"table: got a {type(table).__name__}; expected a jax_tt.Table, e.g. jax_tt.dense_table(1000, 16). A "
            "Collection goes to jax_tt.lookup_features, arrays go to the functions of jax_tt.tt and jax_tt.functional."
        )
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{table.ids.label}state: got a {type(state).__name__}; expected arrays by name, as Table.init returns."
        )


@dispatched
def check_state(table: Table, state: State) -> None:
    """Raises if arrays are missing from a state, or do not belong to this table.

    Kinds with arrays that are not trained register checks of these.

    >>> import jax, jax_tt
    >>> table = jax_tt.dense_table(1000, 16)
    >>> jax_tt.extension.check_state(table, {})
    Traceback (most recent call last):
    ValueError: state: has no embedding; expected what Table.init returns, with the arrays embedding.
    """
    spec = table.spec
    if any(name not in state for name in spec.trained_names):
        require_arrays(table, state, spec.trained_names)
    shapes = spec.param_shapes
    dtypes = {state[name].dtype.name for name in shapes}
    if len(dtypes) != 1 or not dtypes <= _STORAGE:
        check_storage(table.ids.label, "parameters", dtypes)
    for name in spec.trained_names:
        array, shape = state[name], spec.shapes[name]
        own = array.dtype if name in shapes else jnp.float32
        dtype = spec.slot_dtypes.get(name, jnp.dtype(own))
        if array.shape != shape or array.dtype != dtype:
            advice = _CAST if array.shape == shape else ""
            raise ValueError(
                f"{table.ids.label}{name}: got {array.dtype} of shape {array.shape}; expected {dtype} of shape "
                f"{shape}, as this table and its optimizer have.{advice}"
            )
