"""Arrays by table and name, as `Collection.init` returns them: initial ones, and checks."""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import mismatch, one_of, type_of
from jax_tt._base.keywords import expect_names
from jax_tt._collection.statistics import STATISTICS, TOTALS, TOTALS_SHAPE
from jax_tt._lookup.shared import SHARED
from jax_tt._table.check import check_state
from jax_tt._table.copies import with_name
from jax_tt._table.options import BOUNDS
from jax_tt._table.table import Table
from jax_tt._table.wrapper import is_sharded

# In the state of a collection, what its fused tables share: the arrays of `SHARED`.
UPDATES = "updates"
# Numbers of a table that may share a loop: its result is copied once.
_SMALL = 1 << 20

_BY_TABLE = "a mapping from tables to arrays by name, as Collection.init returns it"
_BY_NAME = "the arrays of the table by name, as Collection.init returns them"


def initial_states(tables: Mapping[str, Table], keys: jax.Array) -> dict[str, dict[str, Any]]:
    """Initialises each table with its key.

    In a traced program, small tables that are equal are initialised in one loop: XLA takes about as long to compile the
    random numbers of one of them as of all.
    """
    alike: dict[Hashable, list[int]] = collections.defaultdict(list)
    names = list(tables)
    for place, (name, table) in enumerate(tables.items()):
        numbers = sum(map(math.prod, table.spec.param_shapes.values()))
        shares = isinstance(keys, Tracer) and not is_sharded(table) and numbers <= _SMALL
        alike[with_name(table, None) if shares else name].append(place)
    states: dict[str, dict[str, Any]] = {}
    for first, *others in alike.values():
        table = tables[names[first]]
        if not others:
            states[names[first]] = table.init(keys[first])
            continue
        places = [first, *others]
        stacked = jax.lax.map(table.init, keys[np.array(places)])
        for k, place in enumerate(places):
            states[names[place]] = jax.tree.map(lambda array, k=k: array[k], stacked)
    return {name: states[name] for name in names}


def bounds_by_table(bounds: str | Mapping[str, str], tables: Iterable[str]) -> Mapping[str, str]:
    """The ``bounds`` of every table, given for all of them or by table."""
    modes = bounds if isinstance(bounds, Mapping) else dict.fromkeys(tables, bounds)
    if modes.keys() != set(tables):
        raise mismatch("bounds", f"the tables {listed(modes)}", f"all of {listed(tables)}")
    for mode in modes.values():
        one_of("bounds", mode, BOUNDS)
    return modes


def check_states(argument: str, given: Any, tables: Iterable[str]) -> None:
    """Raises unless ``given`` has arrays by name of all these tables; others are not looked at."""
    _check_mapping(argument, given, _BY_TABLE)
    for name in tables:
        if name not in given:
            expected = f"what Collection.init returns, with the tables {listed(tables)}"
            raise mismatch(argument, f"no table {name!r}", expected)
        _check_mapping(f"{argument}[{name!r}]", given[name], _BY_NAME)


def check_shared(argument: str, state: Mapping[str, Any], tables: Sequence[str]) -> None:
    """Raises unless a state has the scalars that these tables share, and an array with the step count of each."""
    if not isinstance(state.get(UPDATES), Mapping):
        got = f"no {UPDATES!r}, the step counts and flags of tables with an optimizer"
        fix = "Collection.joined makes it from the states of single tables."
        raise mismatch(argument, got, "what Collection.init returns", fix)
    shared = dict.fromkeys(SHARED, ()) | {"step": (len(tables),)}
    check_arrays(f"{argument}[{UPDATES!r}]", state[UPDATES], shared)
    for name, shape in shared.items():
        value = state[UPDATES].get(name)
        # States of several models may be stacked along further axes.
        own = getattr(value, "shape", ())
        if getattr(value, "dtype", None) != jnp.float32 or own[len(own) - len(shape) :] != shape:
            what = f"float32 of shape {shape}" if shape else "a float32 scalar"
            expected = f"{what}, as Collection.init returns it"
            raise mismatch(f"{argument}[{UPDATES!r}][{name!r}]", value, expected)


def check_statistics(argument: str, state: Mapping[str, Any], tables: Iterable[str]) -> None:
    """Raises unless the totals of a state, if it has any, are of these tables."""
    _check_mapping(argument, state, _BY_TABLE)
    if STATISTICS not in state:
        return
    name = f"{argument}[{STATISTICS!r}]"
    _check_mapping(name, state[STATISTICS], "a mapping, as Collection.with_statistics returns it")
    name = f"{name}[{TOTALS!r}]"
    totals = state[STATISTICS].get(TOTALS)
    _check_mapping(name, totals, "totals by table, as Collection.with_statistics begins them")
    if set(totals) != set(tables):
        fix = "Collection.with_statistics(state) begins to count anew."
        raise mismatch(name, f"the tables {listed(totals)}", listed(tables), fix)
    for table, got in totals.items():
        # States of several models may be stacked along further axes.
        shape = getattr(got, "shape", None)
        if shape is None or shape[-2:] != TOTALS_SHAPE or got.dtype != jnp.uint32:
            fix = "Collection.with_statistics(state) begins to count."
            raise mismatch(f"{name}[{table!r}]", got, f"uint32 of shape {TOTALS_SHAPE}", fix)


def check_tables(argument: str, given: Any, known: Iterable[str]) -> None:
    """Raises for a table that does not exist, and for arrays that are not by name."""
    _check_mapping(argument, given, _BY_TABLE)
    expect_names(argument, "table", given, list(known))
    for name, own in given.items():
        _check_mapping(f"{argument}[{name!r}]", own, _BY_NAME)


def check_arrays(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises for names of arrays that a table does not have."""
    for name in given:
        if name not in known:
            got = f"the array {name!r}, which the table does not have"
            raise mismatch(argument, got, listed(known))


def check_like(argument: str, given: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Raises unless ``given`` has the arrays of ``like`` by name, with their shapes."""
    for name, array in like.items():
        shape = getattr(given.get(name), "shape", None)
        if shape != array.shape:
            got = f"no array {name!r}" if shape is None else f"{name!r} of shape {shape}"
            raise mismatch(argument, got, f"shape {array.shape}")


def check_replacements(tables: Mapping[str, Table], given: Any) -> None:
    """Raises unless ``given`` has read-only tables with their states, of the sizes of the tables of these names."""
    _check_mapping("tables", given, "a mapping from names to tables with their states")
    expect_names("tables", "table", given, tables)
    for name, pair in given.items():
        argument, old = f"tables[{name!r}]", tables[name]
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Table)):
            expected = "a table with its state, as quantize and files.load return them"
            raise mismatch(argument, type_of(pair), expected, error=TypeError)
        table, state = pair
        sizes = [f"{one.num_embeddings} rows x {one.features} columns" for one in (table, old)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{argument}: got {sizes[0]}; expected {sizes[1]}.")
        if table.ids.takes_keys != old.ids.takes_keys:
            got = f"{type_of(table)} for {type_of(old)}"
            raise mismatch(argument, got, "that both take keys, or none of them", error=TypeError)
        if table.update is not None:
            expected = "a read-only one, jax_tt.extension.freeze(table, state)"
            fix = "To train it further, make a new collection with it."
            raise mismatch(argument, "a table with an optimizer", expected, fix)
        check_state(table, state)


def listed(names: Iterable[str]) -> str:
    """Names in an error message."""
    return ", ".join(map(repr, names))


def _check_mapping(argument: str, given: Any, expected: str) -> None:
    if not isinstance(given, Mapping):
        raise mismatch(argument, type_of(given), expected, error=TypeError)
