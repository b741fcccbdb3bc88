"""Size of a row cache from a sample of ids and a memory budget."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_dtype, as_int
from jax_tt._sets.miss_ratio import stream
from jax_tt.optimizers import Optimizer

_CAUTION = 4  # requests of the coldest cached row relative to the largest error of a count


def suggest_sizes(
    ids: Any,
    budget_bytes: int,
    features: int,
    dtype: Any,
    optimizer: Optimizer | None,
    policy: str,
    ways: int,
) -> tuple[int, int]:
    """Capacity and counters; see `RowCache.suggest`."""
    budget, features = as_int("budget_bytes", budget_bytes), as_int("features", features)
    counts = np.sort(np.unique(stream(ids), return_counts=True)[1])[::-1].astype(np.int64)
    if not counts.size:
        raise ValueError("ids: got none; expected a sample of the ids that the table is asked for.")
    slot, counter = entry_bytes(
        int(np.asarray(ids).max()), features, as_dtype("dtype", dtype, jnp.float32), optimizer
    )
    capacity = np.arange(1, counts.size + 1)
    if policy == "lfu":
        misses = counts.sum() - np.cumsum(counts)
        counters = _CAUTION * misses // counts
    else:
        counters = 4 * capacity
    least = np.minimum(4 * capacity, counts.size)
    most = np.maximum(least, min(counts.size, budget // (3 * counter)))
    counters = np.clip(counters, least, most)
    fits = np.flatnonzero(slot * capacity + counter * counters <= budget)
    if not fits.size:
        raise ValueError(
            f"budget_bytes: got {budget_bytes}; expected at least {slot + counter * int(counters[0])}, for one row and "
            "its counters."
        )
    best = int(capacity[fits[-1]])
    if best > ways:
        best -= best % ways  # whole sets, since rounding up would exceed the budget
    return best, int(counters[best - 1])


def entry_bytes(
    largest_id: int, features: int, dtype: Any, optimizer: Optimizer | None
) -> tuple[int, int]:
    """Bytes of a slot, with its row and the optimizer state of the row, and of a counter."""
    counter = 20 if largest_id > 2**31 - 1 else 16
    kinds = optimizer.slots if optimizer else ()
    state = sum(
        jnp.dtype(kind.dtype).itemsize * (1 if kind.rowwise else features) for kind in kinds
    )
    return features * jnp.dtype(dtype).itemsize + state + counter - 4, counter
