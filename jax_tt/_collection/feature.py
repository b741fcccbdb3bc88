"""`Feature`, and the input of every feature of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_tt._base.arguments import mismatch, one_of, type_of
from jax_tt._collection.states import listed
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._table.options import COMBINERS


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a `Collection`.

    Attributes:
        table: name of its table, which it may share with other features.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"`` for one vector per bag, as in
            `tt.embed_bag`; None for a sequence: one row per id.

    >>> import jax_tt
    >>> jax_tt.Feature("item", combiner="mean")
    Feature(table='item', combiner='mean')
    """

    table: str
    combiner: str | None = dataclasses.field(default="sum", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.table, str):
            got = f"{self.table!r} of type {type(self.table).__name__}"
            expected = 'the name of a table of the collection, e.g. Feature("item")'
            raise mismatch("table", got, expected, error=TypeError)
        if self.combiner is not None:
            hint = ", or None for a sequence, one row per id"
            one_of("combiner", self.combiner, COMBINERS, hint)


def values_of(features: Mapping[str, Feature], batch: Any) -> dict[str, Any]:
    """The input of every feature of a batch, which must have all of these features and no others."""
    check_features(features, batch)
    return {name: batch[name] for name in features}


def check_features(features: Mapping[str, Feature], batch: Any) -> None:
    """Raises unless a batch has all of these features and no others."""
    if not isinstance(batch, Mapping | KeyedBags):
        expected = f"KeyedBags, or a dict to ids or Bags, of the features {listed(features)}"
        raise mismatch("batch", type_of(batch), expected, error=TypeError)
    given = list(batch)
    unknown = [name for name in given if name not in features]
    if unknown:
        got = f"the feature {unknown[0]!r}, which the collection does not have"
        fix = "Of a larger dict pass {name: batch[name] for name in collection.features}."
        raise mismatch("batch", got, listed(features), fix)
    missing = [name for name in features if name not in given]
    if missing:
        got = f"no feature {missing[0]!r} (of the table {features[missing[0]].table!r})"
        fix = "A feature without ids has empty bags, e.g. jax_tt.Bags.from_ragged([[], []])."
        raise mismatch("batch", got, listed(features), fix)
