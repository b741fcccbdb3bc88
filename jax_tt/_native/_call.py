"""One FFI call, written once for every platform."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt import _ffi


def native(platform: str) -> ModuleType:
    """The loaded module of a platform that is known to be available."""
    module = _ffi.load(platform)
    assert module is not None
    return module


def native_call(
    platform: str,
    op: str,
    results: Sequence[jax.ShapeDtypeStruct],
    workspace: int | None,
    *args: jax.Array,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> tuple[jax.Array, ...]:
    """Results of an op.

    Args:
        platform: whose target to call.
        op: its name without prefix and version.
        results: shapes of the results.
        workspace: bytes of working memory, which an op on a GPU gets as one more result because it must not
            allocate any itself; None on a platform whose ops do.
        args: arrays.
        aliases: argument that a result is to take the place of.
        attributes: static values.
    """
    scratch = () if workspace is None else (jax.ShapeDtypeStruct((workspace,), jnp.uint8),)
    call = jax.ffi.ffi_call(
        _ffi.target(platform, op), (*results, *scratch), input_output_aliases=aliases
    )
    return tuple(call(*args, **attributes))[: len(results)]
