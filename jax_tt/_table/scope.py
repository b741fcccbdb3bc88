"""Names of tables in profiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_SHOWN = 3


def scope_of(tables: Iterable[Any]) -> str:
    """The name of a `jax.named_scope` around operations on tables, so that profiles say what they were for.

    A table without a name has that of its kind. Of many tables, the first ones are named.
    """
    names = list(dict.fromkeys(table.name or type(table).__name__ for table in tables))
    more = len(names) - _SHOWN
    return "+".join([*names[:_SHOWN], *([f"{more} more"] if more > 0 else [])])
