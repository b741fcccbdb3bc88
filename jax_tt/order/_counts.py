"""`from_counts`: the most frequent ids first."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base.arguments import as_array
from jax_tt._ids.id_order import IdOrder, order_of_rows


def from_counts(counts: Any) -> IdOrder:
    """The most frequent ids in the first rows.

    The rows of a prefix are adjacent, so frequent ids share prefixes, whose products are computed once per batch and
    stay in the processor's caches. This makes lookups faster, but does not make neighbours similar.

    Args:
        counts: ``[N]`` numbers of at least 0, the number of requests of each id.

    Returns:
        `IdOrder`. Ids with equal counts, including those without requests, stay in increasing order.

    Raises:
        ValueError: ``counts`` is empty, not one-dimensional, negative or not finite.

    Example:
        >>> import jax_tt
        >>> jax_tt.order.from_counts([3, 0, 9, 3]).rows
        array([1, 3, 0, 2], dtype=uint16)
    """
    counts = np.asarray(as_array("counts", counts))
    if counts.ndim != 1 or not counts.size:
        raise ValueError(f"counts: got shape {counts.shape}; expected [N] with N >= 1.")
    counts = counts.astype(np.float64)
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError("counts: got negative or non-finite values; expected numbers >= 0.")
    return order_of_rows(np.argsort(-counts, kind="stable"))
