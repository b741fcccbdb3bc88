"""The arguments of layers whose table a factory describes, divided by what takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jax_tt._table.options import Lookup, check_static
from jax_tt._table.table import Table

# Fields of `Lookup` that are arguments of layers; `combiner` is one of layers that pool.
OF_CALLS = ("bounds", "dtype", "precision", "method", "axis_name")


def described(
    factory: Callable[..., Table], given: Mapping[str, Any]
) -> tuple[Table, Lookup, dict[str, Any]]:
    """Returns the table, the options of its calls, and the arguments that belong to neither.

    Args:
        factory: `dense_table` or `tt_table`.
        given: the arguments of a layer by name.
    """
    rest = dict(given)
    of_calls = {name: rest.pop(name) for name in ("combiner", *OF_CALLS) if name in rest}
    of_table = {name: rest.pop(name) for name in parameters(factory) if name in rest}
    lookup = Lookup(**{"bounds": "warn", **of_calls})
    table = factory(**of_table)
    if table.update is not None:
        check_static("optimizer", table.update.optimizer)
    return table, lookup, rest


@functools.cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name."""
    return inspect.signature(function).parameters
