"""The pooled sums behind every op, and their differentiation rule.

One rule covers all tables of a call. With ``out[b] = sum_j w_j row(i_j)`` over the positions j of bag b,

    d param = sum_j w_j (d row(i_j) / d param) . g[b(j)]      d w_j = row(i_j) . g[b(j)]

Only the cotangents that a loss needs are computed. The backward pass of a fused table runs gradient and optimizer in
one op and returns the new table in place of its cotangent: overwrite with gradient. Residuals hold the old table;
nothing reads it after the update, so a donated table is updated in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator, resolve_precision
from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import explicit_mesh, like_segments, over_explicit_axes
from jax_tt._ids.id_space import add_out_of_range, digits_in_range
from jax_tt._ids.parts import divide_batch, join_sums
from jax_tt._jax.reverse_only import first_order, of_first_order, reverse_only
from jax_tt._jax.vma import sum_gradients, vary_over, varying_axes
from jax_tt._lookup.limit import limit_of, limited_gradients, rearranged
from jax_tt._lookup.offsets import before_if, stepped_unless
from jax_tt._lookup.one_loss import check_first_use, note_next_values
from jax_tt._lookup.shared import Shared, shared_places
from jax_tt._lookup.warn import tell_cut_ids, warn_out_of_range
from jax_tt._table import groups
from jax_tt._table.added import MissingRows, added_rows, adds_rows, plus_added
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.groups import BoundTable, Call
from jax_tt._table.options import Lookup, NeededCotangents, StepInputs
from jax_tt._table.parts_of_arrays import Key, Part, SharedArrays, StackRows, attached, merged
from jax_tt._table.row_shard import RowShard, batch_on_shard, step_on_shard
from jax_tt._table.state import State
from jax_tt._table.step_values import step_values
from jax_tt._table.table import APPLIED, Table
from jax_tt.optimizers import ReadsScaled

# In a state: the number of out-of-range ids so far, which calls increment.
OUT_OF_RANGE = "out_of_range"


def choose_execution(
    table: Table, state: State, lookup: Lookup, shard: RowShard | None = None
) -> BoundTable:
    """Fixes how a call runs, so that forward and backward pass use the same method and precision."""
    execution = table.execution(lookup, state)
    precision = resolve_precision(lookup.precision)
    options = lookup.replace(method=execution.method, precision=precision)
    return BoundTable(table, options, execution, shard)


def prepare_call(
    use: BoundTable,
    state: State,
    batch: Batch,
    inputs: StepInputs,
    refused: jax.Array | None = None,
) -> tuple[Call, State]:
    """What comes before the differentiated part, and the state after it.

    That is the count of ids out of range, and `Table.prepare`. A call that is ``refused`` steps nothing; its batch has
    no ids.
    """
    table, lookup, execution, shard = use.table, use.lookup, use.execution, use.shard
    update = table.update
    if table.ids.takes_keys:
        # Keys without a row are out of range of the prepared batch, and are not in its sums.
        lookup = lookup.replace(bounds="zero")
    if batch.cut is not None:
        batch = tell_cut_ids(table, batch, lookup.bounds)
    before, given = state, batch
    with jax.named_scope(table.name or type(table).__name__):
        state, batch = table.prepare(state, batch, lookup)
    if refused is not None:
        state = before_if(refused, before, state, lookup.axis_name)
    if OUT_OF_RANGE in state:
        # Keys are out of range if they have no row, which is known once they are prepared.
        ids = batch if table.ids.takes_keys else given
        total = add_out_of_range(state[OUT_OF_RANGE], ids, table.ids, lookup.axis_name)
        state = {**state, OUT_OF_RANGE: total}
    added = None
    if table.ids.takes_keys and adds_rows(table, lookup):
        # What is trained, and what is in rows of stacks, such as keys, is not read.
        rest = {
            name: x
            for name, x in before.items()
            if name not in table.spec.trained_names and not isinstance(x, Part)
        }
        constant = jax.lax.stop_gradient(rest)
        added = MissingRows(table, lookup, table.spec.storage(before), constant, given, batch)
    # Where rows are on other devices, native ops are only given rows that exist.
    elsewhere = execution.devices or shard is not None
    if lookup.bounds == "warn" and (lookup.method == "reference" or elsewhere):
        warn_out_of_range(table, batch)
        lookup = lookup.replace(bounds="zero")
    values, limit = step_values(table, state, inputs), None
    if refused is not None and update is not None:
        values = stepped_unless(refused, state["step"], values, lookup.axis_name)
    if update is not None and update.max_gradient is not None:
        limit = limit_of(update, inputs.grad_scale, table.spec.storage(state))
    if shard is not None:
        whole_table, table = table, shard.table
        shard, batch = batch_on_shard(shard, whole_table, batch, lookup.bounds)
    trained: Any = {name: state[name] for name in table.spec.trained_names}
    rest = {name: state[name] for name in table.spec.constant_names}
    axes = varying_axes(batch) if update else varying_axes(trained, rest, batch)
    batch, rest = vary_over((batch, rest), axes)
    if update is None and axes:
        # Replicated parameters with a sharded batch: the transpose of pcast sums their gradients.
        trained = vary_over(trained, axes)
    elif update is None and lookup.axis_name is not None:
        trained = sum_gradients(trained, lookup.axis_name)
    return Call(
        BoundTable(table, lookup, execution, shard),
        {**trained, **rest},
        batch,
        values,
        added,
        limit,
    ), state


def pooled_sums(
    calls: Sequence[Call],
    wide: ConcatLayout | None = None,
    shared: Shared | None = None,
    together: SharedArrays = MappingProxyType({}),
) -> Any:
    """Weighted sums ``[S, nb, D]`` of every call in the accumulator type, differentiable in tables and weights.

    With ``wide``, they are columns of one array, which ops write if they can. One rule covers all tables but those that
    JAX can differentiate itself. ``shared`` are the scalars of the tables that do not have their own, ``together`` the
    arrays of which calls of native ops have parts.
    """
    if any(call.added is not None for call in calls):
        return _sums_with_added(calls, wide, shared, together)
    if wide is not None and any(call.use.shard for call in calls):
        return wide.joined(pooled_sums(calls, None, shared, together))
    together = dict(together)
    if explicit_mesh((calls, together)) is not None:
        # There, in automatic mode, the mesh has no explicit axes.
        assert wide is None  # the sums of tables may differ in their shardings
        specs = tuple(like_segments(call.batch) for call in calls)
        return over_explicit_axes(_sums_in_automatic_mode, (calls, shared, together), specs)
    by_rule: dict[int, Call] = {}
    sums: dict[int, jax.Array] = {}
    for k, call in enumerate(calls):
        use, state, batch, *_ = call
        if use.execution.devices:
            batch = divide_batch(batch, use.execution.devices)
        if use.execution.differentiable:
            with jax.named_scope(use.table.name or type(use.table).__name__):
                sums[k] = use.table.forward(state, batch, use.lookup)[0]
            continue
        trained = {name: state[name] for name in use.table.spec.trained_names}
        trained, weights = reverse_only((trained, batch.weights))
        batch = dataclasses.replace(batch, weights=weights)
        limit = call.limit
        if limit is not None and limit.ndim and use.execution.devices:
            shape = batch.num_segments, batch.num_bags, 1
            limit = rearranged(partial(join_sums, batch=call.batch), shape, limit)
        by_rule[k] = call._replace(state={**state, **trained}, batch=batch, limit=limit)
    shared, together = reverse_only((shared, together))
    if wide is not None and not sums:
        return _sums(list(by_rule.values()), shared, together, wide)
    if by_rule:
        found = _sums(list(by_rule.values()), shared, together, None)
        sums.update(zip(by_rule, found, strict=True))
    for k, call in enumerate(calls):
        if call.use.execution.devices:
            sums[k] = join_sums(sums[k], call.batch)
        elif call.use.shard is not None:
            sums[k] = jax.lax.psum(sums[k], call.use.shard.axes)
    in_order = tuple(sums[k] for k in range(len(calls)))
    return in_order if wide is None else wide.joined(in_order)


def _sums_with_added(
    calls: Sequence[Call], wide: ConcatLayout | None, shared: Shared | None, together: SharedArrays
) -> Any:
    added = {k: call.added for k, call in enumerate(calls) if call.added is not None}
    alone = [call._replace(added=None) for call in calls]
    if all(lookup.may_wait for lookup in added.values()):
        sums = pooled_sums(alone, wide, shared, together)
        return plus_added(_sums_of_added, sums, added, [call.shape for call in calls], wide)
    # The added ones come last: the places of shared scalars are counted among the calls.
    sums = list(pooled_sums([*alone, *map(_call_of, added.values())], None, shared, together))
    sums, of_added = sums[: len(calls)], sums[len(calls) :]
    for k, more in zip(added, of_added, strict=True):
        sums[k] = sums[k] + more
    return tuple(sums) if wide is None else wide.joined(sums)


def _sums_of_added(added: Sequence[MissingRows]) -> tuple[jax.Array, ...]:
    return pooled_sums(list(map(_call_of, added)))


def _call_of(added: MissingRows) -> Call:
    """The lookup itself."""
    batches = added.given, added.prepared
    table, rows, batch = added_rows(added.table, added.state, *batches, added.lookup, added.storage)
    rows, batch = vary_over((rows, batch), varying_axes(rows, batch))
    use = choose_execution(table, rows, added.lookup)
    return Call(use, jax.lax.stop_gradient(rows), batch, ())


def _sums_in_automatic_mode(inputs: tuple[Sequence[Call], Shared | None, SharedArrays]) -> Any:
    calls, shared, together = inputs
    return pooled_sums(calls, None, shared, together)


@jax.custom_vjp
def _sums(
    calls: Sequence[Call], shared: Shared | None, together: SharedArrays, wide: ConcatLayout | None
) -> Any:
    calls = calls if shared is None else _with_scalars(calls, shared)
    calls = attached(calls, together) if together else calls
    return groups.forward(_scaled_reads(calls)[0], wide)[0]


def _fwd(
    calls: Sequence[Call], shared: Shared | None, together: SharedArrays, wide: ConcatLayout | None
) -> tuple[Any, Any]:
    tables = [call.use.table for call in calls]
    scalars = [{}] * len(calls) if shared is None else shared.states(tables, used=shared.used)
    wanted = tuple(map(_wanted, calls, scalars, [together] * len(calls)))
    calls, shared, together = jax.tree.map(
        lambda leaf: leaf.value, (calls, shared, together), is_leaf=_is_primal
    )
    reading = calls if shared is None else _with_scalars(calls, shared)
    reading, scales = _scaled_reads(_asking(reading, wanted))
    (reading, arrays), witness = first_order((reading, together))
    reading = attached(reading, arrays) if together else reading
    sums, residuals = of_first_order(groups.forward(reading, wide), witness)
    return sums, (calls, shared, together, residuals, wanted, wide, scales)


def _bwd(saved: Any, gs: Any) -> tuple[list[Any], Shared | None, SharedArrays, None]:
    # Tables whose sums the loss does not use are left alone: a fused one is not stepped.
    unused = jax.custom_derivatives.SymbolicZero
    given = jax.tree.map(
        lambda g: None if isinstance(g, unused) else g, gs, is_leaf=lambda g: isinstance(g, unused)
    )
    calls, shared, together, _, wanted, *_ = saved
    check_first_use(calls, shared, wanted, given)
    operands, witness = first_order((saved, given))
    cotangents, after, new = of_first_order(_cotangents(*operands), witness)
    of_stacks = ((array, new[key]) for key, array in together.items())
    note_next_values(calls, cotangents, [(shared, after), *of_stacks])
    return cotangents, after, new, None


def _cotangents(saved: Any, gs: Any) -> tuple[list[Any], Shared | None, SharedArrays]:
    calls, shared, together, residuals, wanted, wide, scales = saved
    if gs is None:
        gs, wide = [None] * len(calls), None
    reading = calls if shared is None else _with_scalars(calls, shared)
    reading = attached(reading, together) if together else reading
    asking: Sequence[Call] = _asking(reading, wanted)
    unlimited: Sequence[jax.Array | None] = [None] * len(calls)
    if any(call.limit is not None for call in calls):
        asking, gs, unlimited = limited_gradients(asking, residuals, gs, wide)
    if any(call.use.shard for call in asking):
        asking = list(map(_step_of_shard, asking, gs))
    stepped = groups.backward(asking, residuals, gs, wide)
    places = shared_places(tuple(call.use.table for call in calls))
    applied = {places[k]: new[APPLIED] for k, (new, _) in enumerate(stepped) if APPLIED in new}
    after = shared.after(applied) if shared is not None and applied else None
    stepped_rows: dict[Key, list[tuple[StackRows, Any]]] = {key: [] for key in together}
    cotangents = []
    for k, (call, (new, dweights), own) in enumerate(zip(calls, stepped, unlimited, strict=True)):
        dweights = dweights if own is None else own
        use, state, batch = call.use, reading[k].state, call.batch
        if use.table.update is None:
            new = {name: grad.astype(state[name].dtype) for name, grad in new.items()}
        elif after is not None and k in places and not new:
            # The flag `used` says that all tables are overwritten, so this one with its old values.
            new = {name: state[name] for name in use.table.spec.trained_names}
        if dweights is not None:
            if (scale := scales[k]) is not None:
                dweights = dweights * scale.astype(dweights.dtype)
            dweights = dweights.astype(batch.weights.dtype)
        own_arrays = {name: new.get(name) for name in call.state}
        for name in own_arrays.keys() & new.keys():
            if isinstance(rows := state[name], StackRows):
                zero = use.table.update is None
                rows = rows.of(jnp.zeros_like(rows.array)) if zero else rows
                stepped_rows[rows.key].append((rows, new[name]))
                own_arrays[name] = None
        of_batch = dataclasses.replace(batch, ids=None, offsets=None, weights=dweights, slots=None)
        cotangents.append(Call(use, own_arrays, of_batch, None))
    of_stacks = {key: merged(parts) if parts else None for key, parts in stepped_rows.items()}
    return cotangents, after, of_stacks


def _step_of_shard(call: Call, g: jax.Array | None) -> Call:
    table, lookup, shard, batch = call.use.table, call.use.lookup, call.use.shard, call.batch
    if shard is None or table.update is None or g is None or not lookup.wanted.names:
        return call
    of_batch = tuple(sorted(varying_axes(batch, g) - {*shard.axes}, key=str))
    values, _ = step_on_shard(table, batch, g, lookup, call.values, shard.axes, of_batch)
    return call._replace(values=values)


def _with_scalars(calls: Sequence[Call], shared: Shared) -> Sequence[Call]:
    """The calls with the shared scalars in the states of their tables."""
    scalars = shared.states([call.use.table for call in calls])
    return [
        call._replace(state={**call.state, **of_table})
        for call, of_table in zip(calls, scalars, strict=True)
    ]


_sums.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _scaled_reads(calls: Sequence[Call]) -> tuple[list[Call], list[jax.Array | None]]:
    """The calls with the factors by which some rules multiply rows, and the factor of every position of each call.

    The factors become weights ``[S, cap]`` of the forward pass alone: the gradients of such a table are those with
    respect to the rows that the lookup returned. They are None where the rows are read as they are.
    """
    reading = list(calls)
    scales: list[jax.Array | None] = [None] * len(calls)
    for k, call in enumerate(calls):
        table, update, batch = call.use.table, call.use.table.update, call.batch
        optimizer = None if update is None else update.optimizer
        if not isinstance(optimizer, ReadsScaled) or not call.use.lookup.train:
            continue
        ((ids,), _), (slots,) = digits_in_range(table.ids, batch), table.spec.slots(call.state)
        accum = accumulator(table.spec.storage(call.state))
        of_ids = (
            slot.at[ids.reshape(-1)].get(mode="promise_in_bounds", wrap_negative_indices=False)
            for slot in slots
        )
        read = tuple(slot.astype(accum) for slot in of_ids)
        scale = optimizer.read_scale(read, call.values["hyper"]).reshape(ids.shape)
        weights = scale.astype(accum)
        if batch.weights is not None:
            weights = weights * batch.weights.astype(weights.dtype)
        reading[k] = call._replace(batch=dataclasses.replace(batch, weights=weights), flat=None)
        scales[k] = scale
    return reading, scales


def _asking(calls: Sequence[Call], wanted: Sequence[NeededCotangents]) -> list[Call]:
    """The calls with options that say which cotangents are wanted."""
    return [
        call._replace(use=call.use.wanting(these))
        for call, these in zip(calls, wanted, strict=True)
    ]


def _wanted(call: Call, scalars: Mapping[str, Any], together: SharedArrays) -> NeededCotangents:
    """The cotangents that the loss needs, from the marks of custom_vjp in place of the arrays."""
    table, update, weights = call.use.table, call.use.table.update, call.batch.weights
    marks = {n: together[x.key] if isinstance(x, Part) else x for n, x in call.state.items()}
    names = frozenset(name for name in table.spec.trained_names if marks[name].perturbed)
    if update is not None:
        _check_whole(table, names)
        names = frozenset() if update.frozen else names
    if names:
        _check_scalars(table, scalars)
    return NeededCotangents(names, weights is not None and weights.perturbed)


def _check_whole(table: Table, names: frozenset[str]) -> None:
    for unit in table.spec.units:
        missing = [name for name in unit if name not in names]
        if missing and len(missing) < len(unit):
            raise ValueError(
                f"{table.ids.label}table: a fused op was differentiated with respect to a part of its table; "
                f"{', '.join(missing)} would lose their update. Differentiate with respect to the whole table, or to "
                "none of it."
            )


def _check_scalars(table: Table, scalars: Mapping[str, Any]) -> None:
    missing = [name for name, value in scalars.items() if not value.perturbed]
    if missing:
        raise ValueError(
            f"{table.ids.label}table: a collection was differentiated with respect to this table, but not to its "
            f"{', '.join(missing)}, which would lose their update. Differentiate with respect to what "
            "Collection.trained returns, or to all variables of the collection."
        )


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)
