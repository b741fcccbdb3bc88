"""Partitioning of native calls over a sharded batch, and their batching rule for `jax.vmap`.

A native call takes blocked arrays, whose leading axis counts independent blocks of the batch, and whole arrays. It is
opaque to XLA, which would otherwise gather a sharded batch onto every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Arrays = tuple[jax.Array, ...]
Named = Mapping[str, jax.Array]


def num_blocks(groups: int) -> int:
    """Number of blocks for ``groups`` groups of ids: divisible by any usual number of devices.

    It is not the number of groups because data per block must be small relative to the batch. For a symbolic number of
    groups, whose divisors are not known, it is 1.
    """
    if not isinstance(groups, int):
        return 1
    return math.gcd(groups, 2**8 * 3**2 * 5 * 7) if groups else 1


def is_partitioned(blocks: int) -> bool:
    """Whether XLA may partition a call over the devices, possibly not in the same way in forward and backward pass."""
    # Inside a shard_map, each device already runs the call on its shard.
    inside = jax.sharding.get_abstract_mesh().manual_axes
    return blocks > 1 and jax.device_count() > 1 and not inside


def is_resharded(ids: jax.Array) -> bool:
    """Whether the backward pass may get a plan that was partitioned in another way in the forward pass."""
    return jax.device_count() > 1 and is_partitioned(num_blocks(ids.shape[0]))


def over_blocks(
    local: Callable[[Named, Any], Named],
    blocked: Named,
    whole: Named,
    blocked_results: Sequence[str],
) -> dict[str, jax.Array]:
    """Calls ``local({**blocked, **whole}, axes=())``, or calls it on each device with its share of the blocks.

    Args:
        local: takes the arrays by name and the mesh axes that the blocks are split over, and sums its results that are
            not blocked over these axes.
        blocked: arrays with the same leading size, which counts the blocks.
        whole: the other arrays.
        blocked_results: names of the results that are blocked.
    """
    if not is_partitioned(next(iter(blocked.values())).shape[0]) and not any(
        isinstance(arg, Tracer) for named in (blocked, whole) for arg in named.values()
    ):
        return dict(local({**blocked, **whole}, ()))
    names = (*blocked, *whole)
    given = (*blocked.values(), *whole.values())

    def by_name(*args: jax.Array, axes: Any) -> dict[str, jax.Array]:
        return dict(local(dict(zip(names, args, strict=True)), axes))

    call = partial(_partitioned, by_name, len(blocked), frozenset(blocked_results))

    @custom_vmap
    def batchable(*args: jax.Array) -> dict[str, jax.Array]:
        return call(args)

    @batchable.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *args: jax.Array) -> tuple[Any, Any]:
        # One element at a time, since the residuals belong to one batch.
        def one(mapped: Arrays) -> dict[str, jax.Array]:
            rest = iter(mapped)
            return batchable(
                *(next(rest) if b else a for a, b in zip(args, in_batched, strict=True))
            )

        mapped = tuple(a for a, b in zip(args, in_batched, strict=True) if b)
        results = jax.lax.map(one, mapped)
        return results, dict.fromkeys(results, True)

    return batchable(*given)


def _partitioned(
    local: Callable[..., dict[str, jax.Array]],
    num_blocked: int,
    blocked_results: frozenset[str],
    args: Arrays,
) -> dict[str, jax.Array]:
    blocks = args[0].shape[0]
    if not is_partitioned(blocks):
        return local(*args, axes=())
    shapes = jax.eval_shape(lambda *args: local(*args, axes=()), *args)
    args_are_blocked = tuple(k < num_blocked for k in range(len(args)))
    results_are_blocked = tuple(name in blocked_results for name in shapes)

    def in_order(axes: Any, *args: jax.Array) -> Arrays:
        results = local(*args, axes=axes)
        return tuple(results[name] for name in shapes)

    def partition(mesh: Any, arg_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        types = (*arg_types, *result_types)
        is_blocked = (*args_are_blocked, *results_are_blocked)
        splits = (
            _block_axes(kind.sharding, blocks)
            for kind, b in zip(types, is_blocked, strict=True)
            if b
        )
        axes = max(splits, key=len)

        def shardings(blocked: Sequence[bool]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, P(axes or None) if b else P()) for b in blocked)

        def on_device(*args: jax.Array) -> Arrays:
            # With Explicit axes around it, JAX 0.12 would annotate the additions of a sum over devices.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return in_order(axes, *args)

        return (
            mesh,
            on_device,
            shardings(results_are_blocked),
            shardings(args_are_blocked),
        )

    call = custom_partitioning(lambda *args: in_order((), *args))
    rule, whole = _sharding_rule(
        args, args_are_blocked, tuple(shapes.values()), results_are_blocked
    )
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)
    return dict(zip(shapes, call(*args), strict=True))


def _block_axes(sharding: Any, blocks: int) -> tuple[str, ...]:
    """Mesh axes over which the leading axis is split, or none if this is not even."""
    spec = getattr(sharding, "spec", P())
    first = spec[0] if len(spec) else None
    axes = () if first is None else first if isinstance(first, tuple) else (first,)
    return axes if blocks % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0 else ()


def _sharding_rule(
    args: Sequence[Any],
    blocked_args: Sequence[bool],
    results: Sequence[Any],
    blocked_results: Sequence[bool],
) -> tuple[str, tuple[str, ...]]:
    """``"blocks a0, a1 -> blocks r0"`` and its factors other than the blocks, which must be replicated."""
    whole: list[str] = []

    def axes(array: Any, blocked: bool) -> str:
        names = ["blocks"] if blocked else []
        for _ in range(len(names), len(array.shape)):
            whole.append(f"whole{len(whole)}")
            names.append(whole[-1])
        return " ".join(names)

    def side(arrays: Sequence[Any], blocked: Sequence[bool]) -> str:
        return ", ".join(axes(a, b) for a, b in zip(arrays, blocked, strict=True))

    return f"{side(args, blocked_args)} -> {side(results, blocked_results)}", tuple(whole)
