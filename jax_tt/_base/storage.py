"""Checks of the arrays that users pass as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

STORAGE = ("float32", "bfloat16", "float16", "float64")
MAX_COLUMNS = 2**31 - 1


def table_label(name: str | None) -> str:
    """Prefix of error messages about a table."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: got {name!r} of type {type(name).__name__}; expected a string.")
    return "" if name is None else f"{name}: "


def check_storage(label: str, what: str, dtypes: set[str]) -> None:
    """Raises for parameters of different types, or of an unsupported one."""
    if len(dtypes) != 1 or not dtypes <= set(STORAGE):
        raise ValueError(
            f"{label}{what}: got dtype {', '.join(sorted(dtypes))}; expected one of {', '.join(STORAGE)}"
            + (" for all of them." if len(dtypes) > 1 else ".")
        )


def check_param_dtype(param_dtype: Any) -> None:
    """Raises for an unsupported type."""
    name = jnp.dtype(param_dtype).name
    if name not in STORAGE:
        choices = ", ".join(map(repr, STORAGE))
        raise ValueError(f"param_dtype: got {name}; expected one of {choices}.")


def require_arrays(table: Any, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises where arrays of these names are missing from a state of a table."""
    missing = [name for name in names if name not in state]
    if not missing:
        return
    if tables := [name for name, entry in state.items() if isinstance(entry, Mapping)]:
        raise ValueError(
            f"{table.ids.label}state: got the arrays of several tables, {', '.join(map(str, tables))}; expected the "
            f"arrays of this table, e.g. state[{tables[0]!r}]."
        )
    raise ValueError(
        f"{table.ids.label}state: has no {', '.join(missing)}; expected what Table.init returns, with the arrays "
        f"{', '.join(names)}."
    )
