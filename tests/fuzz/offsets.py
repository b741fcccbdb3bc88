"""Malformed offsets of bags, in every form that bags come in: refused, or repaired as ``bounds`` says, never read.

A call looks up bags with random offsets, three in four of them malformed, and steps the table by SGD. An oracle in
numpy says which rows come back and how often each row of the table is read.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from tests.fuzz.data import REFUSALS

N, D, BAGS, CAPACITY = 20, 3, 4, 8
TABLE = jax_tt.dense_table(N, D, optimizer=jax_tt.optimizers.SGD(1.0))
TRAIN = jax_tt.tt_table(N, D, tt_ranks=2)
VALID = np.array([0, 1, 1, 3, 6], np.int32)  # of the feature beside
COMBINERS = ("sum", "mean", "max", None)
METHODS = ("native", "reference")


class Door(NamedTuple):
    """A way into a lookup."""

    name: str
    combiner: str | None
    bounds: str
    method: str


DOORS = [
    Door(*one)
    for one in itertools.product(
        ("bags", "train", "joined", "keyed", "neighbours", "concatenated", "separated"),
        COMBINERS,
        ("error", "warn", "zero", "clip"),
        METHODS,
    )
    # A sequence is a feature of a collection.
    if one[1] is not None or one[0] in ("joined", "keyed", "neighbours")
]


@functools.cache
def _collection(door: Door) -> Any:
    second = "two" if door.name == "keyed" else "one"
    return jax_tt.Collection(
        dict.fromkeys(dict.fromkeys(["one", second]), TABLE),
        {
            "first": jax_tt.Feature("one", combiner=door.combiner),
            "second": jax_tt.Feature(second, combiner=door.combiner),
        },
    )


@functools.partial(jax.jit, static_argnums=0)
def _step(door: Door, table: jax.Array, ids: jax.Array, offsets: jax.Array) -> Any:
    """The rows of both features, and how much every entry of the table was reduced by a loss that sums them."""
    options = {"bounds": door.bounds, "method": door.method}
    bags, beside = jax_tt.Bags(ids, offsets), jax_tt.Bags(ids, jnp.asarray(VALID))
    if door.name in ("joined", "keyed", "neighbours"):
        collection = _collection(door)
        states = collection.separated(collection.init(jax.random.key(0)))
        states |= {name: {**states[name], "embedding": table} for name in collection.tables}
        state = collection.joined(states)
        batch: Any = {"first": bags, "second": beside}
        if door.name != "joined":
            batch = jax_tt.KeyedBags(ids, offsets, None, ("first", "second"))

        def collected(trained: Any) -> Any:
            rows, _ = jax_tt.lookup_features(
                collection, collection.replaced(state, trained), batch, **options
            )
            return sum(jnp.sum(array) for array in rows.values()), rows

        (_, rows), after = jax.value_and_grad(collected, has_aux=True)(collection.trained(state))
        after, _ = collection.overwritten(state, after)
        return list(rows.values()), sum(
            table - collection.of(after, name)["embedding"] for name in collection.tables
        )
    if door.name == "concatenated":
        bags = jax_tt.Bags.concatenate([bags, beside])
    elif door.name == "separated":
        bags = jax_tt.KeyedBags(ids, offsets, None, ("first", "second"))["second"]
    kind = TRAIN if door.name == "train" else TABLE
    state = kind.init(jax.random.key(0))
    if kind is TABLE:
        state = {**state, "embedding": table}

    def loss(trained: Any) -> Any:
        rows, _ = jax_tt.lookup_bags(
            kind, {**state, **trained}, bags, combiner=door.combiner, **options
        )
        return jnp.sum(rows), rows

    trained = {name: state[name] for name in kind.spec.trained_names}
    (_, rows), after = jax.value_and_grad(loss, has_aux=True)(trained)
    return [rows], table - after["embedding"] if kind is TABLE else None


def one(rng: np.random.Generator) -> str:
    """One call: ``"refused"``, ``"repaired"`` or ``"valid"``."""
    door = DOORS[rng.integers(len(DOORS))]
    bags = 2 * BAGS if door.name in ("keyed", "neighbours", "separated") else BAGS
    offsets = np.sort(rng.integers(0, CAPACITY + 1, bags + 1)).astype(np.int32)
    offsets[0] = 0
    if rng.random() < 0.75:
        offsets = _malformed(rng, offsets)
    ids = rng.integers(0, N, CAPACITY).astype(np.int32)
    table = rng.integers(-8, 9, (N, D)).astype(np.float32)
    try:
        _check(door, table, ids, offsets)
    except AssertionError as error:
        raise AssertionError(f"{door}, ids {ids}, offsets {offsets}: {error}") from error
    fits = _fits(offsets)
    return "valid" if fits else "refused" if door.bounds == "error" else "repaired"


def _check(door: Door, table: np.ndarray, ids: np.ndarray, offsets: np.ndarray) -> None:
    fits = _fits(offsets)
    try:
        rows, change = jax.block_until_ready(_step(door, table, ids, offsets))
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        assert not fits and door.bounds == "error", f"refused although valid: {error}"
        assert door.method == "native", f"a method that gives NaN raises: {error}"
        assert str(error).startswith(REFUSALS) and "offsets" in str(error), error
        return
    if not fits and door.bounds == "error":
        assert door.method != "native", "accepted although it had to be refused"
        assert all(np.isnan(array).all() for array in rows), rows
        assert change is None or not np.any(change), "a refused batch was stepped"
        return
    if door.name == "train":
        assert np.isfinite(rows[0]).all()
        return
    bags = _bags(door, offsets)
    reads = np.zeros(N)
    for got, of_feature in zip(rows, bags, strict=True):
        np.testing.assert_allclose(got, _rows(door, table, ids, of_feature), rtol=1e-5, atol=1e-5)
        for positions in of_feature:
            share = 1 / max(1, len(positions)) if door.combiner == "mean" else 1
            np.add.at(reads, ids[positions], share)
    if door.combiner != "max":
        np.testing.assert_allclose(change, np.repeat(reads[:, None], D, 1), rtol=1e-4, atol=1e-4)


def _bags(door: Door, offsets: np.ndarray) -> list[list[np.ndarray]]:
    """The positions of the bags of each result; of bags that were cut of malformed ones, none."""
    whole = _pairs(_repaired(offsets))
    beside = _pairs(VALID)
    if door.name == "joined":
        return [whole, beside]
    if door.name in ("keyed", "neighbours"):
        return [whole[:BAGS], whole[BAGS:]]
    if door.name == "concatenated":
        return [whole + beside if _fits(offsets) else [np.zeros(0, int)] * (2 * BAGS)]
    if door.name == "separated":
        return [whole[BAGS:] if _fits(offsets) else [np.zeros(0, int)] * BAGS]
    return [whole]


def _rows(door: Door, table: np.ndarray, ids: np.ndarray, bags: list[np.ndarray]) -> np.ndarray:
    if door.combiner is None:
        # A part of keyed bags has its ids at the front, and zeros behind.
        positions = np.concatenate([np.zeros(0, int), *bags])
        rows = np.zeros((CAPACITY, D))
        rows[: len(positions)] = table[ids[positions]]
        return rows
    result = np.zeros((len(bags), D))
    for b, positions in enumerate(bags):
        if len(positions):
            read = table[ids[positions]]
            result[b] = {"sum": read.sum(0), "mean": read.mean(0), "max": read.max(0)}[
                door.combiner
            ]
    return result


def _fits(offsets: np.ndarray) -> bool:
    wide = offsets.astype(np.int64)
    return bool(wide[0] == 0 and (np.diff(wide) >= 0).all() and wide[-1] <= CAPACITY)


def _repaired(offsets: np.ndarray) -> np.ndarray:
    return np.maximum.accumulate(np.clip(np.concatenate([[0], offsets[1:]]), 0, CAPACITY))


def _pairs(offsets: np.ndarray) -> list[np.ndarray]:
    return [np.arange(a, b) for a, b in itertools.pairwise(offsets)]


def _malformed(rng: np.random.Generator, offsets: np.ndarray) -> np.ndarray:
    """Offsets that may be malformed in one of the ways that loaders are known for."""
    offsets, kind = offsets.copy(), rng.integers(6)
    if kind == 0:
        return rng.permutation(offsets)
    if kind == 1:
        return rng.integers(-(2**31), 2**31, offsets.shape).astype(np.int32)
    if kind == 2:  # of a part of a longer batch
        return offsets + np.int32(rng.integers(1, 4))
    if kind == 3:  # lengths of more ids than there are
        return (offsets * 3).astype(np.int32)
    edges = np.array([-1, 1, CAPACITY, CAPACITY + 1, 600_000, 2**31 - 1, -(2**31)], np.int32)
    at = 0 if kind == 4 else rng.integers(len(offsets))
    offsets[at] = rng.choice(edges)
    return offsets
