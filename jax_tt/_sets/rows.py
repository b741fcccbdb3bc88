"""Rows of a table that are exchanged for others, in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def exchange(
    arrays: Sequence[jax.Array], new: Sequence[jax.Array], slots: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Writes new entries into slots of arrays, and returns the old ones.

    Args:
        arrays: ``[capacity, ...]`` each: rows, and the optimizer state beside them.
        new: entries ``[n, ...]`` in the type of the array, or a scalar that all of them get.
        slots: int32 ``[n]``, distinct in ``[0, capacity)`` and then ``capacity``, which is skipped.

    Returns:
        The arrays, and their old entries ``[n, ...]``, zeros where a slot is skipped.
    """
    old = [array.at[slots].get(mode="fill", fill_value=0) for array in arrays]
    changed = [
        array.at[slots].set(jnp.broadcast_to(entries, (slots.size, *array.shape[1:])), mode="drop")
        for array, entries in zip(arrays, new, strict=True)
    ]
    return changed, old
