"""Malformed inputs of a collection: an error names the feature and its table. The calls are traced alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jax_tt
from tests.fuzz.collection_case import Case, fitting, random_batch
from tests.fuzz.refusals import Words, outcome
from tests.fuzz.trace import EXOTIC, SLIPS


def malformed(rng: np.random.Generator, case: Case) -> str:
    """One call: ``"raised"``, or ``"returned"`` where the input may be right by luck."""
    names = list(case.collection.features)
    name = names[rng.integers(len(names))]
    mutate = MUTATIONS[rng.integers(len(MUTATIONS))]
    layout, _ = fitting(case)
    state = jax.eval_shape(case.collection.init, jax.random.key(0))
    batch, _ = random_batch(rng, case)
    call = {"state": state, "batch": batch, "layout": layout}
    words = mutate(rng, case, call, name)

    def run(state: Any) -> Any:
        return jax_tt.lookup_features(
            case.collection, state, call["batch"], case.lookup, layout=call["layout"]
        )

    what = f"{mutate.__name__} of {name}"
    return outcome(what, words, lambda: jax.eval_shape(run, call["state"]))


# Each changes the call, and returns what the message must name.


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
    array = str(rng.choice(list(case.collection.tables[table].spec.param_names)))
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
