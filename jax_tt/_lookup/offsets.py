"""What a lookup does about malformed offsets of its bags."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from jax_tt._base import reports
from jax_tt._ids.offsets import Treatment
from jax_tt._jax.vma import axes_to_count, summed_like
from jax_tt._table.groups import BoundTable
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import Table


def treatment_of(use: BoundTable, lookup: Lookup) -> Treatment:
    """The treatment that the options of a call ask for."""
    sharded = use.execution.devices or lookup.axis_name or get_abstract_mesh().manual_axes
    return Treatment(lookup.bounds, lookup.method, bool(sharded))


def offsets_label(table: Table, shared: Table | None = None) -> str:
    """What errors call the offsets of a batch of a table, which is ``shared`` with others for one warning."""
    return reports.once_per(_told_as(shared or table), f"{table.ids.label}bags.offsets")


def keyed_label(tables: Iterable[Table]) -> str:
    """`offsets_label` of the offsets that the features of several tables have in common."""
    return reports.once_per(", ".join(map(_told_as, tables)), "batch.offsets")


def _told_as(table: Table) -> str:
    return f"{table.name} {table.num_embeddings}"


def nan_if(refused: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows, NaN if the batch is refused."""
    # An empty `where` is constant-folded, and a fused table would then get zeros as its new value.
    return jnp.where(refused, jnp.nan, rows) if rows.size else rows


def stepped_unless(refused: jax.Array, step: jax.Array, values: Any, axis_name: Any) -> Any:
    """The `step_values` of a table with this step count, which is not stepped if any shard of the batch is refused."""
    allowed = (refusals(refused, step, axis_name) == 0).astype(jnp.float32)
    return _with_allowed(values, allowed)


def before_if(refused: jax.Array, before: State, after: State, axis_name: Any) -> State:
    """The state before a call that is refused, as row caches count batches without ids as well."""
    changed = {name: value for name, value in after.items() if value is not before[name]}
    if not changed:
        return after
    scalar = next(value for value in changed.values() if value.ndim == 0)
    kept = refusals(refused, scalar, axis_name) > 0
    old = {name: jax.lax.stop_gradient(before[name]) for name in changed}
    return {**after, **{n: jnp.where(kept, old[n], value) for n, value in changed.items()}}


def refusals(refused: jax.Array, like: jax.Array, axis_name: Any) -> jax.Array:
    """How many shards or examples of a batch are refused, the same wherever the scalar ``like`` is, in its type."""
    like = jax.lax.stop_gradient(like)
    count = summed_like(like, refused)
    axes = axes_to_count(like, count, axis_name)
    return jax.lax.psum(count, axes) if axes else count


def _with_allowed(values: Any, allowed: jax.Array) -> Any:
    if isinstance(values, tuple):  # of a table that is made of several
        return tuple(_with_allowed(one, allowed) for one in values)
    return {**values, "allowed": allowed}
