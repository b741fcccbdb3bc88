"""Initial values of a layer's parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._init import CoreInit, init_cores
from jax_tt._shape import TTShape

# That of flax's Embed: rows of about unit length.
default_embedding_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


@dataclasses.dataclass(frozen=True, eq=False)
class GivenCores:
    """In place of an initialiser, the cores; ``fresh`` makes the slices of a table that grows."""

    cores: tuple[Any, ...]
    fresh: CoreInit


def fresh_init(init: Any) -> CoreInit:
    """What new slices are made by."""
    return init.fresh if isinstance(init, GivenCores) else init


def fresh_cores(
    key: jax.Array, shape: TTShape, init: CoreInit | GivenCores, dtype: Any
) -> tuple[Any, ...]:
    """The cores of a table. Those of a callable are returned as it made them, boxes included."""
    if isinstance(init, GivenCores):
        return tuple(jnp.array(core, dtype) for core in init.cores)
    if not callable(init):
        return init_cores(key, shape, init, dtype)
    keys = jax.random.split(key, shape.d)
    return tuple(init(keys[k], core, dtype) for k, core in enumerate(shape.core_shapes))


def fresh_core(
    key: jax.Array, *, shape: TTShape, k: int, init: CoreInit | GivenCores, dtype: Any
) -> Any:
    """Core ``k`` of a table whose cores are made one by one, each with its own key."""
    if isinstance(init, GivenCores):
        return jnp.array(init.cores[k], dtype)
    if callable(init):
        return init(key, shape.core_shapes[k], dtype)
    return init_cores(key, shape, init, dtype)[k]


def check_value(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Refuses what an initialiser made when it is no float array of the wanted shape."""
    if tuple(value.shape) != shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"{name}: its initialiser returned {value.dtype}{list(value.shape)}; expected floats of shape "
            f"{list(shape)}, from a callable (key, shape, dtype) -> array."
        )
