"""Programs over devices: equal descriptions have one, so that eager calls compile it once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Local:
    """What a device computes with its shards: a function at module level of hashable arguments and then of arrays.

    JAX looks up programs by their function, and two closures are never equal; two of these are, where the function and
    its static arguments are.
    """

    function: Callable[..., Any]
    static: tuple[Any, ...]

    def __call__(self, *arrays: Any) -> Any:
        return self.function(*self.static, *arrays)


def over_devices(local: Local, mesh: Mesh, specs: Any, out: Any) -> Callable[..., Any]:
    """Returns a function that runs ``local`` on each device's shards.

    ``specs`` and ``out`` are trees of partition specs, of the tuple of arguments and of the results. Where the mesh of
    the user has explicit axes, this is called in automatic mode.
    """
    known = jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    leaves, structure = jax.tree.flatten((specs, out), is_leaf=lambda spec: isinstance(spec, P))
    static = local, None if known else mesh, tuple(leaves), structure

    def run(*arrays: Any) -> Any:
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays))
        return (_mapped if traced else _compiled)(*static, *arrays)

    return run


def _mapped(local: Local, mesh: Mesh | None, specs: Any, structure: Any, *arrays: Any) -> Any:
    given, out = structure.unflatten(specs)
    # JAX cannot know that devices that hold the same rows take the same steps.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=out, check_vma=False)
    return mapped(*arrays)


_compiled = functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))(_mapped)
