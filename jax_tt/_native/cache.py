"""The row cache's ops on the native kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from jax_tt._cache.directory import POLICIES, CacheDirectory
from jax_tt._native._call import native, native_call
from jax_tt._native.partition import Arrays, num_blocks, over_blocks

# What observe and populate change, in the order in which their targets take it.
_COUNTED = (
    "scores",
    "touched",
    "ghost_tags",
    "ghost_scores",
    "ghost_touched",
    "ghost_recent",
)
_COUNTS = jax.ShapeDtypeStruct((4,), jnp.int32)


def _workspace(
    platform: str, op: str, n: int, tags: Any, ghost_shape: tuple[int, ...] = (0, 0)
) -> int | None:
    """Bytes of working memory for one call."""
    if platform == "cpu":
        return None
    return native(platform).cache_workspace_size(op, n, *tags.shape, *ghost_shape)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def cache_probe(tags: jax.Array, keys: jax.Array, *, platform: str) -> jax.Array:
    def local(keys: jax.Array, tags: jax.Array, axes: Any) -> Arrays:
        del axes  # every device looks its own keys up
        return native_call(
            platform,
            "cache_probe",
            (jax.ShapeDtypeStruct(keys.shape, jnp.int32),),
            _workspace(platform, "probe", keys.size, tags),
            tags,
            keys,
        )

    blocks = num_blocks(keys.shape[0])
    (slots,) = over_blocks(local, (keys.reshape(blocks, -1), tags), (True, False), (True,))
    return slots.reshape(keys.shape)


def cache_observe(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    policy: str,
    *,
    platform: str,
) -> tuple[CacheDirectory, jax.Array]:
    # The whole batch on every device: replicas of the directory must stay identical.
    @sequential_vmap
    def call(directory: CacheDirectory, keys: jax.Array, slots: jax.Array, stamp: jax.Array) -> Any:
        arrays = [getattr(directory, name) for name in _COUNTED]
        counts, *counted = native_call(
            platform,
            "cache_observe",
            (_COUNTS, *map(_like, arrays)),
            _workspace(platform, "observe", keys.size, directory.tags, directory.ghost_tags.shape),
            keys,
            slots,
            stamp,
            directory.clock,
            directory.tags,
            *arrays,
            aliases={5 + i: 1 + i for i in range(len(arrays))},
            policy=np.int64(POLICIES.index(policy)),
        )
        return directory._replace(**dict(zip(_COUNTED, counted, strict=True))), counts

    return call(directory, keys, slots, stamp)


def cache_populate(
    directory: CacheDirectory, *, platform: str
) -> tuple[CacheDirectory, jax.Array, jax.Array]:
    @sequential_vmap
    def call(directory: CacheDirectory) -> Any:
        names = ("tags", *_COUNTED)
        arrays = [getattr(directory, name) for name in names]
        evicted, counts, *traded = native_call(
            platform,
            "cache_populate",
            (_like(directory.tags), _COUNTS, *map(_like, arrays)),
            _workspace(platform, "populate", 0, directory.tags, directory.ghost_tags.shape),
            directory.clock,
            *arrays,
            aliases={1 + i: 2 + i for i in range(len(arrays))},
        )
        return directory._replace(**dict(zip(names, traded, strict=True))), evicted, counts

    return call(directory)
