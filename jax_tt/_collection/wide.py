"""All features of a collection in one array."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_tt._collection.collection import Collection


def concatenated(rows: Mapping[str, jax.Array]) -> jax.Array:
    """``[B, total D]`` from ``[B, D_f]`` of every feature."""
    return jnp.concatenate(list(rows.values()), axis=1)


def stacked(rows: Mapping[str, jax.Array]) -> jax.Array:
    """``[B, F, D]`` from ``[B, D]`` of every feature."""
    return jnp.stack(list(rows.values()), axis=1)


WIDE = {"concatenated": concatenated, "stacked": stacked}


def check_wide(collection: Collection, layout: str, counts: Mapping[str, int | None]) -> None:
    """Raises unless the results of all features fit into one array of this layout.

    Args:
        collection: the tables and features.
        layout: a name in `WIDE`.
        counts: the number of samples of every feature, or None if it does not have one vector per sample.
    """
    first = next(iter(counts))
    for name, count in counts.items():
        where = f"feature {name!r} of {collection.features[name].table!r}"
        if count is None:
            raise ValueError(
                f"{layout}: {where} is a sequence, with several rows per sample; expected one vector per sample. Give "
                "the feature a combiner, or ids [B] with one per sample; or look the features up as a dict."
            )
        if count != counts[first]:
            raise ValueError(
                f"{layout}: {where} has {count} samples and feature {first!r} has {counts[first]}; expected equal "
                "numbers. Look the features up as a dict."
            )
        widths = [collection.for_features[feature].features for feature in (first, name)]
        if layout == "stacked" and widths[0] != widths[1]:
            raise ValueError(
                f"{layout}: {where} has {widths[1]} columns and feature {first!r} has {widths[0]}; expected equal "
                "widths. Use the layout 'concatenated'."
            )
