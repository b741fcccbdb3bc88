"""Random collections with random batches, and what is in these."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

import jax_tt
from jax_tt import optimizers

RATE = 0.25
RULES = (
    None,
    None,
    optimizers.SGD(RATE),
    optimizers.SGD(RATE),
    optimizers.Adagrad(0.1),
    optimizers.RowWiseAdagrad(0.1),
    optimizers.Adam(0.1),
    optimizers.Adam(0.1, moment_dtype="bfloat16"),
)


def _momentum(rows: Any, gradients: Any, slots: Any, step: Any) -> Any:
    del step
    momentum = slots["momentum"] + gradients
    return rows - RATE * momentum, {"momentum": momentum}


# For dense tables alone.
CUSTOM = optimizers.Custom(_momentum, {"momentum": "entry"})
COMBINERS = ("sum", "sum", "mean", "mean_count", "sqrtn", "max", None)


@dataclasses.dataclass(frozen=True)
class Form:
    """How the ids of a feature come, which is a part of the program."""

    kind: str  # array, rectangle, ragged or padded
    shape: tuple[int, ...]  # of the ids; for ragged bags, the number of bags and the capacity
    weighted: bool = False
    split: bool = False
    wide: bool = False  # int64, and not int32


@dataclasses.dataclass(frozen=True)
class Case:
    collection: Any
    forms: dict[str, Form]
    lookup: Any
    layout: str
    keyed: bool
    x64: bool
    stack: bool = False


# The ids and weights of every bag of a feature, or of the one bag of each id of a sequence.
Rows = tuple[list[list[int]], list[list[float]] | None]


def random_case(rng: np.random.Generator) -> Case:
    x64 = rng.random() < 0.25
    layout = str(rng.choice(["features", "features", "concatenated", "stacked"]))
    width = int(rng.integers(1, 10)) if layout == "stacked" else None
    tables, features = {}, {}
    # Tables of a stack are alike but for their rows.
    stack = rng.random() < 0.4
    like = _dense_options(rng, width, x64)
    for k in range(rng.integers(1, 7)):
        alike = stack and rng.random() < 0.8
        tables[f"table{k}"] = (
            jax_tt.dense_table(_rows(rng), **like) if alike else _table(rng, width, x64)
        )
        for f in range(rng.choice([1, 1, 1, 2, 3])):
            combiner = COMBINERS[rng.integers(len(COMBINERS))]
            features[f"feature{k}.{f}"] = jax_tt.Feature(f"table{k}", combiner=combiner)
    names = [str(name) for name in rng.permutation(list(features))]
    named = {name: features[name] for name in names}
    collection = jax_tt.Collection(tables, named, stack=False)
    samples = int(rng.integers(0, 5)) if layout != "features" else None
    split = {name: rng.random() < 0.3 for name in tables}
    forms = {
        name: _form(rng, collection, name, samples, split[feature.table])
        for name, feature in collection.features.items()
    }
    lookup = jax_tt.Lookup(
        bounds=str(rng.choice(["error", "warn", "zero", "clip"])), method="native"
    )
    summed = all(f.combiner not in (None, "max") for f in collection.features.values())
    keyed = summed and not any(form.split for form in forms.values()) and rng.random() < 0.5
    # The features of a table have ids of one type, and so do all features of keyed bags.
    kinds = {name: x64 and rng.random() < 0.5 for name in tables}
    if keyed:
        kinds = dict.fromkeys(tables, x64 and bool(rng.integers(2)))
    forms = {
        name: dataclasses.replace(form, wide=kinds[collection.features[name].table])
        for name, form in forms.items()
    }
    return Case(collection, forms, lookup, layout, keyed, x64, stack)


def _rows(rng: np.random.Generator) -> int:
    return int(rng.choice([1, 2, 7, rng.integers(4, 150)]))


def _dense_options(rng: np.random.Generator, width: int | None, x64: bool) -> dict[str, Any]:
    types = ["float32", "float32", "bfloat16", "float16", *(["float64"] * 4 if x64 else [])]
    return {
        "features": int(rng.integers(1, 10)) if width is None else width,
        "param_dtype": str(rng.choice(types)),
        "optimizer": RULES[rng.integers(len(RULES))],
        "stochastic_rounding": bool(rng.integers(2)),
    }


def _table(rng: np.random.Generator, width: int | None, x64: bool) -> Any:
    options, rows = _dense_options(rng, width, x64), _rows(rng)
    kind = rng.choice(["dense", "train", "cached"])
    if kind == "dense":
        own = {"optimizer": CUSTOM} if rng.random() < 0.15 else {}
        return jax_tt.dense_table(rows, **{**options, **own})
    cache = None
    if kind == "cached":
        gradients = str(rng.choice(["rows", "cores"]))
        cache = jax_tt.RowCache(8, ways=4, refresh_every=1, gradients=gradients)
    order = jax_tt.order.IdOrder(rng.permutation(rows)) if rng.random() < 0.2 else None
    rank = int(rng.integers(1, 4))
    return jax_tt.tt_table(rows, tt_ranks=rank, cache=cache, id_order=order, **options)


def _form(
    rng: np.random.Generator, collection: Any, name: str, samples: int | None, split: bool
) -> Form:
    feature = collection.features[name]
    table = collection.tables[feature.table]
    split = split and len(table.ids.radices) > 1
    bags = int(rng.integers(0, 5)) if samples is None else samples
    length = int(rng.integers(0, 5))
    if feature.combiner is None:
        shape = (bags,) if samples is not None else tuple(rng.integers(0, 4, rng.integers(0, 3)))
        return Form("array", tuple(map(int, shape)), split=split)
    kind = str(rng.choice(["rectangle", "ragged", "padded"]))
    weighted = kind != "rectangle" and feature.combiner != "max" and rng.random() < 0.5
    shape = (bags, 4 * bags + int(rng.integers(0, 3))) if kind == "ragged" else (bags, length)
    return Form(kind, shape, weighted, split)


def random_batch(rng: np.random.Generator, case: Case) -> tuple[dict[str, Any], dict[str, Rows]]:
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
        far = [2**32, 2**32 + n - 1, 2**63 - 1, -(2**32), -(2**63)] if form.wide else []
        strange = rng.choice([-2, n, n + 1, 2**31 - 1, -(2**31), *far], ids.shape)
        ids = np.where(rng.random(ids.shape) < 0.15, strange, ids)
    given: Any = ids.astype(np.int64 if form.wide else np.int32)
    if form.kind == "padded":
        # All negative ids are padding once they are split.
        pads = (given < 0) & form.split | (rng.random(ids.shape) < 0.3)
        given = np.where(pads, given.dtype.type(-1), given)
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
    held: Any = jax_tt.tables.innermost(table).shape.split_ids(given) if form.split else given
    if form.kind == "ragged":
        held = jax_tt.Bags(held, ends, weights)
    elif form.kind == "padded":
        held = jax_tt.Bags(held, None, weights, padded=True)
    elif form.kind == "rectangle" and form.split:
        held = jax_tt.Bags(held)
    return held, (rows, of_bags)


def fitting(case: Case) -> tuple[str, bool]:
    """The layout, and whether the bags come keyed, where the features allow that."""
    sequences = [n for n, f in case.collection.features.items() if f.combiner is None]
    wide = all(len(case.forms[name].shape) == 1 for name in sequences)
    weights = {form.weighted for form in case.forms.values()}
    return case.layout if wide else "features", case.keyed and len(weights) == 1
