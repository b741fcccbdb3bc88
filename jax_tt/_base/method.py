"""The implementation that an operation uses: ``method=`` and the ``JAX_TT_METHOD`` variable."""

import os
from typing import Literal, cast

from jax_tt._base import environment
from jax_tt._base.arguments import one_of
from jax_tt._base.environment import METHODS

# cuda_emulated: the CUDA kernels, run by the processor thread by thread; for tests, in builds that have it.
Method = Literal["auto", "reference", "ffi", "cuda_emulated"]


def resolve_method(method: str) -> Method:
    """Checks ``method``; ``JAX_TT_METHOD`` replaces ``"auto"``."""
    environment.check()  # it may have changed since the import, before the native ops read it
    if not isinstance(method, str) or method not in METHODS:
        one_of("method", method, METHODS, "; 'reference' is pure JAX and runs everywhere")
    if method == "auto" and "JAX_TT_METHOD" in os.environ:
        method = environment.variable("JAX_TT_METHOD") or method
    return cast(Method, method)
