"""One step of tables of many options on shards of their rows, in every way to run on them, and on one device."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import optimizers
from tests.lookup.table_shards import ROWS, RULES, WIDTH, batch_of, check_equal, placed, table_of

SGD, FROZEN = RULES["sgd"], jax_tt.Update(RULES["sgd"], frozen=True)


def _halved(rows: Any, gradients: Any, slots: Any, step: Any) -> Any:
    del step
    return rows - gradients / 2, slots


class Case(NamedTuple):
    """A table, and the bounds of its lookups, of ids out of range if they are checked.

    Two gradients, which have a row in common, are multiplied by ``factor``; all are divided by ``scale``.
    """

    table: Any
    bounds: str = "unchecked"
    factor: float = 1
    scale: float | None = None

    @property
    def by_columns(self) -> bool:
        """Whether its columns can be sharded."""
        update = self.table.update
        return not self.table.row_attributes and (update is None or update.optimizer.elementwise)

    @property
    def by_pages(self) -> bool:
        """Whether a `ShardedTable` takes the table: its rule changes the rows of a batch alone."""
        rule = None if self.table.update is None else self.table.update.optimizer
        return not isinstance(rule, optimizers.ReadsScaled | optimizers.ChangesAll)


_dense = partial(jax_tt.dense_table, ROWS, WIDTH)
_SKIPS = _dense(optimizer=SGD, skip_nonfinite=True)
# Sums of their rows and gradients are exact. XLA rounds the reference of Adam in two programs in two ways.
CASES = {
    "gradients": Case(_dense()),
    "clipped ids": Case(_dense(optimizer=RULES["rowwise"]), "clip"),
    "ids that read zeros": Case(_dense(optimizer=RULES["rowwise"]), "zero"),
    "refused ids": Case(_dense(optimizer=SGD), "error"),
    "not finite": Case(_SKIPS, factor=np.inf),
    "sums that are too large": Case(_SKIPS, factor=3.6e37, scale=2.0**20),
    "scaled sums that are too large": Case(_SKIPS, factor=2.0**110, scale=2.0**-20),
    "limited": Case(_dense(optimizer=SGD, max_gradient=1.5, skip_nonfinite=True)),
    "16 bits": Case(_dense(optimizer=SGD, param_dtype="bfloat16")),
    "frozen": Case(jax_tt.extension.with_update(_dense(), FROZEN)),
    "in plain JAX": Case(
        _dense(optimizer=optimizers.Custom(_halved), skip_nonfinite=True), factor=np.nan
    ),
    "scaled when read": Case(_dense(optimizer=optimizers.GlobalDecayRowWiseAdagrad(0.5))),
    "all rows change": Case(
        _dense(optimizer=optimizers.EMAInPlaceRowWiseAdagrad(0.5, average_every=1))
    ),
    "quantized": Case(
        jax_tt.quantized_table(
            ROWS, WIDTH, optimizer=SGD, skip_nonfinite=True, stochastic_rounding=False
        )
    ),
}


@jax.jit
def _states(rows: Any) -> Any:
    states = {name: case.table.init(jax.random.key(0)) for name, case in CASES.items()}
    for state in states.values():
        if "embedding" in state:
            state["embedding"] = rows.astype(state["embedding"].dtype)
    return states


def _steps(tables: Any, methods: Any, *given: Any) -> Any:
    """By case, the sums, the gradients of the weights, and the next values, or gradients, of the rows."""
    states, ids, weights, targets = given

    def loss(trained: Any, weights: Any) -> Any:
        sums = {}
        for name, table in tables.items():
            bags = jax_tt.Bags.from_padded(ids[name], weights=weights[name])
            state = {**states[name], **trained[name]}
            lookup = jax_tt.Lookup(bounds=CASES[name].bounds, method=methods[name])
            scale = CASES[name].scale
            sums[name], _ = jax_tt.lookup_bags(table, state, bags, lookup, grad_scale=scale)
        products = (jnp.sum(x.astype(jnp.float32) * targets[name]) for name, x in sums.items())
        return sum(products), sums

    trained = {
        name: {array: states[name][array] for array in table.spec.trained_names}
        for name, table in tables.items()
    }
    (new, dweights), sums = jax.grad(loss, (0, 1), has_aux=True)(trained, weights)
    states = {name: {**states[name], **new[name]} for name in tables}
    # A weight of an id that is refused has a gradient of NaN or 0.
    return sums, {name: dweights[name] for name in tables if name != "refused ids"}, states


def _batches() -> Any:
    ids, target = batch_of()
    weights = np.random.default_rng(2).integers(1, 4, ids.shape).astype(np.float32)
    outside, ids_of, targets = ids.copy(), {}, {}
    outside[0, 0], outside[3, 1] = ROWS + 7, -5
    for name, case in CASES.items():
        ids_of[name] = ids if case.bounds == "unchecked" else outside
        targets[name] = target.copy()
        targets[name][3, 2] = targets[name][11, 2] = case.factor * 3
    return ids_of, dict.fromkeys(CASES, weights), targets


def check_ways(mesh: Any, method: str) -> None:
    """Steps on a mesh of axes "data" and "model" equal those on one device bit for bit, in every way.

    The rows, or the columns, are sharded under `jax.jit`, the rows are sharded in a `shard_map`, or pages of them in a
    `ShardedTable`.
    """
    tables = {name: case.table for name, case in CASES.items()}
    states = _states(table_of("gradients")[1]["embedding"])
    batches, data = _batches(), P("data")
    methods = dict.fromkeys(CASES, method)
    # On one device, an operation raises.
    alone = partial(_steps, tables, methods | {"refused ids": "reference"})
    wanted = jax.jit(alone)(states, *batches)
    batch = jax.tree.map(partial(_on_mesh, NamedSharding(mesh, data)), batches)

    def check(way: str, got: Any) -> None:
        for kind, *pair in zip(("sums", "weights", "state"), got, wanted, strict=True):
            for name, arrays in pair[0].items():
                jax.tree.map(
                    partial(check_equal, name=f"{way}: {name}: {kind}"), arrays, pair[1][name]
                )

    def shards(spec: P, names: Any) -> Any:
        return {name: placed(tables[name], states[name], mesh, spec) for name in names}

    step, rows = partial(_steps, tables, methods), P("model", None)
    under_jit = shards(rows, tables)
    check("jit", jax.jit(step)(under_jit, *batch))
    names = [name for name, case in CASES.items() if case.by_columns]
    columns = partial(_steps, {name: tables[name] for name in names}, methods)
    check("columns", jax.jit(columns)(shards(P(None, "model"), names), *batch))
    specs = jax.tree.map(lambda x: x.sharding.spec, under_jit)
    inside = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, data, data, data), out_specs=(data, data, specs)
    )
    check("shard_map", jax.jit(inside)(under_jit, *batch))
    pages = jax_tt.Placement.round_robin(16)
    paged = {
        name: jax_tt.tables.ShardedTable(table, mesh, "model", pages)
        for name, table in tables.items()
        if CASES[name].by_pages
    }

    @jax.jit
    def of_pages(states: Any, *batch: Any) -> Any:
        stored = {name: table.of_rows(states[name]) for name, table in paged.items()}
        *found, after = _steps(paged, methods, stored, *batch)
        return *found, {name: table.by_row(after[name]) for name, table in paged.items()}

    check("ShardedTable", of_pages(states, *batch))


def _on_mesh(sharding: NamedSharding, array: np.ndarray) -> jax.Array:
    # Every process has all of the values.
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])
