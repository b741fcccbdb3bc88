"""The initial states of the tables of a collection."""

from __future__ import annotations

import collections
import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jax_tt._table.copies import with_name
from jax_tt._table.table import Table

# Numbers of a table that may share a loop: its result is copied once.
_SMALL = 1 << 20


def initial_states(tables: Mapping[str, Table], keys: jax.Array) -> dict[str, dict[str, Any]]:
    """Initialises each table with its key.

    In a traced program, small tables that are equal are initialised in one loop: XLA takes about as long to compile the
    random numbers of one of them as of all.
    """
    alike: dict[Hashable, list[int]] = collections.defaultdict(list)
    names = list(tables)
    for place, (name, table) in enumerate(tables.items()):
        numbers = sum(map(math.prod, table.spec.param_shapes.values()))
        shares = isinstance(keys, Tracer) and table.parts == 1 and numbers <= _SMALL
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
