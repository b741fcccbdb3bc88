"""What `KeyedBags` give to native operations as they are: the arrays of all features, of which tables have parts.

Cut out for one table, traced ids have the length of all ids: a program of T features would hold T times as many.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.dtypes import accumulator
from jax_tt._collection.collection import Collection
from jax_tt._collection.requests import Request
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.split_ids import SplitIds
from jax_tt._table.parts_of_arrays import FlatBags

# Arrays of a batch as parts of those of all features, by table and name.
OfTables = Mapping[str, Mapping[str, FlatBags]]


def flat_bags(
    collection: Collection,
    batch: KeyedBags,
    requests: Mapping[str, Request],
    storages: Mapping[str, Any],
    refused: jax.Array | None,
) -> dict[str, dict[str, FlatBags]]:
    """The ids, offsets and weights of `KeyedBags` of which tables have parts, by table and name.

    The bags of a table must lie side by side, and its sums be those of its features.
    """
    ids = batch.ids
    if isinstance(ids, SplitIds) or ids.dtype.name not in ("int32", "uint32") or batch.slots:
        return {}
    offsets = jnp.asarray(batch.offsets)
    if refused is not None:
        offsets = jnp.where(refused, jnp.zeros_like(offsets), offsets)
    ends = dict(zip(batch.keys, itertools.accumulate(batch.sizes), strict=True))
    of_all = {"ids": jnp.asarray(ids)[None], "offsets": offsets[None, None]}
    found, weights = {}, {}
    for name, features in collection.features_of.items():
        own = [requests[feature] for feature in features]
        if not side_by_side(batch, features) or any(
            one.lookup is None or one.summed is not one.batch for one in own
        ):
            continue
        first = batch.keys.index(features[0])
        begin = ends[features[0]] - batch.sizes[first]
        count = ends[batch.keys[first + len(features) - 1]] - begin
        accum = accumulator(storages[name])
        plain = batch.weights is None or all(key in batch.unweighted for key in features)
        form = f"{ids.dtype} {accum} {plain}"
        if form not in weights:
            weights[form] = (
                np.zeros((1, 0), accum) if plain else jnp.asarray(batch.weights, accum)[None]
            )
        arrays = {**of_all, "weights": weights[form]}
        found[name] = {
            key: FlatBags(array, (form, key), begin, count) for key, array in arrays.items()
        }
    return found


def side_by_side(batch: KeyedBags, features: Sequence[str]) -> bool:
    """Whether the bags of these features, in their order in the batch, are one after another."""
    numbers = [batch.keys.index(feature) for feature in features]
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def count_out_of_range(flats: OfTables, rows: Mapping[str, int]) -> dict[str, jax.Array]:
    """The number of ids out of range of each of these tables, int32, from their numbers of rows.

    All ids are looked at once.
    """
    parts = {name: (flats[name]["ids"], flats[name]["offsets"]) for name in rows}
    ids, offsets = (one.array.reshape(-1) for one in next(iter(parts.values())))
    firsts = np.array([part.first for part, _ in parts.values()])
    bags = np.array([part.count for part, _ in parts.values()])
    begins, ends = offsets[firsts], offsets[firsts + bags]
    # An unsigned id is no larger than this, and a negative one is larger than all rows.
    most = np.array([min(n, 2**32 - 1) for n in rows.values()], np.uint32)
    limits = jnp.zeros(ids.shape[0] + 1, jnp.uint32)
    limits = jnp.cumsum(limits.at[begins].add(most).at[ends].add(-most), dtype=jnp.uint32)[:-1]
    outside = (ids.astype(jnp.uint32) >= limits).astype(jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(outside, dtype=jnp.int32)])
    counts = before[ends] - before[begins]
    return {name: counts[k] for k, name in enumerate(rows)}
