"""The cache's ops, on the reference or on a native module; chosen in the same way as the ops of tables."""

from __future__ import annotations

from typing import Any

import jax

from jax_tt._jax import backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.cache import cache_observe, cache_populate, cache_probe
from jax_tt._sets import cache_reference
from jax_tt._sets.cache_directory import CacheDirectory


def probe(tags: jax.Array, keys: jax.Array, method: str) -> jax.Array:
    """Slot of every key; see `jax_tt._sets.cache_reference.probe`."""

    # JAX does not know that the result of a native call varies over mesh axes.
    axes = varying_axes(tags, keys)

    def native(platform: str, tags: jax.Array, keys: jax.Array) -> jax.Array:
        return vary_over(cache_probe(tags, keys, platform=platform), axes)

    return backend.run(backend.choose(method), native, cache_reference.probe, tags, keys)


def observe(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    policy: str,
    method: str,
) -> tuple[CacheDirectory, jax.Array]:
    """Counts a batch; see `jax_tt._sets.cache_reference.observe`."""

    def native(platform: str, *inputs: Any) -> Any:
        return cache_observe(*inputs, policy=policy, platform=platform)

    def plain(directory: CacheDirectory, keys: Any, slots: Any, stamp: Any) -> Any:
        return cache_reference.observe(directory, keys, slots, stamp, policy)

    return backend.run(backend.choose(method), native, plain, directory, keys, slots, stamp)


def populate(directory: CacheDirectory, method: str) -> tuple[CacheDirectory, jax.Array, jax.Array]:
    """Inserts hot ghosts; see `jax_tt._sets.cache_reference.populate`."""

    def native(platform: str, directory: CacheDirectory) -> Any:
        return cache_populate(directory, platform=platform)

    return backend.run(backend.choose(method), native, cache_reference.populate, directory)
