"""Lookups in rows that are made for a batch, such as those of keys without a row, beside those of the table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._lookup._batch import Batch
from jax_tt._lookup._explicit import explicit_mesh
from jax_tt._lookup._ids import outside
from jax_tt._lookup._vma import varying_axes
from jax_tt._lookup._wide import Wide
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import State, Table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Added:
    """A lookup whose sums are added to those of a call. Its rows have no gradient, its weights have.

    Attributes:
        table, lookup, storage: static, those of the call and the type of its rows.
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
            and self.table.parts == 1
            and explicit_mesh(self.prepared) is None
            and not varying_axes(self.given, self.prepared)
        )

    def any(self) -> jax.Array:
        """Whether there is anything to look up."""
        return jnp.any(outside(self.table, self.prepared))

    def rows(self) -> tuple[Table, State, Batch]:
        return self.table.added_rows(
            self.state, self.given, self.prepared, self.lookup, self.storage
        )


def plus_added(
    sums_of: Callable[[list[Added]], tuple[jax.Array, ...]],
    found: Any,
    added: Mapping[int, Added],
    shapes: list[tuple[int, int, int]],
    wide: Wide | None,
) -> Any:
    """The sums of all calls, plus those of `Added` lookups, which are only made where there is anything to look up.

    Args:
        sums_of: the sums of such lookups.
        found: the sums of all calls, or one array of them.
        added: by the number of the call.
        shapes: of the sums of all calls.
        wide: where these are in one array, if they are.
    """

    @jax.custom_jvp
    def run(found: Any, own: list[Added]) -> Any:
        def more(found: Any) -> Any:
            sums = dict(zip(added, sums_of(own), strict=True))
            if wide is None:
                return tuple(x + sums[k] if k in sums else x for k, x in enumerate(found))
            nothing = [jnp.zeros(shape, found.dtype) for shape in shapes]
            return found + wide.joined([sums.get(k, x) for k, x in enumerate(nothing)])

        wanted = functools.reduce(jnp.logical_or, [each.any() for each in own])
        return lax.cond(wanted, more, lambda found: found, found)

    # The rows are constants, and there are no weights.
    run.defjvp(lambda primals, tangents: (run(*primals), tangents[0]))
    return run(found, list(added.values()))
