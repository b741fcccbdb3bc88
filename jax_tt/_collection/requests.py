"""From what users pass as a batch to one request per feature, with errors that name the feature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jax_tt._base.arguments import mismatch
from jax_tt._base.dtypes import accumulator
from jax_tt._collection.collection import Collection
from jax_tt._collection.feature import check_features
from jax_tt._ids.bags import Bags
from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import reshape_rows
from jax_tt._ids.inputs import bag_batch, lookup_batch, one_bag_per_position
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.offsets import (
    Given,
    Treatment,
    any_refused,
    entered_batches,
    entered_offsets,
    well_formed,
)
from jax_tt._lookup.combine import batch_to_sum, combine
from jax_tt._lookup.offsets import keyed_label, offsets_label, treatment_of
from jax_tt._table.groups import BoundTable
from jax_tt._table.options import BOUNDS, Lookup
from jax_tt._table.table import Table


class Request(NamedTuple):
    """The lookup of a feature in its table.

    Attributes:
        table: named as errors are to name it.
        lookup: options of the call with the combiner of the feature; None for a sequence.
        batch: the ids.
        summed: the batch whose sums make the result.
        shape: of the result without its columns.
        samples: the number of samples, if the result is one vector for each; None if it is not.
    """

    table: Table
    lookup: Lookup | None
    batch: Batch
    summed: Batch
    shape: tuple[int, ...]
    samples: int | None

    @property
    def is_sum(self) -> bool:
        """Whether the result is ``sums`` itself, in another shape and type."""
        return self.lookup is None or self.lookup.combiner == "sum"

    def result(self, sums: jax.Array, dtype: Any) -> jax.Array:
        """``[*shape, D]`` from the sums of ``summed``."""
        if self.lookup is not None and self.lookup.combiner != "sum":
            sums = combine(self.lookup, self.table, self.batch, sums)
        return reshape_rows(sums, (*self.shape, self.table.features)).astype(dtype)


def requests_of(
    collection: Collection,
    batch: Any,
    storages: Mapping[str, Any],
    uses: Mapping[str, BoundTable],
    lookups: Mapping[str, Lookup],
) -> tuple[Any, dict[str, Request], jax.Array | None]:
    """The batch, with well-formed offsets if it is `KeyedBags`, and the request of every feature.

    The third result is whether the call is refused, bool, because offsets are malformed; None if that cannot be.
    ``storages``, the types of parameters, ``uses`` and ``lookups`` are by table.
    """
    given: Any = batch
    if not isinstance(given, dict) or given.keys() != collection.features.keys():
        check_features(collection.features, batch)
    values, keyed = batch, isinstance(batch, KeyedBags)
    refused: jax.Array | None = None
    if keyed:
        treatments = [treatment_of(use, lookups[name]) for name, use in uses.items()]
        batch, refused = entered_keyed(collection, batch, treatments)
        values = {key: batch.between(k, k + 1) for k, key in enumerate(batch.keys)}
    batches: dict[str, Batch] = {}
    counts: dict[str, Any] = {}
    for name, feature in collection.features.items():
        table, value = collection.for_features[name], values[name]
        if feature.combiner is None and isinstance(value, Bags) and value.weights is not None:
            got = "weights for a sequence (combiner=None), whose rows are not combined"
            fix = "Multiply its rows by them, or give the feature a combiner."
            raise mismatch(f"{table.ids.label}bags.weights", got, "None", fix)
        if feature.combiner is not None or isinstance(value, Bags):
            accum = accumulator(storages[feature.table])
            batches[name], counts[name] = bag_batch(table.ids, value, accum)
        else:
            batches[name], counts[name] = lookup_batch(table.ids, value)
    if keyed:
        batches = {name: well_formed(one) for name, one in batches.items()}
    elif ragged := [name for name, one in batches.items() if not one.rectangular]:
        after, refused = _entered_each(
            collection, {name: batches[name] for name in ragged}, uses, lookups
        )
        batches |= after
    requests = {}
    for name, feature in collection.features.items():
        table, one, count = collection.for_features[name], batches[name], counts[name]
        if feature.combiner is not None:
            lookup = _combined(lookups[feature.table], feature.combiner)
            summed = batch_to_sum(table, one) if lookup.combiner == "max" else one
            requests[name] = Request(table, lookup, one, summed, (count,), count)
        elif isinstance(count, tuple):  # the shape of the ids
            samples = count[0] if len(count) == 1 else None
            requests[name] = Request(table, None, one, one, count, samples)
        else:  # One row for every position of bags; padding and positions of no bag read zeros.
            alone = one_bag_per_position(one)
            shape = one.ids.shape[:2] if one.rectangular else (one.capacity,)
            requests[name] = Request(table, None, alone, alone, shape, None)
    return batch, requests, refused


def _entered_each(
    collection: Collection,
    batches: Mapping[str, Batch],
    uses: Mapping[str, BoundTable],
    lookups: Mapping[str, Lookup],
) -> tuple[dict[str, Batch], jax.Array | None]:
    """The ragged features with well-formed offsets, those of one treatment together, and whether any is refused."""
    alike: dict[Treatment, list[str]] = {}
    for name in batches:
        table = collection.features[name].table
        alike.setdefault(treatment_of(uses[table], lookups[table]), []).append(name)
    after: dict[str, Batch] = {}
    flags = []
    for treatment, names in alike.items():
        labels = [offsets_label_of(collection, name) for name in names]
        found, flag = entered_batches([batches[name] for name in names], labels, treatment)
        after |= zip(names, found, strict=True)
        flags.append(flag)
    return after, any_refused(flags)


def offsets_label_of(collection: Collection, feature: str) -> str:
    """`offsets_label` of a feature."""
    table = collection.features[feature].table
    return offsets_label(collection.for_features[feature], collection.for_batches[table])


def entered_keyed(
    collection: Collection, batch: KeyedBags, treatments: Sequence[Treatment]
) -> tuple[KeyedBags, jax.Array | None]:
    """With well-formed offsets. All features have one array of them, which the strictest of their tables treats."""
    strictest = min(treatments, key=lambda one: BOUNDS.index(one.bounds))
    treatment = strictest._replace(quiet=any(one.quiet for one in treatments))
    batch = batch.checked()
    label = keyed_label(collection.for_batches.values())
    (offsets,), refused = entered_offsets([Given(label, batch.offsets, batch.capacity)], treatment)
    return dataclasses.replace(batch, offsets=offsets), refused


@functools.lru_cache(maxsize=1024)
def _combined(lookup: Lookup, combiner: str) -> Lookup:
    return lookup.replace(combiner=combiner)
