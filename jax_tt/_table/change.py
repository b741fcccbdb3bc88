"""Changes of a table between steps, such as reordering and growing, and of its optimizer state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import type_of
from jax_tt._directories.row_cache import RowCache
from jax_tt._ids.explicit import over_explicit_axes, spec_of
from jax_tt._ids.id_order import IdOrder
from jax_tt._table.state import SCALARS, State
from jax_tt._table.table import Table
from jax_tt._table.wrapper import dispatched

# Runs ``function(*static, arrays)`` on each device's shard of the arrays.
OnShards = Callable[[Callable[..., Any], tuple[Any, ...], Any], Any]
# (optimizer state of an array before the change, initial state for the new array) -> state after the change
Carry = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """A table or collection after a change, and its state: ``table, state = change``.

    Attributes:
        table: its description; of a collection, the `Collection`.
        state: all of its arrays by name; of a collection, by table and name.
        carry: rules for the optax state of arrays, in the structure of ``state``; that of the others is kept.
        approximation: `tt.Approximation` of a table that was fitted again.

    >>> import jax, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> change = jax_tt.tables.grow(table, table.init(jax.random.key(0)), 1200, key=jax.random.key(1))
    >>> larger, state = change
    >>> larger.num_embeddings, change.approximation
    (1200, None)
    """

    table: Any
    state: dict[str, Any]
    carry: Mapping[str, Any]
    approximation: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.table, self.state))


class Growth(NamedTuple):
    """How a table grows.

    Attributes:
        num_embeddings: the new number of ids.
        key: for the initial values of new rows.
        like: ids near whose rows the new rows start, one or as many as there are new ids, or None.
        method: as in the ops.

    >>> import jax, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> growth = jax_tt.extension.Growth(1200, jax.random.key(1), like=None, method="auto")
    >>> jax_tt.extension.grow(table, table.init(jax.random.key(0)), growth).table.num_embeddings
    1200
    """

    num_embeddings: int
    key: jax.Array
    like: Any
    method: str


class Orders(NamedTuple):
    """How a table is reordered.

    Attributes:
        new: the new order of ids.
        options: of `jax_tt.tt.reorder`.
        old: the present order of ids, None if ids are rows.
        replaced: row numbers, -1 for none, and values ``[n, D]`` that replace these rows in the fit.

    >>> import jax, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> orders = jax_tt.extension.Orders(jax_tt.order.IdOrder.identity(1000), {"ranks": 2})
    >>> jax_tt.extension.reorder(table, table.init(jax.random.key(0)), orders).table.ranks
    (1, 2, 2, 1)
    """

    new: IdOrder
    options: Mapping[str, Any]
    old: IdOrder | None = None
    replaced: tuple[Any, Any] | None = None


@dispatched
def maintain(table: Table, state: State, method: str = "auto") -> dict[str, Any]:
    """The state after the maintenance of a kind between two steps. Kinds register what they do."""
    del table, method
    return dict(state)


@dispatched
def grow(table: Table, state: State, growth: Growth) -> Change:
    """The table with more rows; existing rows are unchanged. Kinds register what they do."""
    del state, growth
    raise TypeError(f"{table.ids.label}{type_of(table)} cannot be given more rows.")


@functools.singledispatch
def grow_shards(
    table: Table, shard: Any, state: State, growth: Growth, on_shards: OnShards
) -> Change:
    """As `grow`, for a sharded table of which every device grows its ``shard``. Kinds register what they do."""
    del shard, state, growth, on_shards
    raise TypeError(f"{table.ids.label}a sharded {type(table).__name__} cannot be given more rows.")


@dispatched
def reorder(table: Table, state: State, orders: Orders) -> Change:
    """The table in another order of ids. Kinds register what they do."""
    del state, orders
    raise TypeError(f"{table.ids.label}{type_of(table)} cannot be reordered.")


@dispatched
def with_cache(table: Table, state: State, cache: RowCache, method: str) -> Change:
    """The table with another row cache. Kinds register what they do."""
    del table, state, cache, method
    raise ValueError(
        "cache: the layer has no row cache to resize; build it with cache=jax_tt.RowCache(capacity=...)."
    )


@dispatched
def has_cache(table: Table) -> bool:
    """Whether lookups read rows of a row cache. Kinds register what they say.

    >>> import jax_tt
    >>> jax_tt.extension.has_cache(jax_tt.tt_table(1000, 8, tt_ranks=4, cache=jax_tt.RowCache(50, ways=5)))
    True
    """
    del table
    return False


@functools.singledispatch
def under_order(table: Table, change: Change, id_order: IdOrder) -> Change:
    """``change`` of a table with an order of ids around it, which the kind of such tables registers."""
    raise NotImplementedError


def restarted(old: Any, fresh: Any) -> Any:
    """State of a core that was fitted again: the mean of its old state in every entry.

    Entries of the new core do not correspond to entries of the old one. First moments, whose mean is nearly 0, are
    therefore dropped. The gradients have about the same size as before, so the mean is a good start for second moments;
    starting them at 0 at a late step would make the first steps several times too long. State that is initialised with
    the parameters, such as `z` of `optax.contrib.schedule_free`, is initialised with the new ones.
    """
    mean = jnp.mean(jnp.asarray(old), dtype=jnp.float32)
    of_parameters = jnp.any(fresh != fresh.reshape(-1)[0])
    return jnp.where(of_parameters, fresh, mean.astype(fresh.dtype))


def extended(old: Any, fresh: Any) -> Any:
    """State of a parameter with more slices: initial for the new ones, unchanged bit for bit for the others."""
    if old.shape[1:] != fresh.shape[1:] or not old.ndim:
        return fresh
    return appended(jnp.asarray(old), fresh[old.shape[0] :])


def appended(old: jax.Array, new: jax.Array) -> jax.Array:
    """Two arrays one after the other, sharded like the first one."""
    return over_explicit_axes(
        lambda arrays: jnp.concatenate(arrays), (old, new), lambda: spec_of(old)
    )


def with_params(
    before: State, after: Table, params: Mapping[str, Any], carry: Mapping[str, Carry]
) -> dict[str, Any]:
    """New parameters and, where they are fused, their slots; the step goes on, so that schedules do."""
    values = dict(params)
    fresh = after.init_rest(values)
    for name, slots in zip(after.spec.param_names, after.spec.slot_names, strict=True):
        for slot in slots:
            old = before.get(slot, fresh[slot])
            values[slot] = carry[name](old, fresh[slot]) if name in carry else old
    return values | {name: before[name] for name in SCALARS if name in fresh}
