"""The cache's ops on the reference or on a native module, chosen as those of the tables are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt import _reference
from jax_tt._cache import reference
from jax_tt._cache.directory import CacheDirectory
from jax_tt._dtypes import accumulator
from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch
from jax_tt._ops._spec import DenseSpec, TTSpec
from jax_tt._ops._vma import vary_over, varying_axes


def probe(tags: jax.Array, keys: jax.Array, method: str) -> jax.Array:
    """Slot of every key; `jax_tt._cache.reference.probe`."""

    # A native call does not know that the slots of different shards are different.
    axes = varying_axes(tags, keys)

    def native(platform: str, tags: jax.Array, keys: jax.Array) -> jax.Array:
        return vary_over(_native().cache_probe(tags, keys, platform=platform), axes)

    return _backend.run(_backend.choose(method), native, reference.probe, tags, keys)


class Forward(NamedTuple):
    """Sums of a batch, and what the backward pass of its parts takes.

    Attributes:
        sums: ``[S, nb, D]``.
        misses: a batch of the misses alone.
        place: int32 ``[S, cap]``, where in its segment of ``misses`` a position that is one went; None without weights.
        residuals: of the hits and of the misses.
    """

    sums: jax.Array
    misses: Batch
    place: jax.Array | None
    residuals: tuple[Any, Any]


def forward(
    hits: tuple[DenseSpec, Batch],
    misses: tuple[TTSpec, Batch],
    rows: jax.Array,
    cores: _backend.Cores,
    method: str,
    save: bool,
    sentinels: tuple[jax.Array | None, jax.Array | None] = (None, None),
) -> Forward:
    """Bags of a batch that `divide` gave, with the cores' sentinel and the rows'.

    On the CPU one op does all of it: in a bag it adds the hits in the order of their positions, then the misses in that
    order. Elsewhere, and where rows and cores are summed in different types, the sums of the two are added.
    """
    axes = varying_axes(rows, cores, hits[1], misses[1])
    arrays = vary_over((rows, cores, hits[1], misses[1], sentinels), axes)
    alike = accumulator(rows.dtype) == accumulator(cores[0].dtype)

    def native(platform: str, rows: Any, cores: Any, hit: Any, miss: Any, sentinels: Any) -> Any:
        if platform == "cpu" and alike:
            sums, packed, place, residuals = _native().cache_forward(
                misses[0], cores, rows, miss, hit.ids, save, sentinels, platform=platform
            )
            result = Forward(sums, packed, place, (residuals[2:], residuals))
        else:
            op = partial(_backend.native_forward, platform)
            result = _composed(op, hits[0], misses[0], save, rows, cores, hit, miss, sentinels)
        return vary_over(result, axes)

    def plain(*arrays: Any) -> Any:
        result = _composed(_reference.forward, hits[0], misses[0], save, *arrays)
        if method == "reference":
            return result
        # All branches must return the same arrays, though the reference has nothing to save.
        saved = jax.eval_shape(partial(native, _backend.native_platforms()[0]), *arrays).residuals
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), saved)
        return vary_over(result._replace(residuals=empty), axes)

    return _backend.run(method, native, plain, *arrays)


def _composed(
    op: Callable[..., Any],
    hit_spec: DenseSpec,
    miss_spec: TTSpec,
    save: bool,
    rows: jax.Array,
    cores: _backend.Cores,
    hits: Batch,
    misses: Batch,
    sentinels: tuple[jax.Array | None, jax.Array | None],
) -> Forward:
    """`forward` with one op for the hits and one for the misses, which stay where they are."""
    of_cores, of_rows = sentinels
    hit_sum, of_hits = op(hit_spec, (rows,), hits, save, of_rows)
    miss_sum, of_misses = op(miss_spec, cores, misses, save, of_cores)
    place = None
    if misses.weights is not None:
        place = jax.lax.broadcasted_iota(jnp.int32, misses.ids.shape[:2], 1)
    misses = dataclasses.replace(misses, rectangular=False)
    return Forward(added(miss_sum, hit_sum), misses, place, (of_hits, of_misses))


def added(left: jax.Array, right: jax.Array) -> jax.Array:
    """Sum in the accumulator type of both: float64 cores may stand beside narrower rows."""
    wide = accumulator(left.dtype, right.dtype)
    return left.astype(wide) + right.astype(wide)


def observe(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    stamp: jax.Array,
    policy: str,
    method: str,
) -> tuple[CacheDirectory, jax.Array]:
    """Counts a batch; `jax_tt._cache.reference.observe`."""

    def native(platform: str, *inputs: Any) -> Any:
        return _native().cache_observe(*inputs, policy, platform=platform)

    def plain(directory: CacheDirectory, keys: Any, slots: Any, stamp: Any) -> Any:
        return reference.observe(directory, keys, slots, stamp, policy)

    return _backend.run(_backend.choose(method), native, plain, directory, keys, slots, stamp)


def populate(directory: CacheDirectory, method: str) -> tuple[CacheDirectory, jax.Array, jax.Array]:
    """Lets hot ghosts in; `jax_tt._cache.reference.populate`."""

    def native(platform: str, directory: CacheDirectory) -> Any:
        return _native().cache_populate(directory, platform=platform)

    return _backend.run(_backend.choose(method), native, reference.populate, directory)


def _native() -> Any:
    from jax_tt import _native

    return _native
