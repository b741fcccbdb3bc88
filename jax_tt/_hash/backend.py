"""The ops of hash tables, on the reference or on a native module; chosen in the same way as the ops of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._hash import reference, rows
from jax_tt._hash.directory import Insertion, KeyDirectory
from jax_tt._hash.initial import InitialRows, initial_rows


def find(directory: KeyDirectory, keys: jax.Array, present: jax.Array, method: str) -> jax.Array:
    """Slot of every key; see `jax_tt._hash.reference.find`."""
    del method
    return reference.find(directory, keys, present)


def insert(
    directory: KeyDirectory,
    keys: jax.Array,
    present: jax.Array,
    given: jax.Array,
    now: jax.Array,
    epoch: jax.Array,
    policy: str,
    min_age: int,
    method: str,
) -> tuple[KeyDirectory, Insertion]:
    """Finds or inserts the keys of a batch; see `jax_tt._hash.reference.insert`."""
    del method
    return reference.insert(directory, keys, present, given, now, epoch, policy, min_age)


def initial(
    distribution: InitialRows,
    seed: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    features: int,
    dtype: Any,
    method: str,
) -> jax.Array:
    """Initial rows ``[n, features]`` in type ``dtype``; what stands in rows that are not wanted is unspecified.

    Args:
        distribution, seed, keys, features: as in `jax_tt._hash.initial.initial_rows`.
        wanted: bool ``[n]``.
        dtype: float32 rows are rounded to nearest even.
        method: as in `find`.
    """
    del wanted, method
    return initial_rows(distribution, seed, keys, features).astype(jnp.dtype(dtype))


def exchange(
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    slots: jax.Array,
    method: str,
    *,
    return_old: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Exchanges entries of arrays; see `jax_tt._hash.rows.exchange`. Without ``return_old`` there are no old ones."""
    del method
    changed, old = rows.exchange(arrays, new, slots)
    return changed, old if return_old else []
