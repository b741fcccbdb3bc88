"""Lookups and bags of any table: input checks, preparation, sums, combiners, and the result type."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.explicit import reshape_rows
from jax_tt._ids.inputs import bag_batch, lookup_batch
from jax_tt._ids.offsets import entered_batches
from jax_tt._jax.on_host import own_constants
from jax_tt._lookup.combine import batch_to_sum, combine
from jax_tt._lookup.limit import limit_of_sums
from jax_tt._lookup.offsets import nan_if, offsets_label, treatment_of
from jax_tt._lookup.pooled_sums import choose_execution, pooled_sums, prepare_call
from jax_tt._table.check import check_state
from jax_tt._table.options import NO_INPUTS, Lookup, StepInputs
from jax_tt._table.row_shard import row_shard
from jax_tt._table.state import State
from jax_tt._table.table import Table


def lookup_rows(
    table: Table, state: State, ids: Any, lookup: Lookup, inputs: StepInputs = NO_INPUTS
) -> tuple[jax.Array, State]:
    """Rows of a table of any kind, one per id, and the state after the call; see `jax_tt.lookup`."""
    with own_constants():
        shard = row_shard(table, state) if get_abstract_mesh().manual_axes else None
        check_state(shard.table if shard else table, state)
        batch, shape = lookup_batch(table.ids, ids)
        call, state = prepare_call(
            choose_execution(table, state, lookup, shard), state, batch, inputs
        )
        (sums,) = pooled_sums((call,))
        result_type = lookup.dtype or table.spec.storage(state)
        return reshape_rows(sums, (*shape, table.features)).astype(result_type), state


def pooled_rows(
    table: Table, state: State, bags: Any, lookup: Lookup, inputs: StepInputs = NO_INPUTS
) -> tuple[jax.Array, State]:
    """Pooled rows, one vector per bag, and the state after the call; see `jax_tt.lookup_bags`."""
    lookup = lookup.replace(caller="lookup_bags")
    with own_constants():
        shard = row_shard(table, state) if get_abstract_mesh().manual_axes else None
        check_state(shard.table if shard else table, state)
        storage = table.spec.storage(state)
        use = choose_execution(table, state, lookup, shard)
        batch, count = bag_batch(table.ids, bags, accumulator(storage))
        refused = None
        if not batch.rectangular:
            labels, treatment = [offsets_label(table)], treatment_of(use, lookup)
            (batch,), refused = entered_batches([batch], labels, treatment)
        summed = batch_to_sum(table, batch) if lookup.combiner == "max" else batch
        call, state = prepare_call(use, state, summed, inputs, refused)
        if call.limit is not None:
            call = call._replace(limit=limit_of_sums(call.limit, lookup, table, batch))
        (sums,) = pooled_sums((call,))
        result = combine(lookup, table, batch, sums)
        rows = result.reshape(count, table.features).astype(lookup.dtype or storage)
        if refused is not None:
            rows = nan_if(refused, rows)
        return rows, state
