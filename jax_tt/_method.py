"""Which implementation an op runs: ``method=`` and the ``JAX_TT_METHOD`` variable."""

import os
from typing import Literal, cast

Method = Literal["auto", "reference", "ffi"]
METHODS = ("auto", "reference", "ffi")


def resolve_method(method: str) -> Method:
    """Checks ``method``; ``JAX_TT_METHOD`` takes the place of ``"auto"``."""
    source = "method"
    if method == "auto":
        override = os.environ.get("JAX_TT_METHOD", "").strip()
        if override:
            method, source = override, "JAX_TT_METHOD"
    if method not in METHODS:
        raise ValueError(
            f"{source}: got {method!r}; expected one of {', '.join(map(repr, METHODS))}. "
            "'reference' is pure JAX and runs everywhere."
        )
    return cast(Method, method)
