"""From what users pass as a batch to one request per feature, with errors that name the feature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jax_tt._base.dtypes import accumulator
from jax_tt._collection.collection import Collection
from jax_tt._ids.bags import Bags
from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import reshape_rows
from jax_tt._ids.inputs import bag_batch, lookup_batch, one_bag_per_position
from jax_tt._lookup.combine import batch_to_sum, combine
from jax_tt._table.options import Lookup
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
    values: Mapping[str, Any],
    storages: Mapping[str, Any],
    lookups: Mapping[str, Lookup],
) -> dict[str, Request]:
    """The request of every feature, in the order of the collection.

    ``values`` are by feature; ``storages``, the types of parameters, and ``lookups`` by table.
    """
    requests = {}
    for name, feature in collection.features.items():
        table, value = collection.for_features[name], values[name]
        accum = accumulator(storages[feature.table])
        if feature.combiner is not None:
            lookup = _combined(lookups[feature.table], feature.combiner)
            batch, count = bag_batch(table.ids, value, accum)
            summed = batch_to_sum(table, batch) if lookup.combiner == "max" else batch
            requests[name] = Request(table, lookup, batch, summed, (count,), count)
        elif isinstance(value, Bags):
            requests[name] = _sequence_of_bags(table, value, accum)
        else:
            batch, shape = lookup_batch(table.ids, value)
            count = shape[0] if len(shape) == 1 else None
            requests[name] = Request(table, None, batch, batch, shape, count)
    return requests


def _sequence_of_bags(table: Table, bags: Bags, accum: Any) -> Request:
    """One row for every position of `Bags`; padding and positions of no bag read zeros."""
    if bags.weights is not None:
        raise ValueError(
            f"{table.ids.label}bags.weights: got weights for a sequence (combiner=None), whose rows are not combined; "
            "multiply its rows by them, or give the feature a combiner."
        )
    batch, _ = bag_batch(table.ids, bags, accum)
    alone = one_bag_per_position(batch)
    shape = batch.ids.shape[:2] if batch.rectangular else (batch.capacity,)
    return Request(table, None, alone, alone, shape, None)


@functools.lru_cache(maxsize=1024)
def _combined(lookup: Lookup, combiner: str) -> Lookup:
    return dataclasses.replace(lookup, combiner=combiner)
