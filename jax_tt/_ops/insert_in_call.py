"""Insertion inside of a training call, which may be differentiated.

What the loss differentiates are the arrays before the insertion. The cotangent of the arrays after it is theirs as
well: of a fused table its next value, which holds the new rows, so that insertion and step change one buffer in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax

from jax_tt._directories.hash_directory import WITHIN_EPOCHS
from jax_tt._ids.bags import Bags
from jax_tt._ids.keys import LocatedKeys
from jax_tt._ids.offsets import Treatment, any_refused
from jax_tt._kinds.hashed.table import HashTable, unsharded_hash_table
from jax_tt._lookup.one_loss import TracedInsertion, begin_insertion, end_insertion
from jax_tt._ops.insert import insert_anywhere, located
from jax_tt._ops.inserting import InsertRequest, key_requests
from jax_tt._table.check import check_state
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import Table


def insert_in_call(table: Table, state: State, ids: Any, lookup: Lookup) -> tuple[Any, State]:
    """Inserts the keys of a training call; returns the ids with their slots, and the state.

    Calls that do not train, ids that come with slots, and frozen tables are left as they are.
    """
    if not inserts(table, lookup, [ids]):
        return ids, with_checked_gradients(training([table], [lookup]), state)
    constant = constants_of(state)
    asked = to_insert(table, constant, [(table, ids)], lookup)
    ((done, after),) = insert_anywhere([asked], lookup.method, False)
    return located(ids, done, current=True), passed_through([asked.table], constant, state, after)


def inserts(table: Table, lookup: Lookup, parts: Sequence[Any]) -> bool:
    """Whether a call inserts the keys of a batch, whose ids are in ``parts``."""
    if not unsharded_hash_table(table).trains(lookup):
        return False
    ids = (part.ids if isinstance(part, Bags) else part for part in parts)
    return not all(isinstance(part, LocatedKeys) for part in ids)


def to_insert(
    table: Table, state: State, parts: Sequence[tuple[Table, Any]], lookup: Lookup
) -> InsertRequest:
    """What a call inserts into a table, whose arrays in ``state`` are constants.

    ``parts`` are the ids of the batch, each with the table that errors about them name.
    """
    whole = unsharded_hash_table(table)
    if whole.policy == "custom" or whole.policy in WITHIN_EPOCHS:
        argument = "scores=" if whole.policy == "custom" else "epoch="
        raise ValueError(
            f"{whole.ids.label}ids: got keys without slots in a training call, whose policy {whole.policy!r} needs "
            f"{argument} to insert them. Insert the batch first, done = layer.insert(batch, {argument}...), and call "
            "the layer with jax_tt.dynamic.with_slots(batch, done); or call layer.eval(), which inserts nothing."
        )
    check_state(table, state)
    # The lookup of the batch says what is wrong with it, and raises.
    how = Treatment("error" if lookup.bounds == "error" else "zero", lookup.method, quiet=True)
    found = [key_requests(unsharded_hash_table(named), ids, None, how) for named, ids in parts]
    requests, flags = zip(*found, strict=True)
    return InsertRequest(table, state, requests, None, lookup.axis_name, any_refused(flags))


def constants_of(state: State) -> dict[str, Any]:
    return jax.lax.stop_gradient(dict(state))


def training(tables: Iterable[Table], lookups: Iterable[Lookup]) -> list[Table]:
    """The tables whose lookups, one of each, are of training."""
    pairs = zip(tables, lookups, strict=True)
    return [table for table, lookup in pairs if unsharded_hash_table(table).trains(lookup)]


def passed_through(
    tables: Sequence[Table], constant: State, before: State, after: State
) -> dict[str, Any]:
    """The state after an insertion, whose trained arrays have the cotangents of the ones ``before``.

    Args:
        tables: those that have the arrays: one, or several of a stack.
        constant: the arrays that the insertion was given, in the place of those before.
        before, after: the arrays.
    """
    changed = [n for n in tables[0].spec.trained_names if after.get(n) is not constant.get(n)]
    kept = {name: before[name] for name, value in after.items() if value is constant[name]}
    if not changed:
        return {**after, **kept}
    insertion = begin_insertion(before[changed[0]])
    hashed = list(map(unsharded_hash_table, tables))
    check = partial(_check_gradients, hashed, insertion)

    replaced = {name: _replaced(check, before[name], after[name]) for name in changed}
    end_insertion(insertion, replaced[changed[0]])
    return {**after, **kept, **replaced}


def with_checked_gradients(tables: Sequence[Table], state: State) -> State:
    """The state of training calls whose keys were inserted before them; its gradient may be an error all the same.

    ``tables`` are those of the calls that train, of which the arrays are: one, or several of a stack.
    """
    refused = next(filter(_leaves_moments, map(unsharded_hash_table, tables)), None)
    if refused is None:
        return state
    check = partial(_refuse_gradient, refused)
    names = [name for name in tables[0].spec.trained_names if name in state]
    return {**state, **{name: _replaced(check, state[name], state[name]) for name in names}}


def _check_gradients(tables: Sequence[HashTable], insertion: TracedInsertion) -> None:
    """Raises if a training call of tables that have arrays together cannot be differentiated."""
    for table in filter(_leaves_moments, tables):
        _refuse_gradient(table)
    if not any(table.update is not None for table in tables) or not insertion.misses_rows():
        return
    label, which, its = tables[0].ids.label, "this fused table", "its next value"
    if len(tables) > 1:
        label = ", ".join(table.name or "a table" for table in tables) + ": "
        which, its = "these fused tables, which share arrays,", "their next values"
    raise ValueError(
        f"{label}the loss looks up {which} more than once, and {its} would lack the rows of keys that another training "
        "call inserts. Look up all ids in one call; or insert them before the loss, and look up "
        "jax_tt.dynamic.with_slots(ids, inserted) in each call."
    )


def _leaves_moments(table: HashTable) -> bool:
    """Whether an evicted key leaves its optimizer state to the next key in its slot."""
    return table.update is None and table.policy != "none" and bool(table.table.spec.row_names)


def _refuse_gradient(table: HashTable) -> None:
    raise TypeError(
        f"{table.ids.label}optimizer: got None for a table with the policy {table.policy!r}, whose training calls "
        "are differentiated: a key that is evicted would leave its moments in the optax state to the next key in "
        "its slot. Give the table a fused rule, e.g. jax_tt.hash_table(..., optimizer=jax_tt.optimizers."
        "Adagrad(0.05)), which resets them; or policy='none', which evicts nothing."
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _replaced(check: Callable[[], None], before: jax.Array, after: jax.Array) -> jax.Array:
    """``after``, whose cotangent is that of ``before``; ``check`` may refuse it."""
    del check, before
    return after


def _forward(
    check: Callable[[], None], before: jax.Array, after: jax.Array
) -> tuple[jax.Array, None]:
    del check, before
    return after, None


def _backward(check: Callable[[], None], residuals: None, cotangent: Any) -> tuple[Any, None]:
    del residuals
    check()
    return cotangent, None


_replaced.defvjp(_forward, _backward)
