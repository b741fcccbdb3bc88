"""`Wrapper`: base class of tables that wrap a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import IdSpace
from jax_tt._table.options import Lookup, Update
from jax_tt._table.state import State, StateSpec
from jax_tt._table.table import Execution, Table

Kind = TypeVar("Kind", bound=Table)


@functools.singledispatch
def is_sharded(table: Table) -> bool:
    """Whether the rows are on several devices, which have to take part in every lookup."""
    del table
    return False


@dataclasses.dataclass(frozen=True)
class Wrapper(Table):
    """Delegates to the wrapped table; subclasses override what they change.

    Its state is that of the table and possibly more. What is done to a table between steps, such as `grow`, is not
    delegated: a wrapper registers what it does.
    """

    table: Any

    def __post_init__(self) -> None:
        if not isinstance(self.table, Table):
            expected = "a jax_tt.Table, e.g. jax_tt.tables.DenseTable(1000, 16)"
            raise mismatch("table", repr(self.table), expected, error=TypeError)
        if is_sharded(self.table):
            got = type_of(self.table)
            fix = "Shard the hash table instead; apply an order to the ids before the lookup, order.apply(ids)."
            raise mismatch("table", got, "a table that is not sharded", fix, error=TypeError)

    @property
    def num_embeddings(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.num_embeddings

    @property
    def features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.features

    @property
    def update(self) -> Update | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.update

    @property
    def name(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.name

    @property
    def param_dtype(self) -> Any:
        """Type of the parameters of a kind that has one."""
        return self.table.param_dtype

    @functools.cached_property
    def ids(self) -> IdSpace:
        return self.table.ids

    @functools.cached_property
    def spec(self) -> StateSpec:
        return self.table.spec.without_rows()

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        return self.table.init_params(key)

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        return self.table.init_rest(params)

    def execution(self, lookup: Lookup, state: State) -> Execution:
        return self.table.execution(lookup, state)

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        return self.table.prepare(state, batch, lookup)

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        return self.table.forward(state, batch, lookup)

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self.table.backward(state, batch, residuals, g, lookup)

    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self.table.step(state, batch, residuals, g, lookup, values)


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


def kind_in_words(table: Table) -> str:
    """The class of a table and, of a wrapper, that of what it wraps."""
    name = type(table).__name__
    return f"{name} of {kind_in_words(table.table)}" if isinstance(table, Wrapper) else name


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
