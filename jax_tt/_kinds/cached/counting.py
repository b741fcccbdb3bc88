"""Counts the requests of one batch in the directory, identically on every device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._jax.vma import varying_axes
from jax_tt._native import cache_backend
from jax_tt._sets.cache_directory import CacheDirectory, add_to_statistics
from jax_tt._sets.scores import Scoring, caught_up, counted, stamp


def count_batch(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    scoring: Scoring,
    method: str,
    axis_name: Any = None,
) -> CacheDirectory:
    """The directory after one more batch; keys and slots are those of `probe`, of any shape.

    Inside a ``shard_map`` the keys of all shards are counted, so that replicas of the directory stay equal.
    """
    axes = tuple(sorted(varying_axes(keys) - varying_axes(directory), key=str)) or axis_name
    keys, slots = keys.reshape(-1), slots.reshape(-1)
    if axes:
        keys, slots = (_of_all_shards(part, axes) for part in (keys, slots))
    directory = caught_up(directory, scoring)
    directory = directory._replace(clock=directory.clock + 1)
    now = stamp(directory, scoring)
    directory, counts = cache_backend.observe(directory, keys, slots, now, scoring.policy, method)
    return add_to_statistics(
        counted(directory, counts[0]),
        calls=1,
        requested=counts[0],
        unique=counts[1],
        misses=counts[2],
        unique_misses=counts[3],
    )


def _of_all_shards(part: jax.Array, axes: Any) -> jax.Array:
    """The concatenated shards, computed as a psum because JAX knows its result to be replicated."""
    shards = lax.psum(1, axes)
    whole = jnp.zeros((shards, *part.shape), part.dtype).at[lax.axis_index(axes)].set(part)
    return lax.psum(whole, axes).reshape(-1)
