"""Random collections: a native call equals numpy and the tables one by one, and a malformed input names its feature.

A valid call compiles one collection and steps it with several batches. Each table that only one feature uses must have
the rows and the new arrays that it has on its own, bit for bit; pooled rows, ordinary gradients and steps of SGD must
be those of numpy, and so must the statistics. Then comes a batch with hostile contents, which may raise or return, and
the first batch once more, which must return the same bits. Malformed calls are traced alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt import optimizers
from jax_tt._tables.table import SCALARS
from tests.fuzz.trace import EXOTIC, SLIPS
from tests.helpers import bag_model, core_gradients

RATE = 0.25
RULES = (
    None,
    None,
    optimizers.SGD(RATE),
    optimizers.SGD(RATE),
    optimizers.Adagrad(0.1),
    optimizers.RowWiseAdagrad(0.1),
    optimizers.Adam(0.1),
)
COMBINERS = ("sum", "sum", "mean", "mean_count", "sqrtn", "max", None)
BATCHES = 2
MALFORMED = 0.8  # of the calls: a valid one is compiled


@dataclasses.dataclass(frozen=True)
class Form:
    """How the ids of a feature come, which is a part of the program."""

    kind: str  # array, rectangle, ragged or padded
    shape: tuple[int, ...]  # of the ids; for ragged bags, the number of bags and the capacity
    weighted: bool = False
    split: bool = False
    dtype: str = "int32"


@dataclasses.dataclass(frozen=True)
class Case:
    collection: Any
    forms: dict[str, Form]
    lookup: Any
    layout: str
    keyed: bool
    x64: bool


# The ids and weights of every bag of a feature, or of the one bag of each id of a sequence.
Rows = tuple[list[list[int]], list[list[float]] | None]


def one(rng: np.random.Generator) -> str:
    """One call: ``"raised"`` for malformed input, ``"checked"`` by value otherwise."""
    # Most of the time is that of the compiler.
    jax.config.update("jax_disable_most_optimizations", True)
    case = _case(rng)
    with jax.enable_x64(case.x64):
        try:
            return _malformed(rng, case) if rng.random() < MALFORMED else _valid(rng, case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


# Random collections.


def _case(rng: np.random.Generator) -> Case:
    x64 = rng.random() < 0.15
    layout = str(rng.choice(["features", "features", "concatenated", "stacked"]))
    width = int(rng.integers(1, 10)) if layout == "stacked" else None
    tables, features = {}, {}
    for k in range(rng.integers(1, 7)):
        tables[f"table{k}"] = _table(rng, width, x64)
        for f in range(rng.choice([1, 1, 1, 2, 3])):
            combiner = COMBINERS[rng.integers(len(COMBINERS))]
            features[f"feature{k}.{f}"] = jax_tt.Feature(f"table{k}", combiner=combiner)
    names = [str(name) for name in rng.permutation(list(features))]
    collection = jax_tt.Collection(tables, {name: features[name] for name in names})
    samples = int(rng.integers(0, 5)) if layout != "features" else None
    split = {name: rng.random() < 0.3 for name in tables}
    forms = {
        name: _form(rng, collection, name, samples, split[feature.table])
        for name, feature in collection.features.items()
    }
    lookup = jax_tt.Lookup(bounds=str(rng.choice(["error", "warn", "zero", "clip"])), method="ffi")
    summed = all(f.combiner not in (None, "max") for f in collection.features.values())
    keyed = summed and not any(form.split for form in forms.values()) and rng.random() < 0.5
    return Case(collection, forms, lookup, layout, keyed, x64)


def _table(rng: np.random.Generator, width: int | None, x64: bool) -> Any:
    width = int(rng.integers(1, 10)) if width is None else width
    rows = int(rng.choice([1, 2, 7, rng.integers(4, 150)]))
    types = ["float32", "float32", "bfloat16", "float16", *(["float64"] * 4 if x64 else [])]
    options: dict[str, Any] = {
        "param_dtype": str(rng.choice(types)),
        "optimizer": RULES[rng.integers(len(RULES))],
        "stochastic_rounding": bool(rng.integers(2)),
    }
    kind = rng.choice(["dense", "train", "cached"])
    if kind == "dense":
        return jax_tt.dense_table(rows, width, **options)
    cache = None
    if kind == "cached":
        gradients = str(rng.choice(["rows", "cores"]))
        cache = jax_tt.RowCache(8, ways=4, refresh_every=1, gradients=gradients)
    order = jax_tt.order.IdOrder(rng.permutation(rows)) if rng.random() < 0.2 else None
    rank = int(rng.integers(1, 4))
    return jax_tt.tt_table(rows, width, tt_ranks=rank, cache=cache, id_order=order, **options)


def _form(
    rng: np.random.Generator, collection: Any, name: str, samples: int | None, split: bool
) -> Form:
    feature = collection.features[name]
    table = collection.tables[feature.table]
    split = split and len(table.radices) > 1
    bags = int(rng.integers(0, 5)) if samples is None else samples
    length = int(rng.integers(0, 5))
    if feature.combiner is None:
        shape = (bags,) if samples is not None else tuple(rng.integers(0, 4, rng.integers(0, 3)))
        return Form("array", tuple(map(int, shape)), split=split)
    kind = str(rng.choice(["rectangle", "ragged", "padded"]))
    weighted = kind != "rectangle" and feature.combiner != "max" and rng.random() < 0.5
    shape = (bags, 4 * bags + int(rng.integers(0, 3))) if kind == "ragged" else (bags, length)
    return Form(kind, shape, weighted, split)


def _batch(rng: np.random.Generator, case: Case) -> tuple[dict[str, Any], dict[str, Rows]]:
    """A batch with contents of these forms, and what is in its bags."""
    batch, contents = {}, {}
    for name, form in case.forms.items():
        table = case.collection.tables[case.collection.features[name].table]
        batch[name], contents[name] = _value(rng, form, table, case.lookup.bounds)
    return batch, contents


def _value(rng: np.random.Generator, form: Form, table: Any, bounds: str) -> tuple[Any, Rows]:
    n = table.num_embeddings
    ids = rng.integers(0, n, form.shape if form.kind != "ragged" else form.shape[1:])
    if bounds != "error":
        strange = rng.choice([-2, n, n + 1, 2**31 - 1, -(2**31)], ids.shape)
        ids = np.where(rng.random(ids.shape) < 0.15, strange, ids)
    given: Any = ids.astype(form.dtype)
    if form.kind == "padded":
        # All negative ids are padding once they are split.
        pads = (given < 0) & form.split | (rng.random(ids.shape) < 0.3)
        given = np.where(pads, np.int32(-1), given)
    weights = (rng.integers(-4, 9, ids.shape) / 4).astype(np.float32) if form.weighted else None
    if form.kind == "ragged":
        lengths = rng.integers(0, 5, form.shape[0])
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        bags = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
        rows = [given[bag].tolist() for bag in bags]
        of_bags = None if weights is None else [weights[bag].tolist() for bag in bags]
    elif form.kind == "array":
        rows, of_bags = [[i] for i in given.ravel().tolist()], None
    else:
        kept = [row != -1 if form.kind == "padded" else row == row for row in given]
        rows = [row[keep].tolist() for row, keep in zip(given, kept, strict=True)]
        of_bags = None
        if weights is not None:
            of_bags = [row[keep].tolist() for row, keep in zip(weights, kept, strict=True)]
    held: Any = table.innermost.shape.split_ids(given) if form.split else given
    if form.kind == "ragged":
        held = jax_tt.Bags(held, ends, weights)
    elif form.kind == "padded":
        held = jax_tt.Bags(held, None, weights, padded=True)
    elif form.kind == "rectangle" and form.split:
        held = jax_tt.Bags(held)
    return held, (rows, of_bags)


# Valid calls.


def _valid(rng: np.random.Generator, case: Case) -> str:
    collection = case.collection
    layout, keyed = _fitting(case)
    state = jax.jit(collection.init)(jax.random.key(int(rng.integers(1000))))
    state = collection.with_statistics(state)
    first = None
    alone = [name for name, features in collection.features_of.items() if len(features) == 1]
    for _ in range(BATCHES):
        batch, contents = _batch(rng, case)
        g = {name: _cotangent(rng, case, name) for name in collection.features}
        given = jax_tt.KeyedBags.from_bags(batch, capacity=128) if keyed else batch
        arguments = (state, given, _in_layout(g, layout))
        result = _step(collection, layout, case.lookup, *arguments)
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
            _step(collection, layout, case.lookup, first[0][0], hostile, first[0][2])
        )
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert str(error).startswith(("OUT_OF_RANGE: ", "INVALID_ARGUMENT: ")), error
    again = _step(collection, layout, case.lookup, *first[0])
    jax.tree.map(np.testing.assert_array_equal, again, first[1])
    return "checked"


def _fitting(case: Case) -> tuple[str, bool]:
    """The layout, and whether the bags come keyed, where the features allow that."""
    sequences = [n for n, f in case.collection.features.items() if f.combiner is None]
    wide = all(len(case.forms[name].shape) == 1 for name in sequences)
    weights = {form.weighted for form in case.forms.values()}
    return case.layout if wide else "features", case.keyed and len(weights) == 1


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(collection: Any, layout: str, lookup: Any, state: Any, batch: Any, g: Any) -> Any:
    """The rows, and the state in which a table without an optimizer has its gradients in place of its arrays."""

    def rows_of(trained: Any) -> Any:
        arrays = collection.replaced(state, trained)
        return jax_tt.embed_collection(collection, arrays, batch, lookup, layout=layout)

    rows, pull, after = jax.vjp(rows_of, collection.trained(state), has_aux=True)
    g = jax.tree.map(lambda cotangent, row: cotangent.astype(row.dtype), g, rows)
    after, others = collection.overwritten(after, pull(g)[0])
    return rows, collection.replaced(after, others)


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
                return jax_tt.lookup_rows(table, arrays, value, lookup)[0]
            options = dataclasses.replace(lookup, combiner=combiner)
            return jax_tt.pooled_rows(table, arrays, value, options)[0]

        trained = {array: states[name][array] for array in table.trained_names}
        rows, pull = jax.vjp(rows_of, trained)
        results[name] = rows, pull(g[feature].astype(rows.dtype))[0]
    return results


@functools.partial(jax.jit, static_argnums=0)
def _maintained(collection: Any, state: Any) -> Any:
    # In place of the gradients of tables without an optimizer come small tables.
    small = {
        name: {array: value * 0.5 for array, value in own.items() if array in table.param_names}
        for name, own in state.items()
        if (table := collection.tables.get(name)) is not None and table.update is None
    }
    return collection.maintain(collection.replaced(state, small))


@functools.partial(jax.jit, static_argnums=0)
def _dense(table: Any, state: Any) -> jax.Array:
    return table.to_dense(state)


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
    return row if table.id_order is None else int(np.argmax(table.id_order.rows == row))


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
        exact = table.cached is None and table.id_order is None and (rule is None or stepped)
        used = [case.collection.features[feature].combiner for feature in features]
        ties = "max" in used and jnp.dtype(table.param_dtype).itemsize == 2
        if not exact or ties or any(_cancels(case, f, contents) for f in features):
            continue
        dense = _wide(_dense(table, own))
        gradient = sum(_model(case, f, dense, contents, g[f])[1] for f in features)
        params = [own[array] for array in table.param_names]
        wanted = core_gradients(tuple(params), gradient) if len(params) > 1 else [gradient]
        for array, param, want in zip(table.param_names, params, wanted, strict=True):
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


# Malformed calls.


def _malformed(rng: np.random.Generator, case: Case) -> str:
    names = list(case.collection.features)
    name = names[rng.integers(len(names))]
    mutate = MUTATIONS[rng.integers(len(MUTATIONS))]
    layout, _ = _fitting(case)
    state = jax.eval_shape(case.collection.init, jax.random.key(0))
    batch, _ = _batch(rng, case)
    call = {"state": state, "batch": batch, "layout": layout}
    words = mutate(rng, case, call, name)
    if words is None:
        return "returned"
    what = f"{mutate.__name__} of {name}"

    def run(state: Any) -> Any:
        return jax_tt.embed_collection(
            case.collection, state, call["batch"], case.lookup, layout=call["layout"]
        )

    try:
        jax.eval_shape(run, call["state"])
    except (ValueError, TypeError) as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{what}: the message does not name {missing}: {str(error)[:300]}"
        return "raised"
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error
    assert not words, f"{what}: accepted"
    return "returned"


# Each changes the call, and returns what the message must name; nothing if the call may be right by luck, and None if
# it does not apply.
Words = tuple[str, ...] | None


def missing_feature(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    left = list(call["batch"])[: list(call["batch"]).index(name)]
    call["batch"] = {feature: call["batch"][feature] for feature in left}
    return name, case.collection.features[name].table


def unknown_feature(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    call["batch"]["label"] = call["batch"][name]
    return ("'label'", name)


def junk(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    pool = SLIPS if rng.random() < 0.7 else EXOTIC
    call["batch"][name] = value = pool[rng.integers(len(pool))]
    certain = isinstance(value, str | float | dict | np.floating) or value is None
    return (name, case.collection.features[name].table) if certain else ()


def no_batch(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    call["batch"] = SLIPS[rng.integers(len(SLIPS))]
    return ("batch", name)


def floats(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    dtype = rng.choice(["float32", "float64", "complex64", "bool", "object"])
    call["batch"][name] = np.ones((2, 3), dtype)
    return ("feature", name, case.collection.features[name].table)


def bad_offsets(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    offsets = (np.zeros(0, np.int32), np.zeros((2, 2), np.int32), np.array([0.0, 3.0]), "x")
    call["batch"][name] = jax_tt.Bags(np.arange(3), offsets[rng.integers(len(offsets))])
    return ("feature", name, case.collection.features[name].table, "offsets")


def bad_weights(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    weights = (np.ones(2), np.ones((3, 1)), np.float32(1), np.ones(3, "complex64"), "x")
    ids, offsets = np.zeros(3, np.int32), np.array([0, 1, 3])
    call["batch"][name] = jax_tt.Bags(ids, offsets, weights[rng.integers(len(weights))])
    return ("feature", name, case.collection.features[name].table, "weights")


def weights_of_a_sequence(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    if case.collection.features[name].combiner not in (None, "max"):
        return None
    call["batch"][name] = jax_tt.Bags(np.zeros((2, 3), np.int32), weights=np.ones((2, 3)))
    return ("feature", name, case.collection.features[name].table, "weights")


def split_ids(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    digits = np.zeros((2, 3, rng.choice([1, 2, 4, 6])), np.int32)
    call["batch"][name] = jax_tt.Bags(jax_tt.SplitIds(digits))
    return ("feature", name, case.collection.features[name].table, "SplitIds")


def types_of_ids(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    table = case.collection.features[name].table
    features = case.collection.features_of[table]
    if len(features) == 1 or any(case.forms[feature].split for feature in features):
        return None
    call["batch"] |= dict.fromkeys(features, np.zeros((2, 3), np.int32))
    call["batch"][name] = np.zeros((2, 3), np.uint32)
    call["layout"] = "features"
    return (table, *features)


def samples(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    names = list(case.collection.features)
    if len(names) == 1:
        return None
    call["layout"] = str(rng.choice(["concatenated", "stacked"]))
    shape = (7,) if case.collection.features[name].combiner is None else (7, 2)
    call["batch"][name] = np.zeros(shape, np.int32)
    if case.forms[name].split:
        return None
    # Another feature may be refused before this one.
    return (call["layout"], "feature", "expected")


def sequences(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    if case.collection.features[name].combiner is not None or case.forms[name].split:
        return None
    call["layout"] = "concatenated"
    call["batch"][name] = np.zeros((2, 3), np.int32)
    return ("concatenated: feature", "expected")


def missing_table(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    table = case.collection.features[name].table
    call["state"] = {key: own for key, own in call["state"].items() if key != table}
    return ("state", table)


def arrays_of_a_table(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    table = case.collection.features[name].table
    own = dict(call["state"][table])
    array = str(rng.choice(list(case.collection.tables[table].param_names)))
    kind = rng.integers(3)
    if kind == 0:
        del own[array]
    elif kind == 1:
        own[array] = jax.ShapeDtypeStruct((*own[array].shape, 2), own[array].dtype)
    else:
        own[array] = jax.ShapeDtypeStruct(own[array].shape, np.int32)
        array = "parameters"  # of one type, whichever of them has another
    call["state"] = {**call["state"], table: own}
    return (table, array)


def unknown_layout(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    call["layout"] = SLIPS[rng.integers(len(SLIPS))]
    return ("layout",)


def keyed_bags(rng: np.random.Generator, case: Case, call: dict, name: str) -> Words:
    names = list(case.collection.features)
    ids, offsets = np.zeros(3, np.int32), np.zeros(2 * len(names) + 1, np.int32)
    if rng.integers(2):
        names.remove(name)
        offsets = offsets[2:]
        if not names:
            return None
        words: Words = (name, case.collection.features[name].table)
    else:
        offsets = offsets[: rng.integers(0, len(offsets))]
        words = ("offsets",)
    call["batch"] = jax_tt.KeyedBags(ids, offsets, None, tuple(names), (2,) * len(names))
    return words


MUTATIONS: tuple[Callable[[np.random.Generator, Case, dict, str], Words], ...] = (
    missing_feature,
    unknown_feature,
    junk,
    junk,
    no_batch,
    floats,
    bad_offsets,
    bad_weights,
    weights_of_a_sequence,
    split_ids,
    types_of_ids,
    samples,
    sequences,
    missing_table,
    arrays_of_a_table,
    unknown_layout,
    keyed_bags,
)
