"""Random batches of data loaders: `host_batch` keeps every id.

A batch is read back from what a compiled step would get, and must hold the ids, weights and bags that were given: ids
out of range on the same side, and padding left out.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import numpy as np

import jax_tt
from jax_tt import Bags, Feature, KeyedBags, SplitIds

ROWS = {"dense": 50, "train": 1000, "large": 10**12, "key": 2**64}
COLLECTION = jax_tt.Collection(
    {
        "dense": jax_tt.dense_table(ROWS["dense"], 4),
        "train": jax_tt.tt_table(ROWS["train"], 4, tt_ranks=2),
        "large": jax_tt.tt_table(
            ROWS["large"], 4, row_factors=(252,) * 5, col_factors=(4, 1, 1, 1, 1), tt_ranks=1
        ),
        "key": jax_tt.hash_table(64, 4),
    },
    {
        "shown": Feature("dense"),
        "sequence": Feature("dense", combiner=None),
        "clicked": Feature("train", combiner="mean"),
        "place": Feature("large"),
        "user": Feature("key"),
    },
)
FAR = (2**31 - 1, 2**31, 2**32 + 5, 2**40, 2**62, 2**63 - 1, -1, -2, -(2**31), -(2**40), -(2**63))

# Bags as lists of ids, and a weight for each of them or None.
Contents = tuple[list[list[int]], list[list[float]] | None]


def one(rng: np.random.Generator) -> str:
    """One call, ``"checked"`` by value."""
    bounds = str(rng.choice(["error", "warn", "zero", "clip", "unchecked"]))
    contents, batch = {}, {}
    for name in COLLECTION.features:
        contents[name], batch[name] = _feature(rng, name, bounds != "error")
    capacity = None if rng.random() < 0.7 else int(rng.integers(64, 100))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jax_tt.OutOfRangeWarning)
        if rng.random() < 0.1:
            return _keyed(rng, bounds, capacity)
        found = COLLECTION.host_batch(batch, bounds=bounds, capacity=capacity)
    assert found.keys() == batch.keys()
    for name, given in contents.items():
        _check(name, found[name], given, capacity)
    return "checked"


def _feature(rng: np.random.Generator, name: str, outside: bool) -> tuple[Contents, Any]:
    """Bags of a feature, in one of the forms in which they can be given."""
    rows = ROWS[COLLECTION.features[name].table]
    bags, length = int(rng.integers(0, 5)), int(rng.integers(0, 4))
    rectangle = name == "sequence" or rng.random() < 0.4
    sizes = [length] * bags if rectangle else rng.integers(0, 4, bags).tolist()
    ids = [[_id(rng, rows, outside) for _ in range(size)] for size in sizes]
    weights = None
    if name != "sequence" and rng.random() < 0.3:
        weights = [(rng.integers(-8, 9, size) / 8).tolist() for size in sizes]
    if not rectangle:
        return (ids, weights), _ragged_form(rng, ids, weights)
    array = _array(rng, np.array(ids, np.int64).reshape(bags, length))
    if name == "sequence":
        return (ids, None), array
    if rng.random() < 0.5 and rows < 2**64:
        return _padded_form(rng, ids, weights, np.asarray(array, np.int64))
    if weights is not None:
        return (ids, weights), {"ids": array, "weights": np.reshape(weights, (bags, length))}
    return (ids, None), array


def _id(rng: np.random.Generator, rows: int, outside: bool) -> int:
    if rng.random() < 0.2 and (outside or rows == 2**64):
        return -1 if rng.random() < 0.3 else int(rng.choice(FAR))  # which may mark padding
    if rng.random() < 0.1:
        return min(rows, 2**63) - 1
    return int(rng.integers(0, min(rows, 2**63 - 1)))


def _array(rng: np.random.Generator, ids: np.ndarray) -> Any:
    """The same numbers in a type that holds them."""
    types = [np.int32, np.uint32, np.uint64, np.uint8, np.dtype(">i8"), np.dtype(">i4")]
    dtype = types[rng.integers(len(types))]
    info = np.iinfo(dtype)
    fits = not ids.size or (info.min <= int(ids.min()) and int(ids.max()) <= info.max)
    return ids.astype(dtype) if fits and rng.random() < 0.5 else ids


def _ragged_form(rng: np.random.Generator, ids: list[list[int]], weights: Any) -> Any:
    flat = np.array([i for bag in ids for i in bag], np.int64)
    heavy = None if weights is None else np.array([w for bag in weights for w in bag])
    lengths = np.array([len(bag) for bag in ids], np.int64)
    form = rng.integers(6)
    small = not flat.size or (flat.min() >= -(2**31) and flat.max() < 2**31)
    if form == 0 and small:
        return Bags.from_lengths(flat, lengths, heavy)
    if form == 1 and small:
        return Bags.from_lengths(flat, lengths, heavy, capacity=flat.size + 3)
    if form == 2 and ids:
        nested = [np.array(bag, np.int64) for bag in ids] if rng.random() < 0.5 else ids
        return nested if weights is None else {"ids": nested, "weights": weights}
    entry = ("lengths", lengths)
    if form > 3:
        entry = ("offsets", np.concatenate([[0], np.cumsum(lengths)]))
    given = {"ids": _array(rng, flat), entry[0]: entry[1].tolist() if form % 2 else entry[1]}
    return given if heavy is None else {**given, "weights": heavy}


def _padded_form(
    rng: np.random.Generator, ids: list[list[int]], weights: Any, array: np.ndarray
) -> tuple[Contents, Any]:
    mark = int(rng.choice([0, 7, -1, 2**40]))
    place = rng.random(array.shape) < 0.3
    array = np.where(place, mark, array)
    keep = array != mark
    kept = [row[k].tolist() for row, k in zip(array, keep, strict=True)]
    heavy = None
    given: dict[str, Any] = {"ids": array, "pad_id": mark}
    if weights is not None:
        given["weights"] = np.reshape(weights, array.shape)
        heavy = [w[k].tolist() for w, k in zip(given["weights"], keep, strict=True)]
    return (kept, heavy), given


def _check(name: str, found: Any, contents: Contents, capacity: int | None) -> None:
    table = COLLECTION.tables[COLLECTION.features[name].table]
    ids, weights = contents
    leaves = jax.tree.leaves(found)
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype.itemsize == 4 for leaf in leaves)
    bags = found if isinstance(found, Bags) else Bags(found)
    values, padding = _values(table, bags.ids, bags.padded)
    if bags.offsets is not None:
        used = int(bags.offsets[-1])
        size = bags.capacity
        assert size == (capacity or size) and size >= used
        assert capacity is not None or math.log2(size).is_integer()
        rows = [values[a:b] for a, b in zip(bags.offsets[:-1], bags.offsets[1:], strict=True)]
        heavy = bags.weights
        parts = None if heavy is None else np.split(heavy[:used], bags.offsets[1:-1])
    else:
        rows = [row[~pad].tolist() for row, pad in zip(values, padding, strict=True)]
        heavy = bags.weights
        parts = None if heavy is None else [w[~p] for w, p in zip(heavy, padding, strict=True)]
    assert [len(row) for row in rows] == [len(bag) for bag in ids], f"{name}: {rows} for {ids}"
    rank = ROWS[COLLECTION.features[name].table]
    for got, want in zip(_flat(rows), _flat(ids), strict=True):
        if rank == 2**64:
            assert got == want % 2**64, f"{name}: {got} for {want}"
        elif 0 <= want < rank:
            assert got == want, f"{name}: {got} for {want}"
        else:
            assert got < 0 if want < 0 else got >= rank, f"{name}: {got} for {want}"
    assert (parts is None) == (weights is None)
    if parts is not None and weights is not None and ids:
        np.testing.assert_array_equal(_flat(parts), np.array(_flat(weights), np.float32))


def _flat(rows: Any) -> list[Any]:
    return [value for row in rows for value in row]


def _values(table: Any, ids: Any, padded: bool) -> tuple[np.ndarray, np.ndarray]:
    """The ids as Python numbers, where those out of range are on their side, and what is padding."""
    if not isinstance(ids, SplitIds):
        return ids.astype(object), (ids == -1) & padded
    padding = (ids.digits == -1).all(axis=-1) & padded
    if table.ids.takes_keys:
        words = ids.digits.view(np.uint32).astype(object)
        return words[..., 0] * 2**32 + words[..., 1], padding
    value = np.zeros(ids.shape, object)
    for k, factor in enumerate(table.ids.radices):
        value = value * factor + ids.digits[..., k].astype(object)
    return np.where(ids.digits[..., 0] < 0, -1, value), padding


def _keyed(rng: np.random.Generator, bounds: str, capacity: int | None) -> str:
    """`KeyedBags` of tables with 32-bit ids, in any order."""
    names = ["shown", "clicked"]
    collection = jax_tt.Collection(
        {n: COLLECTION.tables[COLLECTION.features[n].table] for n in names},
        {n: Feature(n) for n in names},
    )
    keys = names if rng.random() < 0.5 else names[::-1]
    ids = {k: rng.integers(0, 50, (int(rng.integers(0, 4)), 2)) for k in keys}
    keyed = KeyedBags.from_bags(ids)
    found = collection.host_batch(keyed, bounds=bounds, capacity=capacity)
    assert isinstance(found, KeyedBags) and found.keys == tuple(keys)
    for key in keys:
        np.testing.assert_array_equal(found[key].ids.reshape(-1, 2), ids[key])
    return "checked"
