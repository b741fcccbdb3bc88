"""Makes an opaque native call split over a sharded batch and batchable by `jax.vmap`.

A native call takes some arrays whose leading axis counts independent blocks of the batch, and some that are whole.
XLA cannot look inside, so left alone it would gather a sharded batch onto every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._ops._vma import varying_axes

Arrays = tuple[jax.Array, ...]


def num_blocks(groups: int) -> int:
    """Blocks that ``groups`` groups of ids are dealt into: divisible by any usual number of devices.

    What is kept per block must stay small beside the batch, so it is not simply the number of groups. A symbolic number
    is one block: what it is divisible by is not known.
    """
    if not isinstance(groups, int):
        return 1
    return math.gcd(groups, 2**8 * 3**2 * 5 * 7) if groups else 1


def inside_shard_map(*args: jax.Array) -> bool:
    """Whether each device runs this call on a shard of its own already."""
    return bool(varying_axes(*args) or jax.sharding.get_abstract_mesh().manual_axes)


def is_partitioned(blocks: int, *args: jax.Array) -> bool:
    """Whether XLA may split a call over the devices, the forward pass perhaps otherwise than the backward pass."""
    return blocks > 1 and jax.device_count() > 1 and not inside_shard_map(*args)


def over_blocks(
    local: Callable[..., Arrays],
    args: Sequence[jax.Array],
    blocked_args: Sequence[bool],
    blocked_results: Sequence[bool],
) -> Arrays:
    """Calls ``local(*args, axes=())``, or on each device its share of the blocks.

    Args:
        local: takes the arrays and the mesh axes that the blocks are split over, and sums over those axes whatever
            it returns whole.
        args: arrays; those that are blocked have the same leading size.
        blocked_args: which of them are blocked.
        blocked_results: which results are.
    """

    @custom_vmap
    def call(*args: jax.Array) -> Arrays:
        return _partitioned(local, args, blocked_args, blocked_results)

    @call.def_vmap
    def _(
        axis_size: int, in_batched: Sequence[bool], *args: jax.Array
    ) -> tuple[Arrays, tuple[bool, ...]]:
        # One element at a time: what the forward pass hands to the backward pass belongs to one batch.
        def one(mapped: Arrays) -> Arrays:
            rest = iter(mapped)
            return call(*(next(rest) if b else a for a, b in zip(args, in_batched, strict=True)))

        mapped = tuple(a for a, b in zip(args, in_batched, strict=True) if b)
        return jax.lax.map(one, mapped), (True,) * len(blocked_results)

    return call(*args)


def _partitioned(
    local: Callable[..., Arrays],
    args: Sequence[jax.Array],
    blocked_args: Sequence[bool],
    blocked_results: Sequence[bool],
) -> Arrays:
    blocks = next(arg.shape[0] for arg, blocked in zip(args, blocked_args, strict=True) if blocked)
    if not is_partitioned(blocks, *args):
        return local(*args, axes=())

    def partition(mesh: Any, arg_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        blocked = (
            *(t for t, b in zip(arg_types, blocked_args, strict=True) if b),
            *(t for t, b in zip(result_types, blocked_results, strict=True) if b),
        )
        axes = max((_block_axes(kind.sharding, blocks) for kind in blocked), key=len)

        def shardings(types: Sequence[Any], blocked: Sequence[bool]) -> tuple[NamedSharding, ...]:
            return tuple(
                NamedSharding(mesh, P(axes or None) if b else P())
                for _, b in zip(types, blocked, strict=True)
            )

        def lowered(*shards: jax.Array) -> Arrays:
            return local(*shards, axes=axes)

        return (
            mesh,
            lowered,
            shardings(result_types, blocked_results),
            shardings(arg_types, blocked_args),
        )

    call = custom_partitioning(lambda *args: local(*args, axes=()))
    results = jax.eval_shape(lambda *args: local(*args, axes=()), *args)
    rule, whole = _sharding_rule(args, blocked_args, results, blocked_results)
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)
    return call(*args)


def _block_axes(sharding: Any, blocks: int) -> tuple[str, ...]:
    """Mesh axes over which the leading axis is split evenly; none otherwise."""
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
    """``"blocks a0, a1 -> blocks r0"`` and its factors other than the blocks, which must be whole everywhere."""
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
