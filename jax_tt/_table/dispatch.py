"""Functions of a table that its kind registers, with a default for plain tables and none for wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax_tt._table.table import Table
from jax_tt._table.wrapper import Wrapper


def dispatched(function: Callable[..., Any]) -> Any:
    """``function`` dispatched on the kind of its first argument, a table, as `functools.singledispatch` does it.

    ``function`` is what plain tables do that register nothing. What is right for a table without its wrapper is seldom
    right for the wrapper, so that a `Wrapper` that registers nothing raises an error.
    """
    by_kind = functools.singledispatch(function)

    def forgotten(wrapper: Wrapper, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        kind, name = type(wrapper).__name__, function.__name__
        raise NotImplementedError(
            f"{wrapper.ids.label}{name}: {kind} wraps a table and does not say what {name} does; register it, "
            f"@jax_tt.extension.{name}.register({kind})."
        )

    by_kind.register(Wrapper, forgotten)
    return by_kind


def default(function: Any) -> Any:
    """What `dispatched` does for plain tables; wrappers for which it is right register it."""
    return function.dispatch(Table)


def delegate(kind: type, *functions: Any) -> None:
    """Registers for a kind of wrapper that functions do what they do for its table."""
    for function in functions:

        def of_table(wrapper: Wrapper, *args: Any, function: Any = function) -> Any:
            return function(wrapper.table, *args)

        function.register(kind, of_table)
