"""FFI calls, for all platforms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base import ffi

Named = Mapping[str, jax.Array]
Types = Mapping[str, jax.ShapeDtypeStruct]


def native(platform: str) -> ModuleType:
    """The loaded module of a platform, which must be available."""
    module = ffi.load(platform)
    assert module is not None
    return module


def native_call(
    platform: str,
    op: str,
    operands: Named,
    results: Types,
    workspace: int | None,
    attributes: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Results of an op by name.

    Args:
        platform: platform of the FFI target.
        op: its name without prefix and version.
        operands: arrays in the order of the target.
        results: their shapes in the order of the target. A result is aliased with the operand of the same name.
        workspace: bytes of working memory, passed as an extra result because ops on a GPU must not allocate; None on
            platforms whose ops allocate it themselves.
        attributes: static values.
    """
    scratch = () if workspace is None else (jax.ShapeDtypeStruct((workspace,), jnp.uint8),)
    places = dict(zip(operands, range(len(operands)), strict=True))
    aliases = {}
    for place, name in enumerate(results):
        if name in places:
            aliases[places[name]] = place
    call = jax.ffi.ffi_call(
        ffi.target(platform, op), (*results.values(), *scratch), input_output_aliases=aliases
    )
    with jax.named_scope(op):
        arrays = call(*operands.values(), **attributes)
    return dict(zip(results, arrays[: len(results)], strict=True))


def flatten_tables(of_tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What each table has by name, as one mapping: ``0/ids``, ..., ``1/ids``, ..."""
    return {f"{k}/{name}": value for k, one in enumerate(of_tables) for name, value in one.items()}


def unflatten_tables(of_all: Mapping[str, Any], tables: int) -> list[dict[str, Any]]:
    """The inverse of `flatten_tables`, without other names."""
    each: list[dict[str, Any]] = [{} for _ in range(tables)]
    for numbered_name, value in of_all.items():
        k, slash, name = numbered_name.partition("/")
        if slash:
            each[int(k)][name] = value
    return each


def numbered(name: str, arrays: Iterable[jax.Array]) -> dict[str, jax.Array]:
    """``name_0``, ``name_1``, ..."""
    return {f"{name}_{k}": array for k, array in enumerate(arrays)}


def types_of(arrays: Named, dtype: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of results like these arrays, or of type ``dtype``."""
    return {
        name: jax.ShapeDtypeStruct(array.shape, dtype or array.dtype)
        for name, array in arrays.items()
    }


def types_in(tree: Any) -> Any:
    """A tree with types in place of its arrays; JAX sorts the items of its dicts.

    Programs keep the rules of their calls, and what these close over. Traced values there would outlive their trace.
    """
    return jax.tree.map(lambda x: jax.typeof(x) if isinstance(x, jax.Array) else x, tree)
