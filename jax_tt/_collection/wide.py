"""All features of a collection in one array."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import mismatch
from jax_tt._base.dtypes import widest
from jax_tt._collection.collection import Collection
from jax_tt._collection.requests import Request
from jax_tt._ids.explicit import in_one_sharding
from jax_tt._table.concat_layout import ConcatLayout


class FeatureLayout(NamedTuple):
    """How all features are laid out in one array.

    Attributes:
        of_rows: the array from ``[B, D_f]`` of every feature.
        of_wide: the array from ``[B, total D]`` and the number of features.
    """

    of_rows: Callable[[Mapping[str, jax.Array]], jax.Array]
    of_wide: Callable[[jax.Array, int], jax.Array]


def _alike(rows: Mapping[str, jax.Array]) -> list[jax.Array]:
    """The arrays in one type and one sharding."""
    dtype = functools.reduce(widest, (array.dtype for array in rows.values()))
    arrays = [array.astype(dtype) for array in rows.values()]
    return in_one_sharding(arrays)


WIDE = {
    "concatenated": FeatureLayout(
        lambda rows: jnp.concatenate(_alike(rows), axis=1), lambda array, _: array
    ),
    "stacked": FeatureLayout(
        lambda rows: jnp.stack(_alike(rows), axis=1),
        lambda array, features: array.reshape(array.shape[0], features, array.shape[1] // features),
    ),
}


def wide_of(collection: Collection, requests: Mapping[str, Request]) -> ConcatLayout | None:
    """Where the op writes the sums of every table, or None if the features need more than sums."""
    if not all(request.is_sum for request in requests.values()):
        return None
    widths = [request.table.features for request in requests.values()]
    firsts = dict(zip(requests, itertools.accumulate([0, *widths[:-1]]), strict=True))
    columns = tuple(
        tuple(firsts[feature] for feature in features)
        for features in collection.features_of.values()
    )
    samples = next(iter(requests.values())).samples
    assert samples is not None
    return ConcatLayout(columns, samples, sum(widths))


def check_wide(collection: Collection, layout: str, counts: Mapping[str, int | None]) -> None:
    """Raises unless the results of all features fit into one array of this layout.

    ``counts`` are the numbers of samples by feature, None for a feature without one vector per sample.
    """
    first = next(iter(counts))
    for name, count in counts.items():
        where = f"feature {name!r} of {collection.features[name].table!r}"
        if count is None:
            fix = (
                "Give it a combiner, or ids [B], one per sample; or look the features up as a dict."
            )
            got = f"{where}, a sequence with several rows per sample"
            raise mismatch(layout, got, "one vector per sample", fix)
        if count != counts[first]:
            got = f"{count} samples of {where} and {counts[first]} of {first!r}"
            raise mismatch(layout, got, "equal numbers", "Look the features up as a dict.")
        widths = [collection.for_features[feature].features for feature in (first, name)]
        if layout == "stacked" and widths[0] != widths[1]:
            got = f"{widths[1]} columns of {where} and {widths[0]} of {first!r}"
            raise mismatch(layout, got, "equal widths", "Use the layout 'concatenated'.")
