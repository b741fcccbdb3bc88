"""`Wrapper`: base class of tables that wrap a table."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

from jax_tt._table.state import StateSpec
from jax_tt._table.table import Table

Kind = TypeVar("Kind", bound=Table)


class _OfTable:
    """An attribute or method of the wrapped table."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        return self if wrapper is None else getattr(wrapper.table, self.name)


def _of_table(name: str) -> Any:
    return _OfTable(name)


@dataclasses.dataclass(frozen=True)
class Wrapper(Table):
    """Delegates to the wrapped table; subclasses override what they change.

    Its state is that of the table and possibly more. All public members of `Table` are delegated, except those that are
    defined here and those in `COMPUTED`.
    """

    table: Any

    def __post_init__(self) -> None:
        if not isinstance(self.table, Table):
            raise TypeError(
                f"table: got {self.table!r}; expected a jax_tt.Table, e.g. jax_tt.tables.DenseTable(1000, 16)."
            )
        if self.table.divided:
            raise TypeError(
                f"table: got a {type(self.table).__name__}; expected a table that is not sharded. Shard the hash table "
                "instead; apply an order to the ids before the lookup, order.apply(ids)."
            )

    # Abstract members must be in the body of the class; the loop below delegates the others.
    # They are not annotated, which would make them fields of the dataclass.
    init_params = _of_table("init_params")
    forward = _of_table("forward")
    backward = _of_table("backward")
    step = _of_table("step")

    @functools.cached_property
    def spec(self) -> StateSpec:
        return self.table.spec.without_rows()

    # Most kinds have it, but it is no member of `Table`.
    param_dtype = _of_table("param_dtype")


# Members that `Table` computes from other members, which a wrapper may override. What can be wrapped does not override
# them.
COMPUTED = frozenset(("init",))
MEMBERS = frozenset(name for name in (*vars(Table), *Table.__annotations__) if name[0] != "_")

for _name in MEMBERS - COMPUTED - vars(Wrapper).keys():
    setattr(Wrapper, _name, _of_table(_name))


def innermost(table: Table) -> Any:
    """The table without wrappers.

    >>> import jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4, cache=jax_tt.RowCache(50, ways=5))
    >>> jax_tt.tables.innermost(table).ranks
    (1, 4, 4, 1)
    """
    while isinstance(table, Wrapper):
        table = table.table
    return table


def find(table: Table, kind: type[Kind]) -> Kind | None:
    """The table of a kind that a table is or wraps, or None.

    >>> import jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4, cache=jax_tt.RowCache(50, ways=5))
    >>> jax_tt.tables.find(table, jax_tt.tables.RowCachedTable).cache.capacity
    50
    >>> jax_tt.tables.find(table, jax_tt.tables.OrderedTable) is None
    True
    """
    while not isinstance(table, kind):
        if not isinstance(table, Wrapper):
            return None
        table = table.table
    return table
