"""`check_unsharded`: refuses arrays that are sharded for operations that change all of them on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._native.partition import is_partitioned


def check_unsharded(arrays: Mapping[str, jax.Array], label: str, advice: str) -> jax.Array:
    """0, an int32 that the results are to depend on; raises if one of the arrays, by name, is sharded.

    What is traced for a mesh with automatic axes has its shardings once XLA partitions the program, which then raises.

    Raises:
        ValueError: an array is sharded; ``label`` is in front of its name, ``advice`` says what to do.
    """
    zero = jnp.zeros((), jnp.int32)
    if not is_partitioned():
        return zero
    names = list(arrays)

    def refuse(shardings: Sequence[Any]) -> None:
        for name, sharding in zip(names, shardings, strict=True):
            if sharding is not None and not sharding.is_fully_replicated:
                spec = getattr(sharding, "spec", sharding)
                raise ValueError(f"{label}{name}: is sharded as {spec}; {advice}")

    traced = any(isinstance(array, Tracer) for array in arrays.values())
    refuse([_sharding(array) for array in arrays.values()])
    return _when_partitioned(refuse, list(arrays.values())) if traced else zero


def _sharding(array: Any) -> Any:
    """The sharding of an array as far as it is known; None for numpy's and traced arrays without an explicit one."""
    if not isinstance(array, jax.Array):
        return None
    if not isinstance(array, Tracer):
        return array.sharding
    sharding: Any = jax.typeof(array).sharding
    return sharding if any(sharding.spec) else None


def _when_partitioned(refuse: Any, arrays: list[jax.Array]) -> jax.Array:
    def partition(mesh: Any, of_arrays: Sequence[Any], of_result: Any) -> Any:
        del of_result
        refuse([kind.sharding for kind in of_arrays])
        taken = tuple(kind.sharding for kind in of_arrays)
        return mesh, _zero, NamedSharding(mesh, P()), taken

    def infer(mesh: Any, of_arrays: Sequence[Any], of_result: Any) -> Any:
        del of_arrays, of_result
        return NamedSharding(mesh, P())

    call: Any = custom_partitioning(_zero)
    dimensions = iter(range(sum(array.ndim for array in arrays)))
    operands = [" ".join(f"d{next(dimensions)}" for _ in array.shape) for array in arrays]
    rule = f"{', '.join(operands)} -> "
    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)

    @custom_vmap
    def batchable(arrays: list[jax.Array]) -> jax.Array:
        return call(*arrays)

    @batchable.def_vmap
    def _(size: int, batched: Any, arrays: list[jax.Array]) -> tuple[jax.Array, bool]:
        del size, batched, arrays
        return _zero(), False

    return batchable(arrays)


def _zero(*arrays: jax.Array) -> jax.Array:
    del arrays
    return jnp.zeros((), jnp.int32)
