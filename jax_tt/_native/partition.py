"""Partitioning of native calls over a sharded batch and sharded tables, and their batching rule for `jax.vmap`.

A native call takes blocked arrays, whose leading axis counts independent blocks of the batch, and whole arrays, some of
which may be sharded along named dimensions. It is opaque to XLA, which would otherwise gather all of them onto every
device. `check_unsharded` is for operations that change all of an array on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base import reports
from jax_tt._native.call import types_in

Arrays = tuple[jax.Array, ...]
Named = Mapping[str, jax.Array]
# The names of the dimensions of an array; None for one that is not sharded.
Dimensions = tuple[str | None, ...]
_BLOCKS = "blocks"
# A dimension that keeps its sharding, but in another call: here, the first dimension is divided in its place.
UNDIVIDED = "undivided"


def num_blocks(groups: int) -> int:
    """Number of blocks for ``groups`` groups of ids: divisible by any usual number of devices.

    It is not the number of groups because data per block must be small relative to the batch. For a symbolic number of
    groups, whose divisors are not known, it is 1.
    """
    if not isinstance(groups, int):
        return 1
    return math.gcd(groups, 2**8 * 3**2 * 5 * 7) if groups else 1


def is_partitioned(blocks: int = 2) -> bool:
    """Whether XLA may partition a call over the devices, possibly not in the same way in forward and backward pass."""
    # Inside a shard_map, each device already runs the call on its shard.
    inside = jax.sharding.get_abstract_mesh().manual_axes
    return blocks > 1 and jax.device_count() > 1 and not inside


def is_resharded(ids: jax.Array) -> bool:
    """Whether the backward pass may get a plan that was partitioned in another way in the forward pass."""
    return is_partitioned(num_blocks(ids.shape[0]))


class Split(NamedTuple):
    """How the arrays of a call are divided over the devices.

    Attributes:
        axes: the mesh axes that the blocks are split over.
        of: the mesh axes that named dimensions are split over.
    """

    axes: tuple[str, ...] = ()
    of: Mapping[str, tuple[str, ...]] = {}


def over_blocks(
    local: Callable[[Named, Split], Named],
    blocked: Named,
    whole: Named,
    blocked_results: Sequence[str],
    dimensions: Callable[[], Mapping[str, Dimensions]] = dict,
    describe: Callable[[str], str] = str,
) -> dict[str, jax.Array]:
    """Calls ``local({**blocked, **whole}, Split())``, or calls it on each device with its share of the arrays.

    Args:
        local: takes the arrays by name and how they are divided. It sums its results over the axes of dimensions that
            the results do not have. As `describe`, it closes over no arrays, since programs keep it; what a
            `jax.tree_util.Partial` is given has types in their place.
        blocked: arrays with the same leading size, which counts the blocks.
        whole: the other arrays.
        blocked_results: names of the results that are blocked.
        dimensions: returns the named dimensions of arrays and results along which they may be sharded, other than that
            of the blocks, by the name of the array.
        describe: what warnings call an array.
    """
    names = (*blocked, *whole)
    given = (*blocked.values(), *whole.values())
    blocks = given[0].shape[0]
    named = dimensions() if isinstance(blocks, int) and is_partitioned() else {}
    partitioned = bool(named) or is_partitioned(blocks)
    if not partitioned and not any(isinstance(arg, Tracer) for arg in given):
        return dict(local({**blocked, **whole}, Split()))
    local, describe = types_in((local, describe))
    dims: dict[str, Dimensions] = dict.fromkeys((*blocked, *blocked_results), (_BLOCKS,))
    for name, of_array in named.items():
        dims[name] = (*dims.get(name, ()), *of_array[len(dims.get(name, ())) :])

    @custom_vmap
    def batchable(*args: jax.Array) -> dict[str, jax.Array]:
        if partitioned:
            return _partitioned(local, names, dims, describe, args)
        return dict(local(dict(zip(names, args, strict=True)), Split()))

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
    local: Callable[[Named, Split], Named],
    names: Sequence[str],
    dims: Mapping[str, Dimensions],
    describe: Callable[[str], str],
    args: Arrays,
) -> dict[str, jax.Array]:
    def by_name(split: Split, *args: jax.Array) -> Named:
        return local(dict(zip(names, args, strict=True)), split)

    def in_order(split: Split, *args: jax.Array) -> Arrays:
        results = by_name(split, *args)
        return tuple(results[name] for name in shapes)

    shapes = jax.eval_shape(partial(by_name, Split()), *args)

    def full(name: str, array: Any) -> Dimensions:
        named = dims.get(name, ())
        return *named, *[None] * (len(array.shape) - len(named))

    of_args = [full(name, arg) for name, arg in zip(names, args, strict=True)]
    of_results = [full(name, shape) for name, shape in shapes.items()]

    def shardings(
        mesh: Any, arg_types: Sequence[Any], result_types: Sequence[Any]
    ) -> tuple[Split, tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        axes = _axes_of(
            mesh, zip([*of_args, *of_results], [*arg_types, *result_types], strict=True)
        )

        def place(of_arrays: Sequence[Dimensions]) -> tuple[NamedSharding, ...]:
            specs = (P(*[axes.get(name or "") or None for name in named]) for named in of_arrays)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        of_tables = {name: over for name, over in axes.items() if name != _BLOCKS}
        return Split(axes[_BLOCKS], of_tables), place(of_args), place(of_results)

    def infer(mesh: Any, arg_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        return shardings(mesh, arg_types, result_types)[2]

    def partition(mesh: Any, arg_types: Sequence[Any], result_types: Sequence[Any]) -> Any:
        split, of_arguments, of_all_results = shardings(mesh, arg_types, result_types)
        for name, named, given, taken in zip(names, of_args, arg_types, of_arguments, strict=True):
            if _BLOCKS not in named:
                _tell_if_moved(describe(name), given, taken)

        def on_device(*args: jax.Array) -> Arrays:
            # With Explicit axes around it, JAX 0.12 would annotate the additions of a sum over devices.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return in_order(split, *args)

        return mesh, on_device, of_all_results, of_arguments

    call = custom_partitioning(partial(in_order, Split()))
    rule = _sharding_rule(of_args, of_results)
    call.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return dict(zip(shapes, call(*args), strict=True))


def _axes_of(mesh: Any, arrays: Iterator[tuple[Dimensions, Any]]) -> dict[str, tuple[str, ...]]:
    """The mesh axes that every named dimension is split over, if this is even.

    Where a mesh axis splits a table, it does not split the batch, all of which is looked up in each shard.
    """
    axes: dict[str, tuple[str, ...]] = {_BLOCKS: ()}
    for named, kind in arrays:
        first = next(filter(None, named), None)
        for dimension, over in zip(named, _mesh_axes(kind.sharding), strict=False):
            if not first or not over or (first == _BLOCKS and dimension != _BLOCKS):
                continue  # sums and their gradients are divided as the table is
            # Rather than gathered, an array that must not be divided there is divided along its first dimension.
            name = first if not dimension or dimension.endswith(UNDIVIDED) else dimension
            others = [axes.get(other, ()) for other in named if other and other != name]
            taken = not set(over).isdisjoint(axis for other in others for axis in other)
            size = kind.shape[named.index(name)]
            if not taken and size % math.prod(mesh.shape[axis] for axis in over) == 0:
                axes[name] = max(axes.get(name, ()), over, key=len)
    of_tables = {axis for name, over in axes.items() if name != _BLOCKS for axis in over}
    axes[_BLOCKS] = tuple(axis for axis in axes[_BLOCKS] if axis not in of_tables)
    return axes


def _mesh_axes(sharding: Any) -> list[tuple[str, ...]]:
    """The mesh axes of every dimension of an array, as far as its sharding names them."""
    spec = getattr(sharding, "spec", P())
    return [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]


def _tell_if_moved(name: str, given: Any, taken: NamedSharding) -> None:
    """Warns if a call takes an array in other shards than it has, so that it is gathered or moved in every call."""
    had, has = _mesh_axes(given.sharding), _mesh_axes(taken)
    if all(has[k : k + 1] == [axes] for k, axes in enumerate(had) if axes):
        return
    share = math.prod(given.shape) // math.prod(taken.mesh.shape[a] for axes in has for a in axes)
    message = (
        f"{name}: is sharded as {given.sharding.spec}, but this operation takes it as {taken.spec}: every call moves "
        f"{share * given.dtype.itemsize} bytes to every device. Shard it as {taken.spec}."
    )
    reports.warn_once((name, str(given.sharding.spec)), message, UserWarning)


def _sharding_rule(args: Sequence[Dimensions], results: Sequence[Dimensions]) -> str:
    """``"f0 f1, f2 f3 -> f0 f4"``, with one factor for each name and each unnamed dimension."""
    factors: dict[Any, str] = {}

    def side(arrays: Sequence[Dimensions]) -> str:
        return ", ".join(
            " ".join(factors.setdefault(name or object(), f"f{len(factors)}") for name in named)
            for named in arrays
        )

    return f"{side(args)} -> {side(results)}"


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
    rule = _sharding_rule([(None,) * array.ndim for array in arrays], [()])
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
