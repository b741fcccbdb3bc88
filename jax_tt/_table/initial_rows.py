"""Initial values of parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._base.arguments import type_of
from jax_tt._table.table import Table
from jax_tt._table.wrapper import Wrapper, delegate

_VARIANCE_SCALING = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


@functools.singledispatch
def init_param(table: Table, name: str, key: jax.Array) -> Any:
    """One initial parameter; kinds register it where every parameter may have its own key."""
    return table.init_params(key)[name]


delegate(Wrapper, init_param)


def default_embedding_init(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """The default of flax's Embed: rows of about unit length. A function, so that descriptions can be pickled."""
    return _VARIANCE_SCALING(key, shape, dtype)


@dataclasses.dataclass(frozen=True)
class NormalRows:
    """An initialiser of normally distributed numbers; equal ones compare equal, unlike the functions of JAX."""

    deviation: float

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return jax.nn.initializers.normal(self.deviation)(key, shape, dtype)


def check_initializer(label: str, name: str, init: Any) -> None:
    """Raises unless an initialiser can be hashed, since it is a part of a table, which programs know by its hash."""
    try:
        hash(init)
    except TypeError:
        raise TypeError(
            f"{label}{name}: got {type_of(init)}, which defines __eq__ without __hash__; expected a function, "
            "or an object that can be hashed, e.g. of a class with @dataclasses.dataclass(frozen=True)."
        ) from None


def unboxed(init: Any) -> Any:
    """An initialiser without the metadata in which Flax wraps values, e.g. for their sharding; names are unchanged."""
    if not callable(init):
        return init

    def without_box(*args: Any) -> Any:
        value = init(*args)
        unbox = getattr(value, "unbox", None)
        return getattr(value, "raw_value", value) if unbox is None else unbox()

    return without_box
