"""Row cache ops on the native kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from jax_tt._native.call import Named, native, native_call, types_of
from jax_tt._native.partition import num_blocks, over_blocks
from jax_tt._sets.cache_directory import POLICIES, CacheDirectory

# The arrays that observe and populate change, in the order of their targets.
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


def cache_probe(tags: jax.Array, keys: jax.Array, *, platform: str) -> jax.Array:
    def local(args: Named, axes: Any) -> Named:
        del axes  # every device looks up its own keys
        return native_call(
            platform,
            "cache_probe",
            {"tags": args["tags"], "keys": args["keys"]},
            {"slots": jax.ShapeDtypeStruct(args["keys"].shape, jnp.int32)},
            _workspace(platform, "probe", args["keys"].size, tags),
            {},
        )

    blocks = num_blocks(keys.shape[0])
    found = over_blocks(local, {"keys": keys.reshape(blocks, -1)}, {"tags": tags}, ["slots"])
    return found["slots"].reshape(keys.shape)


def cache_observe(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    policy: str,
    *,
    platform: str,
) -> tuple[CacheDirectory, jax.Array]:
    # Every device counts the whole batch: replicas of the directory must stay identical.
    @sequential_vmap
    def call(directory: CacheDirectory, keys: jax.Array, slots: jax.Array, stamp: jax.Array) -> Any:
        changed = {name: getattr(directory, name) for name in _COUNTED}
        found = native_call(
            platform,
            "cache_observe",
            {
                "keys": keys,
                "slots": slots,
                "stamp": stamp,
                "clock": directory.clock,
                "tags": directory.tags,
                **changed,
            },
            {"counts": _COUNTS, **types_of(changed)},
            _workspace(platform, "observe", keys.size, directory.tags, directory.ghost_tags.shape),
            {"policy": np.int64(POLICIES.index(policy))},
        )
        counts = found.pop("counts")
        return directory._replace(**found), counts

    return call(directory, keys, slots, stamp)


def cache_populate(
    directory: CacheDirectory, *, platform: str
) -> tuple[CacheDirectory, jax.Array, jax.Array]:
    @sequential_vmap
    def call(directory: CacheDirectory) -> Any:
        changed = {name: getattr(directory, name) for name in ("tags", *_COUNTED)}
        tags = directory.tags
        found = native_call(
            platform,
            "cache_populate",
            {"clock": directory.clock, **changed},
            {
                "evicted": jax.ShapeDtypeStruct(tags.shape, tags.dtype),
                "counts": _COUNTS,
                **types_of(changed),
            },
            _workspace(platform, "populate", 0, tags, directory.ghost_tags.shape),
            {},
        )
        evicted, counts = found.pop("evicted"), found.pop("counts")
        return directory._replace(**found), evicted, counts

    return call(directory)
