"""The cache's ops, on the reference or on a native module; chosen in the same way as the ops of tables."""

from __future__ import annotations

from typing import Any

import jax

from jax_tt import _native
from jax_tt._cache import reference
from jax_tt._cache.directory import CacheDirectory
from jax_tt._lookup import _backend
from jax_tt._lookup._vma import vary_over, varying_axes


def probe(tags: jax.Array, keys: jax.Array, method: str) -> jax.Array:
    """Slot of every key; see `jax_tt._cache.reference.probe`."""

    # JAX does not know that the result of a native call varies over mesh axes.
    axes = varying_axes(tags, keys)

    def native(platform: str, tags: jax.Array, keys: jax.Array) -> jax.Array:
        return vary_over(_native.cache_probe(tags, keys, platform=platform), axes)

    return _backend.run(_backend.choose(method), native, reference.probe, tags, keys)


def observe(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    policy: str,
    method: str,
) -> tuple[CacheDirectory, jax.Array]:
    """Counts a batch; see `jax_tt._cache.reference.observe`."""

    def native(platform: str, *inputs: Any) -> Any:
        return _native.cache_observe(*inputs, policy=policy, platform=platform)

    def plain(directory: CacheDirectory, keys: Any, slots: Any, stamp: Any) -> Any:
        return reference.observe(directory, keys, slots, stamp, policy)

    return _backend.run(_backend.choose(method), native, plain, directory, keys, slots, stamp)


def populate(directory: CacheDirectory, method: str) -> tuple[CacheDirectory, jax.Array, jax.Array]:
    """Inserts hot ghosts; see `jax_tt._cache.reference.populate`."""

    def native(platform: str, directory: CacheDirectory) -> Any:
        return _native.cache_populate(directory, platform=platform)

    return _backend.run(_backend.choose(method), native, reference.populate, directory)
