"""Chooses between the reference and the native ops.

The reference is the fallback if the native module is missing or cannot be loaded.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_tt._base import ffi
from jax_tt._base.environment import resolve_method

_PLATFORMS = ("cpu", "cuda")


def native_platforms() -> tuple[str, ...]:
    """Platforms that have native ops in this process."""
    return tuple(platform for platform in _PLATFORMS if ffi.load(platform) is not None)


def choose(method: str, storage: Any = jnp.float32) -> str:
    """``"reference"``, ``"native"``, ``"cuda_emulated"``, or ``"auto"`` if native ops are available.

    Raises for an unknown method, a native one without its module, and a type that its kernels do not support.

    Args:
        method: as given to an op.
        storage: type of the table.
    """
    method = resolve_method(method)
    if method == "reference":
        return method
    if method == "cuda_emulated":
        if ffi.load(method) is None:
            raise RuntimeError(
                "method='cuda_emulated': the CUDA kernels were not built for the processor, which is done for tests "
                "only: pip install . -C cmake.define.JAX_TT_EMULATION=ON." + _reason(method)
            )
        _refuse_float64(method, storage)
        return method
    platforms = native_platforms()
    if platforms:
        if platforms == ("cuda",) and method == "auto" and _is_float64(storage):
            return "reference"
        if method == "native" and (platforms == ("cuda",) or _default_platform() == "gpu"):
            _refuse_float64(method, storage)
        return method
    if method == "native":
        raise RuntimeError(
            "method='native': the native module of jax_tt is not available. Install a wheel or build it "
            "with `pip install .`, or use method='reference'." + _reason()
        )
    if jax.default_backend() == "cpu":
        _warn_once()
    return "reference"


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "jax_tt: the native module is not available, so pure JAX runs instead, many times slower on "
        "CPU. Install a wheel or build it with `pip install .`; silence this with "
        "JAX_TT_METHOD=reference." + _reason(),
        RuntimeWarning,
        stacklevel=2,
    )


def _reason(platform: str = "cpu") -> str:
    reason = ffi.why_unavailable(platform)
    return f" Reason: {reason}" if reason else ""


def _default_platform() -> str:
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(device, "platform", device) or jax.default_backend()


def _is_float64(storage: Any) -> bool:
    return jnp.dtype(storage) == jnp.float64


def _refuse_float64(method: str, storage: Any) -> None:
    if _is_float64(storage):
        raise TypeError(
            f"method={method!r}: got a float64 table; the CUDA kernels store float32, bfloat16 and float16. Cast the "
            "table, or use method='reference' (method='auto' does so by itself)."
        )


def run(method: str, native: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> Any:
    """``native(platform, *args)`` for the platform that the program is lowered for, or ``reference(*args)``."""
    if method == "reference":
        return reference(*args)
    leaves = jax.tree.leaves(args)
    symbolic = any(not isinstance(size, int) for leaf in leaves for size in leaf.shape)
    if symbolic and (method == "cuda_emulated" or native_platforms() == ("cuda",)):
        raise ValueError(
            "bags, ids: got a symbolic batch size; the CUDA kernels take their working memory from the program, which "
            "must know how much. Use method='reference', or export one program for each of a few padded batch sizes."
        )
    if method == "cuda_emulated":
        return native(method, *args)
    platforms = native_platforms()
    if symbolic or any(leaf.dtype == jnp.float64 for leaf in leaves):
        platforms = tuple(p for p in platforms if p != "cuda")
    functions = {platform: partial(native, platform) for platform in platforms}
    default: Any = reference if method == "auto" else None
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        functions, traced_late, args = _traced_late(functions, reference, args)
        default = default and traced_late
    return lax.platform_dependent(*args, default=default, **functions)


def by_platform(
    native: Mapping[str, Callable[..., Any]], reference: Callable[..., Any], *args: Any
) -> Any:
    """``native[platform](*args)`` for the platform that the program is lowered for, or ``reference(*args)``.

    Unlike `jax.lax.platform_dependent`, it traces the reference only when a program is lowered for such a platform.
    That halves the time to trace a program of many tables.

    Args:
        native: functions by platform.
        reference: for other platforms, with results of the same types. It must not close over traced values, and has
            no derivatives.
        *args: trees of arrays.
    """
    functions, default, leaves = _traced_late(native, reference, args)
    return lax.platform_dependent(*leaves, default=default, **functions)


def _traced_late(
    native: Mapping[str, Callable[..., Any]], reference: Callable[..., Any], args: Sequence[Any]
) -> tuple[dict[str, Callable[..., Any]], Callable[..., Any], tuple[Any, ...]]:
    """Arguments of `jax.lax.platform_dependent` with which it does not trace the reference: functions of leaves.

    Arrays of numpy are not among the leaves: what follows from them alone is computed when a program is traced.
    """
    every, structure = jax.tree.flatten(args)
    places = [k for k, leaf in enumerate(every) if isinstance(leaf, jax.Array)]
    constants = [None if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in every]

    def whole(leaves: Sequence[Any]) -> Sequence[Any]:
        both = list(constants)
        for k, leaf in zip(places, leaves, strict=True):
            both[k] = leaf
        return jax.tree.unflatten(structure, both)

    # Traced before the reference, so that the types of the results are known there.
    first, *others = native
    results: list[Any] = []

    def traced(*leaves: Any) -> Any:
        result = native[first](*whole(leaves))
        results.append(jax.tree.map(jax.typeof, result))
        return result

    def default(*leaves: Any) -> Any:
        if not results:  # in an eager call for this platform, which traces no other function
            return reference(*whole(leaves))
        types, structure = jax.tree.flatten(results[0])

        def flat(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(reference(*whole(leaves)))

        found = _deferred_reference.bind(*leaves, function=flat, types=tuple(types))
        return jax.tree.unflatten(structure, found)

    functions = {name: lambda *leaves, f=native[name]: f(*whole(leaves)) for name in others}
    return {first: traced, **functions}, default, tuple(every[k] for k in places)


# ``function(*args)``, whose results have these types; it is traced when it is lowered.
_deferred_reference = Primitive("jax_tt_deferred_reference")
_deferred_reference.multiple_results = True
_deferred_reference.def_impl(lambda *args, function, types: function(*args))
_deferred_reference.def_abstract_eval(lambda *args, function, types: types)


def _lower(ctx: Any, *args: Any, function: Callable[..., Any], types: Any) -> Any:
    def checked(*args: Any) -> Any:
        found = function(*args)
        got, want = ([f"{x.dtype}{list(x.shape)}" for x in of] for of in (found, types))
        if got != want:
            raise TypeError(f"the reference of an op returns {got}, but the native op {want}")
        return found

    return mlir.lower_fun(checked, multiple_results=True)(ctx, *args)


def _batched(
    args: Sequence[Any], axes: Sequence[Any], *, function: Callable[..., Any], types: Sequence[Any]
) -> Any:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    mapped = jax.vmap(function, in_axes=list(axes), out_axes=0, axis_size=size)
    kinds = tuple(kind.update(shape=(size, *kind.shape)) for kind in types)
    return _deferred_reference.bind(*args, function=mapped, types=kinds), [0] * len(types)


mlir.register_lowering(_deferred_reference, _lower)
batching.primitive_batchers[_deferred_reference] = _batched
