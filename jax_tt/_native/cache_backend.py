"""The operations of row caches, on the reference or on a native module; chosen as for tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jax_tt._directories import cache_reference
from jax_tt._directories.cache_directory import CacheDirectory
from jax_tt._jax import backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.call import Named, Types, native, native_call, types_of
from jax_tt._native.partition import Split, num_blocks, over_blocks

# The arrays that observe and populate change, in the order of their targets.
_COUNTED = ("scores", "touched", "ghost_tags", "ghost_scores", "ghost_touched", "ghost_recent")
_COUNTS = jax.ShapeDtypeStruct((4,), jnp.int32)


def probe(tags: jax.Array, keys: jax.Array, method: str) -> jax.Array:
    """Slot of every key; see `jax_tt._directories.cache_reference.probe`."""
    # JAX does not know that the result of a native call varies over mesh axes.
    varying = varying_axes(tags, keys)
    shape = tags.shape  # programs keep `local`, which must not close over the tags

    def kernel(platform: str, tags: jax.Array, keys: jax.Array) -> jax.Array:
        def local(args: Named, split: Split) -> Named:
            del split  # every device looks up its own keys
            operands = {name: args[name] for name in ("tags", "keys")}
            results = {"slots": jax.ShapeDtypeStruct(args["keys"].shape, jnp.int32)}
            return _called(platform, "probe", operands, results, (*shape, 0, 0))

        blocked = {"keys": keys.reshape(num_blocks(keys.shape[0]), -1)}
        found = over_blocks(local, blocked, {"tags": tags}, ["slots"])
        return vary_over(found["slots"].reshape(keys.shape), varying)

    return backend.run(backend.choose(method), kernel, cache_reference.probe, tags, keys)


def observe(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    policy: str,
    method: str,
) -> tuple[CacheDirectory, jax.Array]:
    """Counts a batch; see `jax_tt._directories.cache_reference.observe`."""

    def kernel(platform: str, directory: CacheDirectory, *of_batch: jax.Array) -> Any:
        # Every device counts the whole batch: replicas of the directory must stay identical.
        @sequential_vmap
        def call(directory: CacheDirectory, keys: jax.Array, slots: jax.Array, stamp: Any) -> Any:
            read = {"keys": keys, "slots": slots, "stamp": stamp}
            read |= {"clock": directory.clock, "tags": directory.tags}
            return _changed(platform, "observe", directory, read, _COUNTED, {}, {"policy": policy})

        return call(directory, *of_batch)

    plain = partial(cache_reference.observe, policy=policy)
    return backend.run(backend.choose(method), kernel, plain, directory, keys, slots, stamp)


def populate(directory: CacheDirectory, method: str) -> tuple[CacheDirectory, jax.Array, jax.Array]:
    """Inserts hot ghosts; see `jax_tt._directories.cache_reference.populate`."""

    def kernel(platform: str, directory: CacheDirectory) -> Any:
        @sequential_vmap
        def call(directory: CacheDirectory) -> Any:
            read, changed = {"clock": directory.clock}, ("tags", *_COUNTED)
            evicted = types_of({"evicted": directory.tags})
            return _changed(platform, "populate", directory, read, changed, evicted, {})

        return call(directory)

    return backend.run(backend.choose(method), kernel, cache_reference.populate, directory)


def _changed(
    platform: str,
    op: str,
    directory: CacheDirectory,
    read: Named,
    changed: tuple[str, ...],
    more: Types,
    attributes: dict[str, Any],
) -> tuple[Any, ...]:
    """The directory with arrays changed in place, then ``more`` results and the counts."""
    arrays = {name: getattr(directory, name) for name in changed}
    results = {**more, "counts": _COUNTS, **types_of(arrays)}
    sizes = *directory.tags.shape, *directory.ghost_tags.shape
    found = _called(platform, op, {**read, **arrays}, results, sizes, attributes)
    others = [found.pop(name) for name in (*more, "counts")]
    return directory._replace(**found), *others


def _called(
    platform: str,
    op: str,
    operands: Named,
    results: Types,
    sizes: tuple[int, ...],
    attributes: dict[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """The results of an operation on a directory of these sizes."""
    keys = operands["keys"].size if "keys" in operands else 0
    workspace = _workspace(platform, op, keys, *sizes)
    return native_call(platform, f"cache_{op}", operands, results, workspace, attributes or {})


def _workspace(platform: str, op: str, keys: int, *sizes: int) -> int | None:
    """Bytes of working memory."""
    return None if platform == "cpu" else native(platform).cache_workspace_size(op, keys, *sizes)
