"""What a lookup does about malformed offsets of its bags."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from jax_tt._ids.offsets import Treatment
from jax_tt._table.groups import Use
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table


def treatment_of(use: Use, lookup: Lookup) -> Treatment:
    """The treatment that the options of a call ask for."""
    sharded = use.execution.devices or lookup.axis_name or get_abstract_mesh().manual_axes
    return Treatment(lookup.bounds, lookup.method, bool(sharded))


def offsets_label(table: Table) -> str:
    """What errors call the offsets of a batch of a table."""
    return f"{table.ids.label}bags.offsets"


def nan_if(refused: jax.Array | None, rows: jax.Array) -> jax.Array:
    """The rows, NaN if the batch is refused."""
    # An empty `where` is constant-folded, and a fused table would then get zeros as its new value.
    return rows if refused is None or not rows.size else jnp.where(refused, jnp.nan, rows)
