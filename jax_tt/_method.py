"""Which implementation an op runs: ``method=`` and the ``JAX_TT_METHOD`` variable."""

import os
from typing import Literal, cast

from jax_tt._arguments import one_of

Method = Literal["auto", "reference", "ffi", "cuda_emulated"]
# cuda_emulated: the CUDA kernels, run by the processor thread by thread; for tests, in builds that have it.
METHODS = ("auto", "reference", "ffi", "cuda_emulated")


def resolve_method(method: str) -> Method:
    """Checks ``method``; ``JAX_TT_METHOD`` takes the place of ``"auto"``."""
    source = "method"
    if isinstance(method, str) and method == "auto":
        override = os.environ.get("JAX_TT_METHOD", "").strip()
        if override:
            method, source = override, "JAX_TT_METHOD"
    hint = "; 'reference' is pure JAX and runs everywhere"
    return cast(Method, one_of(source, method, METHODS, hint))
