"""The ops of hash tables, on the reference or on a native module; chosen in the same way as the ops of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt import _native
from jax_tt._hash import growth, reference, rows
from jax_tt._hash.directory import Eviction, Insertion, KeyDirectory
from jax_tt._hash.initial import InitialRows, initial_rows
from jax_tt._lookup import _backend
from jax_tt._lookup._vma import vary_over, varying_axes


def find(directory: KeyDirectory, keys: jax.Array, present: jax.Array, method: str) -> jax.Array:
    """Slot of every key; see `jax_tt._hash.reference.find`."""
    return _run(_native.hash_find, reference.find, {}, method, directory, keys, present)


def insert(
    directory: KeyDirectory,
    keys: jax.Array,
    present: jax.Array,
    given: jax.Array,
    now: jax.Array,
    epoch: jax.Array,
    eviction: Eviction,
    method: str,
) -> tuple[KeyDirectory, Insertion]:
    """Finds or inserts the keys of a batch; see `jax_tt._hash.reference.insert`."""
    options = eviction._asdict()
    batch = (directory, keys, present, given, now, epoch)
    return _run(_native.hash_insert, reference.insert, options, method, *batch)


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

    def native(seed: jax.Array, keys: jax.Array, wanted: jax.Array, platform: str) -> jax.Array:
        # The CUDA kernels store no float64.
        if platform != "cpu" and jnp.dtype(dtype) == jnp.float64:
            return plain(seed, keys, wanted)
        return _native.hash_initial(
            distribution, seed, keys, wanted, features, jnp.dtype(dtype), platform=platform
        )

    def plain(seed: jax.Array, keys: jax.Array, wanted: jax.Array) -> jax.Array:
        del wanted
        return initial_rows(distribution, seed, keys, features).astype(jnp.dtype(dtype))

    return _run(native, plain, {}, method, seed, keys, wanted)


def exchange(
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    slots: jax.Array,
    method: str,
    *,
    return_old: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Exchanges entries of arrays; see `jax_tt._hash.rows.exchange`. Without ``return_old`` there are no old ones."""

    def plain(arrays: Any, new: Any, slots: jax.Array) -> Any:
        changed, old = rows.exchange(arrays, new, slots)
        return changed, old if return_old else []

    def native(arrays: Any, new: Any, slots: jax.Array, platform: str) -> Any:
        @jax.custom_jvp
        def exchanged(arrays: Any, new: Any, slots: jax.Array) -> Any:
            return _native.hash_exchange(
                arrays, new, slots, return_old=return_old, platform=platform
            )

        # A native call has no derivative, and rows may be inserted inside a function that is differentiated.
        exchanged.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
        return exchanged(arrays, new, slots)

    entries = [jnp.asarray(x, array.dtype) for x, array in zip(new, arrays, strict=True)]
    return _run(native, plain, {}, method, list(arrays), entries, slots)


def double(
    directory: KeyDirectory, arrays: Sequence[jax.Array], method: str
) -> tuple[KeyDirectory, list[jax.Array]]:
    """Doubles the sets of a directory, with the arrays ``[capacity, ...]`` beside it.

    Keys move as in `jax_tt._hash.growth.doubled`, and their entries with them; the other entries are 0.
    """

    def plain(directory: KeyDirectory, arrays: Any) -> Any:
        after, source = growth.doubled(directory)
        source = jnp.where(source < 0, directory.capacity, source)
        return after, [x.at[source].get(mode="fill", fill_value=0) for x in arrays]

    return _run(_native.hash_double, plain, {}, method, directory, list(arrays))


def _run(
    native: Callable[..., Any],
    plain: Callable[..., Any],
    options: dict[str, Any],
    method: str,
    *args: Any,
) -> Any:
    """``native(*args, **options, platform=...)`` or ``plain(*args, **options)``."""
    # JAX does not know that the result of a native call varies over mesh axes.
    axes = varying_axes(args)

    def on_platform(platform: str, *args: Any) -> Any:
        return vary_over(native(*args, **options, platform=platform), axes)

    def anywhere(*args: Any) -> Any:
        return plain(*args, **options)

    return _backend.run(_backend.choose(method), on_platform, anywhere, *args)
