"""Lookups in rows that are made for a batch, e.g. for keys without a row, beside the lookup in the table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import explicit_mesh
from jax_tt._ids.id_space import outside
from jax_tt._jax.vma import varying_axes
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._table.wrapper import Wrapper, delegate

# Bytes of rows that are made together.
_PART_BYTES = 8 << 20
_NO = np.False_


@functools.singledispatch
def adds_rows(table: Table, lookup: Lookup) -> bool:
    """Whether lookups also read `added_rows`; kinds whose ids are keys register it."""
    del table, lookup
    return False


@functools.singledispatch
def added_rows(
    table: Table, state: State, given: Batch, prepared: Batch, lookup: Lookup, storage: Any
) -> tuple[Table, State, Batch]:
    """A lookup in constant rows whose sums are added to the sums of the prepared batch, if `adds_rows`.

    ``state`` is that before the call, without the trained arrays; ``given`` and ``prepared`` are the batch before and
    after `Table.prepare`, with the same weights and bags; ``storage`` is the type of the parameters.
    """
    raise NotImplementedError


delegate(Wrapper, adds_rows, added_rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MissingRows:
    """A lookup whose sums are added to the sums of a call. Its rows have no gradient, its weights have.

    Attributes:
        table, lookup, storage: static, of the call, and the type of its rows.
        state: the arrays of the table that are not trained, before the call.
        given, prepared: the batch before and after `Table.prepare`; the positions out of range of the latter are those
            that are looked up.
    """

    table: Table = dataclasses.field(metadata={"static": True})
    lookup: Lookup = dataclasses.field(metadata={"static": True})
    storage: Any = dataclasses.field(metadata={"static": True})
    state: State
    given: Batch
    prepared: Batch

    @property
    def may_wait(self) -> bool:
        """Whether the lookup can be left to a condition on the device."""
        return (
            self.prepared.weights is None
            and explicit_mesh(self.prepared) is None
            and not varying_axes(self.given, self.prepared)
        )

    @property
    def row_bytes(self) -> int:
        """The size of the rows, at least 1."""
        rows = self.prepared.ids.size
        if not isinstance(rows, int):  # of a batch with a symbolic size
            return _PART_BYTES
        return max(1, rows * self.table.features * jnp.dtype(self.storage).itemsize)

    def wanted(self) -> jax.Array:
        """Which positions are looked up, bool ``[n]``."""
        return outside(self.table.ids, self.prepared).reshape(-1)


def plus_added(
    sums_of: Callable[[list[MissingRows]], tuple[jax.Array, ...]],
    found: Any,
    added: Mapping[int, MissingRows],
    shapes: list[tuple[int, int, int]],
    wide: ConcatLayout | None,
) -> Any:
    """Adds the sums of `MissingRows` lookups, which ``sums_of`` makes where there are any, to the sums of all calls.

    ``added`` are by the number of the call, ``found`` are the sums, of these ``shapes``, or with ``wide`` one array.
    """

    places = list(added)  # programs keep `run`, which must not close over the lookups

    @jax.custom_jvp
    def run(found: Any, lookups: list[MissingRows]) -> Any:
        def more(held: tuple[jax.Array, Any]) -> tuple[Any, Any]:
            _, found = held
            sums = dict(zip(places, _sums_in_parts(sums_of, lookups), strict=True))
            if wide is None:
                after: Any = tuple(x + sums[k] if k in sums else x for k, x in enumerate(found))
            else:
                nothing = [jnp.zeros(shape, found.dtype) for shape in shapes]
                after = found + wide.joined([sums.get(k, x) for k, x in enumerate(nothing)])
            return _NO, after

        return _once_if(_any(lookups), more, found)

    # The rows are constants, and there are no weights.
    run.defjvp(lambda primals, tangents: (run(*primals), tangents[0]))
    return run(found, list(added.values()))


def _sums_in_parts(
    sums_of: Callable[[list[MissingRows]], tuple[jax.Array, ...]], added: list[MissingRows]
) -> list[jax.Array]:
    """Sums some lookups at a time, whose rows then take the same memory."""
    parts: list[list[MissingRows]] = []
    total = _PART_BYTES
    for one in added:
        total += one.row_bytes
        if total > _PART_BYTES:
            parts.append([])
            total = one.row_bytes
        parts[-1].append(one)
    if len(parts) == 1:
        return list(sums_of(added))
    sums: list[jax.Array] = []
    for part in parts:
        like = jax.eval_shape(sums_of, part)
        nothing = tuple(jnp.zeros(x.shape, x.dtype) for x in like)
        sums += _once_if(_any(part), lambda _, part=part: (_NO, sums_of(part)), nothing)
    return sums


def _any(added: list[MissingRows]) -> jax.Array:
    # Of all tables at once: one by one, each would be several small programs.
    return jnp.any(jnp.concatenate([one.wanted() for one in added]))


def _once_if(wanted: jax.Array, change: Callable[[Any], Any], value: Any) -> Any:
    """``value``, or what ``change`` makes of this pair and False. A loop, since a condition would copy its result."""
    return lax.while_loop(lambda now: now[0], change, (jnp.asarray(wanted), value))[1]
