"""What is installed: packages that some parts of the library need, and headers for extensions."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
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


def get_include() -> str:
    """The folder of the headers with which an extension compiles a rule of its own.

    They are ``jax_tt/rule.h``, ``jax_tt/cuda_rule.h`` and what these include. An extension must be compiled again
    after an update of jax_tt that changes them; `jax_tt.optimizers.register` raises an error if that was forgotten.

    Returns:
        The folder to pass to the compiler with ``-I``.

    Raises:
        RuntimeError: this installation has no native operations, which an extension extends.

    >>> import jax_tt
    >>> flags = ["-std=c++20", f"-I{jax_tt.extension.get_include()}"]
    """
    spec = find_spec("jax_tt._cpu")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "jax_tt._cpu was not built with this installation, so that there are no headers. Install jax_tt with it: "
            "pip install . -C cmake.define.JAX_TT_NATIVE=ON."
        )
    # Beside the module, which is not beside this file in an editable installation.
    folder = Path(spec.origin).parent / "include"
    if not (folder / "jax_tt" / "rule.h").exists():
        raise RuntimeError(
            f"{folder} has no jax_tt/rule.h: jax_tt._cpu was copied there without the headers. Install jax_tt with "
            "pip, which puts them beside it."
        )
    return str(folder)
