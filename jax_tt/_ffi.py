"""Loads the native modules and registers their FFI targets; nothing else imports them."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import jax

_MODULES = {"cpu": "jax_tt._cpu"}


@functools.cache
def load(platform: str) -> ModuleType | None:
    """The native module of a platform with its targets registered, or None; `why_unavailable` tells why."""
    return _load(platform)[0]


@functools.cache
def why_unavailable(platform: str) -> str | None:
    """Why `load` returned None, in words for a user; None where the module is there."""
    return _load(platform)[1]


@functools.cache
def _load(platform: str) -> tuple[ModuleType | None, str | None]:
    name = _MODULES.get(platform)
    if name is None:
        return None, f"jax_tt has no native ops for {platform}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None, "it was not built with this installation"
    except ImportError as error:
        return None, f"it could not be loaded ({error})"
    try:
        for target, capsule in module.registrations().items():
            jax.ffi.register_ffi_target(target, capsule, platform=platform, api_version=1)
    except Exception as error:  # the runtime refuses handlers built against an FFI it does not know
        return (
            None,
            f"jax {jax.__version__} does not accept it ({error}); rebuild jax_tt against this jax",
        )
    return module, None
