"""Random collections: a native call equals numpy and the tables one by one.

A call compiles one collection and steps it with several batches. Each table that only one feature uses must have
the rows and the new arrays that it has on its own, bit for bit; pooled rows, ordinary gradients and steps of SGD must
be those of numpy, and so must the statistics. Then comes a batch with hostile contents, which may raise or return, and
the first batch once more, which must return the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt import optimizers
from jax_tt._table.state import SCALARS
from tests.fuzz.collection_case import RATE, Case, Rows, fitting, random_batch, random_case
from tests.helpers import bag_model, core_gradients

BATCHES = 2


def one(rng: np.random.Generator) -> str:
    """One call, ``"checked"`` by value."""
    # Most of the time is that of the compiler.
    jax.config.update("jax_disable_most_optimizations", True)
    case = random_case(rng)
    with jax.enable_x64(case.x64):
        try:
            return _checked(rng, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def _checked(rng: np.random.Generator, case: Case) -> str:
    collection = case.collection
    layout, keyed = fitting(case)
    state = jax.jit(collection.init)(jax.random.key(int(rng.integers(1000))))
    state = collection.with_statistics(state)
    first = None
    alone = [name for name, features in collection.features_of.items() if len(features) == 1]
    for _ in range(BATCHES):
        batch, contents = random_batch(rng, case)
        g = {name: _cotangent(rng, case, name) for name in collection.features}
        given = jax_tt.KeyedBags.from_bags(batch, capacity=128) if keyed else batch
        arguments = (state, given, _in_layout(g, layout))
        result = _step(collection, case.stack, layout, case.lookup, *arguments)
        first = first or (arguments, result)
        rows, after = result
        rows = _by_feature(collection, rows, layout)
        _check_rows(case, state, contents, rows)
        _check_arrays(case, state, contents, g, after)
        _check_statistics(case, state, contents, after)
        if not keyed:
            _check_alone(case, alone, (state, batch, g), rows, after)
        state = _maintained(collection, after)
    assert first is not None
    hostile = jax.tree.map(functools.partial(_hostile, rng), first[0][1])
    try:
        jax.block_until_ready(
            _step(collection, case.stack, layout, case.lookup, first[0][0], hostile, first[0][2])
        )
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert str(error).startswith(("OUT_OF_RANGE: ", "INVALID_ARGUMENT: ")), error
    again = _step(collection, case.stack, layout, case.lookup, *first[0])
    jax.tree.map(np.testing.assert_array_equal, again, first[1])
    return "checked"


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _step(
    collection: Any, stack: bool, layout: str, lookup: Any, state: Any, batch: Any, g: Any
) -> Any:
    """The rows, and the state in which a table without an optimizer has its gradients in place of its arrays.

    With ``stack``, tables that are alike share their arrays in the step.
    """
    by_table, beside = state, {k: state[k] for k in ("updates", "statistics") if k in state}
    if stack:
        collection = dataclasses.replace(collection, stack=True)
        state = beside | collection.from_tables(by_table, state.get("updates", {}))

    def rows_of(trained: Any) -> Any:
        arrays = collection.replaced(state, trained)
        return jax_tt.lookup_features(collection, arrays, batch, lookup, layout=layout)

    rows, pull, after = jax.vjp(rows_of, collection.trained(state), has_aux=True)
    g = jax.tree.map(lambda cotangent, row: cotangent.astype(row.dtype), g, rows)
    after, others = collection.overwritten(after, pull(g)[0])
    after = collection.replaced(after, others)
    if stack:
        tables = {name: collection.of(after, name) for name in collection.tables}
        after = {name: after[name] for name in beside} | {
            name: {array: own[array] for array in by_table[name]} for name, own in tables.items()
        }
    return rows, after


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _steps_alone(
    collection: Any, names: tuple[str, ...], lookup: Any, states: Any, batch: Any, g: Any
) -> Any:
    """The same for tables with one feature, one by one."""
    results = {}
    for name in names:
        (feature,) = collection.features_of[name]
        table = collection.separated_tables[name]
        combiner = collection.features[feature].combiner

        def rows_of(
            trained: Any, name: str = name, table: Any = table, combiner: Any = combiner
        ) -> Any:
            arrays = {**states[name], **trained}
            (value,) = (batch[feature] for feature in collection.features_of[name])
            if combiner is None:
                return jax_tt.lookup(table, arrays, value, lookup)[0]
            options = dataclasses.replace(lookup, combiner=combiner)
            return jax_tt.lookup_bags(table, arrays, value, options)[0]

        trained = {array: states[name][array] for array in table.spec.trained_names}
        rows, pull = jax.vjp(rows_of, trained)
        results[name] = rows, pull(g[feature].astype(rows.dtype))[0]
    return results


@functools.partial(jax.jit, static_argnums=0)
def _maintained(collection: Any, state: Any) -> Any:
    # In place of the gradients of tables without an optimizer come small tables.
    small = {
        name: {
            array: value * 0.5 for array, value in own.items() if array in table.spec.param_names
        }
        for name, own in state.items()
        if (table := collection.tables.get(name)) is not None and table.update is None
    }
    return collection.maintain(collection.replaced(state, small))


@functools.partial(jax.jit, static_argnums=0)
def _dense(table: Any, state: Any) -> jax.Array:
    return jax_tt.tables.to_dense(table, state)


def _cotangent(rng: np.random.Generator, case: Case, name: str) -> np.ndarray:
    form, table = case.forms[name], case.collection.for_features[name]
    shape = form.shape if form.kind == "array" else form.shape[:1]
    # Exact in every type, and so are the sums of a few.
    return (rng.integers(-8, 9, (*shape, table.features)) / 8).astype(np.float32)


def _in_layout(g: dict[str, np.ndarray], layout: str) -> Any:
    if layout == "features":
        return g
    join = np.concatenate if layout == "concatenated" else np.stack
    return join(list(g.values()), axis=1)


def _by_feature(collection: Any, rows: Any, layout: str) -> dict[str, Any]:
    if layout == "features":
        return rows
    widths = [table.features for table in collection.for_features.values()]
    flat = rows.reshape(rows.shape[0], sum(widths))
    parts = np.split(np.asarray(flat), np.cumsum(widths)[:-1], axis=1)
    return dict(zip(collection.features, parts, strict=True))


def _tolerance(table: Any) -> float:
    return 3e-2 if jnp.dtype(table.param_dtype).itemsize == 2 else 1e-4


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _close(got: Any, want: np.ndarray, tolerance: float, what: str) -> None:
    got = _wide(got).reshape(want.shape)
    scale = max(1.0, np.abs(want).max(initial=0))
    error = np.abs(got - want).max(initial=0)
    assert error <= tolerance * scale, f"{what}: wrong by {error:.2e} of {scale:.2e}"


def _read(case: Case, name: str, rows: Rows) -> Rows:
    """The bags with ids that the table has: the nearest row, or one more that is 0; a maximum leaves these out."""
    table = case.collection.tables[case.collection.features[name].table]
    n = table.num_embeddings
    bags, weights = rows
    if case.lookup.bounds == "clip":
        return [[_nearest(table, i) for i in bag] for bag in bags], weights
    if case.collection.features[name].combiner == "max":
        return [[i for i in bag if 0 <= i < n] for bag in bags], weights
    return [[i if 0 <= i < n else n for i in bag] for bag in bags], weights


def _nearest(table: Any, i: int) -> int:
    """The id whose row is nearest to that of an id which may be out of range."""
    n = table.num_embeddings
    if 0 <= i < n:
        return i
    row = 0 if i < 0 else n - 1
    ordered = jax_tt.tables.find(table, jax_tt.tables.OrderedTable)
    return row if ordered is None else int(np.argmax(ordered.id_order.rows == row))


def _model(case: Case, name: str, dense: np.ndarray, contents: Any, g: np.ndarray) -> Any:
    """Pooled rows and the gradient of the table."""
    combiner = case.collection.features[name].combiner or "sum"
    rows, weights = _read(case, name, contents[name])
    with_zero = np.concatenate([dense, np.zeros_like(dense[:1])])
    g = g.reshape(-1, dense.shape[1]).astype(np.float64)
    out, dtable, _ = bag_model(with_zero, rows, weights, combiner, g)
    return out, dtable[:-1]


def _cancels(case: Case, name: str, contents: Any) -> bool:
    """Whether the weights of a bag nearly cancel, so that its mean is not of the size of its rows."""
    if case.collection.features[name].combiner != "mean" or contents[name][1] is None:
        return False
    return any(abs(sum(bag)) < 0.5 for bag in contents[name][1])


def _check_rows(case: Case, state: Any, contents: Any, rows: Any) -> None:
    for name, feature in case.collection.features.items():
        table = case.collection.tables[feature.table]
        dense = _wide(_dense(table, state[feature.table]))
        zero = np.zeros((len(contents[name][0]), table.features))
        want, _ = _model(case, name, dense, contents, zero)
        if not _cancels(case, name, contents):
            _close(rows[name], want, _tolerance(table), f"rows of {name}")


def _check_arrays(case: Case, state: Any, contents: Any, g: Any, after: Any) -> None:
    """Ordinary gradients, and tables after a step of SGD, of dense tables and tensor trains."""
    for name, features in case.collection.features_of.items():
        table, own = case.collection.tables[name], state[name]
        rule = None if table.update is None else table.update.optimizer
        stepped = isinstance(rule, optimizers.SGD)
        plain = jax_tt.tables.innermost(table) is table
        exact = plain and (rule is None or stepped)
        used = [case.collection.features[feature].combiner for feature in features]
        ties = "max" in used and jnp.dtype(table.param_dtype).itemsize == 2
        if not exact or ties or any(_cancels(case, f, contents) for f in features):
            continue
        dense = _wide(_dense(table, own))
        gradient = sum(_model(case, f, dense, contents, g[f])[1] for f in features)
        params = [own[array] for array in table.spec.param_names]
        wanted = core_gradients(tuple(params), gradient) if len(params) > 1 else [gradient]
        for array, param, want in zip(table.spec.param_names, params, wanted, strict=True):
            if stepped:
                want = _wide(param) - RATE * want
            _close(after[name][array], want, _tolerance(table), f"{name}: {array}")


def _check_statistics(case: Case, state: Any, contents: Any, after: Any) -> None:
    old, new = case.collection.statistics(state), case.collection.statistics(after)
    for name, features in case.collection.features_of.items():
        table = case.collection.tables[name]
        ids = [i for f in features for bag in contents[f][0] for i in bag]
        inside = [i for i in ids if 0 <= i < table.num_embeddings]
        read = [_nearest(table, i) for i in ids] if case.lookup.bounds == "clip" else inside
        unique = len(set(read))
        want = (len(ids), unique, len(ids) - len(inside))
        got = tuple(b - a for a, b in zip(old[name][:3], new[name][:3], strict=True))
        assert got == want, f"statistics of {name}: {got} instead of {want}"


def _check_alone(case: Case, names: list[str], inputs: Any, rows: Any, after: Any) -> None:
    collection, (state, batch, g) = case.collection, inputs
    states = collection.separated(state)
    results = _steps_alone(collection, tuple(names), case.lookup, states, batch, g)
    for name, (own_rows, own) in results.items():
        (feature,) = collection.features_of[name]
        np.testing.assert_array_equal(
            np.asarray(rows[feature]), np.asarray(own_rows), f"rows of {feature}"
        )
        for array, value in own.items():
            if array.removeprefix("cache_") not in SCALARS:
                np.testing.assert_array_equal(after[name][array], value, f"{name}: {array}")


def _hostile(rng: np.random.Generator, leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    if leaf.dtype.kind == "f":
        special = np.array([0, np.inf, -np.inf, np.nan, 3e38], leaf.dtype)
        return np.where(rng.random(leaf.shape) < 0.3, rng.choice(special, leaf.shape), leaf)
    info = np.iinfo(leaf.dtype)
    anything = rng.integers(info.min, info.max, leaf.shape, leaf.dtype, endpoint=True)
    return np.where(rng.random(leaf.shape) < 0.3, anything, leaf)
