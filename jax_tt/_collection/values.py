"""The input of every feature of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_tt._collection.feature import Feature
from jax_tt._collection.states import listed
from jax_tt._ids.keyed_bags import KeyedBags


def values_of(features: Mapping[str, Feature], batch: Any) -> dict[str, Any]:
    """The input of every feature of a batch, which must have all of these features and no others."""
    if not isinstance(batch, Mapping | KeyedBags):
        raise TypeError(
            f"batch: got a {type(batch).__name__}; expected a dict from the features ({listed(features)}) to ids or "
            "Bags, or KeyedBags of them."
        )
    given = list(batch)
    unknown = [name for name in given if name not in features]
    if unknown:
        raise ValueError(
            f"batch: got the feature {unknown[0]!r}, which the collection does not have; expected "
            f"{listed(features)}. Of a larger dict pass {{name: batch[name] for name in collection.features}}."
        )
    missing = [name for name in features if name not in given]
    if missing:
        name = missing[0]
        raise ValueError(
            f"batch: has no feature {name!r} (of the table {features[name].table!r}); expected "
            f"{listed(features)}. A feature without ids has empty bags, e.g. jax_tt.Bags.from_ragged([[], []])."
        )
    return {name: batch[name] for name in features}
