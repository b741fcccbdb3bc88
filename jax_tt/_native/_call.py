"""One FFI call, written once for every platform."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt import _ffi

Named = Mapping[str, jax.Array]


def native(platform: str) -> ModuleType:
    """The loaded module of a platform that is known to be available."""
    module = _ffi.load(platform)
    assert module is not None
    return module


def native_call(
    platform: str,
    op: str,
    operands: Named,
    results: Mapping[str, jax.ShapeDtypeStruct],
    workspace: int | None,
    attributes: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Results of an op by name.

    Args:
        platform: whose target to call.
        op: its name without prefix and version.
        operands: arrays in the order of the target.
        results: their shapes in the order of the target. A result takes the place of the operand of the same name.
        workspace: bytes of working memory, which an op on a GPU gets as one more result because it must not
            allocate any itself; None on a platform whose ops do.
        attributes: static values.
    """
    scratch = () if workspace is None else (jax.ShapeDtypeStruct((workspace,), jnp.uint8),)
    places = {name: place for place, name in enumerate(operands)}
    call = jax.ffi.ffi_call(
        _ffi.target(platform, op),
        (*results.values(), *scratch),
        input_output_aliases={
            places[name]: place for place, name in enumerate(results) if name in places
        },
    )
    found = call(*operands.values(), **attributes)
    return dict(zip(results, found[: len(results)], strict=True))


def numbered(name: str, arrays: Iterable[jax.Array]) -> dict[str, jax.Array]:
    """``name_0``, ``name_1``, ..."""
    return {f"{name}_{k}": array for k, array in enumerate(arrays)}


def types_of(arrays: Named, dtype: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Results like these arrays, or of their shapes and another type."""
    return {
        name: jax.ShapeDtypeStruct(array.shape, dtype or array.dtype)
        for name, array in arrays.items()
    }
