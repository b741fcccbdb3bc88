"""Ops of hash tables on the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from jax_tt._hash.directory import COUNTERS, POLICIES, Insertion, KeyDirectory
from jax_tt._hash.initial import InitialRows
from jax_tt._native._call import Named, native, native_call, numbered, types_of
from jax_tt._native.partition import num_blocks, over_blocks


def _workspace(platform: str, op: str, n: int, directory: KeyDirectory) -> int | None:
    """Bytes of working memory for one call."""
    if platform == "cpu":
        return None
    return native(platform).hash_workspace_size(op, n, directory.sets, directory.ways)


def hash_find(
    directory: KeyDirectory, keys: jax.Array, present: jax.Array, *, platform: str
) -> jax.Array:
    def local(args: Named, axes: Any) -> Named:
        del axes  # every device looks up its own keys
        operands = {name: args[name] for name in ("keys", "touched", "asked", "present")}
        slots = jax.ShapeDtypeStruct(args["present"].shape, jnp.int32)
        return native_call(platform, "hash_find", operands, {"slots": slots}, None, {})

    blocks = num_blocks(present.shape[0])
    blocked = {"asked": keys.reshape(blocks, -1, 2), "present": present.reshape(blocks, -1)}
    whole = {"keys": directory.keys, "touched": directory.touched}
    return over_blocks(local, blocked, whole, ["slots"])["slots"].reshape(present.shape)


def hash_insert(
    directory: KeyDirectory, *batch: jax.Array, policy: str, min_age: int, platform: str
) -> tuple[KeyDirectory, Insertion]:
    """``batch``: keys, present, given, now and epoch, as `jax_tt._hash.reference.insert` takes them."""

    # Every device inserts the whole batch: replicas of the directory must stay identical.
    @sequential_vmap
    def call(directory: KeyDirectory, *batch: jax.Array) -> Any:
        names = ("asked", "present", "given", "now", "epoch")
        n = batch[0].shape[0]
        words, whole = (
            jax.ShapeDtypeStruct((n, 2), jnp.uint32),
            jax.ShapeDtypeStruct((n,), jnp.int32),
        )
        counts = jax.ShapeDtypeStruct((len(COUNTERS),), jnp.int32)
        done = Insertion(whole, words, words, words, whole, counts, whole)._asdict()
        if platform != "cpu":
            del done["found"]  # the kernels leave it to a search
        found = native_call(
            platform,
            "hash_insert",
            {**dict(zip(names, batch, strict=True)), **directory._asdict()},
            {
                **{f"new_{name}": kind for name, kind in done.items()},
                **types_of(directory._asdict()),
            },
            _workspace(platform, "insert", n, directory),
            {"policy": np.int64(POLICIES.index(policy)), "min_age": np.int64(min_age)},
        )
        changed = KeyDirectory(*(found[name] for name in KeyDirectory._fields))
        return changed, {name: found[f"new_{name}"] for name in done}

    changed, done = call(directory, *batch)
    if "found" not in done:
        keys, present, *_ = batch
        done["found"] = hash_find(changed, keys, present, platform=platform)
    return changed, Insertion(**done)


def hash_initial(
    distribution: InitialRows,
    seed: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    features: int,
    dtype: Any,
    *,
    platform: str,
) -> jax.Array:
    def local(args: Named, axes: Any) -> Named:
        del axes
        shape = (args["wanted"].size, features)
        operands = {name: args[name] for name in ("seed", "quantiles", "scale", "keys", "wanted")}
        rows = jax.ShapeDtypeStruct(shape, dtype)
        signed = {"signed": distribution.signed}
        found = native_call(platform, "hash_initial", operands, {"rows": rows}, None, signed)
        return {"rows": found["rows"].reshape(*args["wanted"].shape, features)}

    blocks = num_blocks(wanted.shape[0])
    blocked = {"keys": keys.reshape(blocks, -1, 2), "wanted": wanted.reshape(blocks, -1)}
    quantiles, factor = jnp.asarray(distribution.quantiles), jnp.asarray(distribution.factor)
    whole = {"seed": seed, "quantiles": quantiles, "scale": factor}
    return over_blocks(local, blocked, whole, ["rows"])["rows"].reshape(-1, features)


def hash_exchange(
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    slots: jax.Array,
    *,
    return_old: bool,
    platform: str,
) -> tuple[list[jax.Array], list[jax.Array]]:
    @sequential_vmap
    def call(arrays: list[jax.Array], new: list[jax.Array], slots: jax.Array) -> Any:
        named = numbered("array", arrays)
        of_batch = [jax.ShapeDtypeStruct((slots.size, *x.shape[1:]), x.dtype) for x in arrays]
        old = {f"old_{k}": kind for k, kind in enumerate(of_batch) if return_old}
        found = native_call(
            platform,
            "hash_exchange",
            {"slots": slots, **named, **numbered("new", new)},
            {**types_of(named), **old},
            None,
            {},
        )
        return [found[name] for name in named], [found[name] for name in old]

    return call(list(arrays), list(new), slots) if arrays else ([], [])


def hash_double(
    directory: KeyDirectory, arrays: Sequence[jax.Array], *, platform: str
) -> tuple[KeyDirectory, list[jax.Array]]:
    @sequential_vmap
    def call(directory: KeyDirectory, arrays: list[jax.Array]) -> Any:
        before = {**directory._asdict(), **numbered("array", arrays)}
        after = {
            f"new_{name}": jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)
            for name, x in before.items()
        }
        workspace = _workspace(platform, "double", 0, directory)
        found = list(native_call(platform, "hash_double", before, after, workspace, {}).values())
        return KeyDirectory(*found[:3]), found[3:]

    return call(directory, list(arrays))
