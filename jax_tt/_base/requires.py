"""Packages that only some parts of the library need."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, purpose: str, extra: str) -> ModuleType:
    """The module, or an error that names the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{purpose} needs {package}, which is not installed: pip install 'jax-tt[{extra}]'."
        ) from error
