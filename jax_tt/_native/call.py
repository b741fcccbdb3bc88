"""FFI calls, for all platforms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base import ffi
from jax_tt._table.parts_of_arrays import Key, Part

Named = Mapping[str, jax.Array]
Types = Mapping[str, jax.ShapeDtypeStruct]

# The attributes of a table whose operands are parts of arrays: the table that has these, the first entry, how many.
ROWS = ("stack", "first_row", "rows")
BAGS = ("flat", "first_bag", "bags")


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


def has_parts(tree: Any) -> bool:
    """Whether leaves of a tree are parts of arrays."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Part))
    return any(isinstance(leaf, Part) for leaf in leaves)


def owners_of(of_tables: Sequence[Iterable[Any]]) -> dict[Key, int]:
    """The table that has every shared array among its operands: the first one with a part of it."""
    owners: dict[Key, int] = {}
    for k, arrays in enumerate(of_tables):
        for array in arrays:
            if isinstance(array, Part):
                owners.setdefault(array.key, k)
    return owners


def once_each(owners: Mapping[Key, int], arrays: Named) -> dict[str, Any]:
    """Arrays of all tables without parts, and the arrays of these, with the tables that have them."""
    return {
        name: array.array if isinstance(array, Part) else array
        for name, array in arrays.items()
        if not isinstance(array, Part) or name.startswith(f"{owners[array.key]}/")
    }


def part_of(
    owners: Mapping[Key, int], arrays: Iterable[Any], names: tuple[str, str, str]
) -> dict[str, np.int64]:
    """The attributes of a table with parts among its operands, `ROWS` or `BAGS`; none of another table."""
    part = next((array for array in arrays if isinstance(array, Part)), None)
    if part is None:
        return {}
    values = owners[part.key], part.first, part.count
    return {name: np.int64(value) for name, value in zip(names, values, strict=True)}


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
