"""One signature for the reference and the native module, for TT and dense tables alike.

A missing native module, or one that cannot be loaded, means the reference.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt import _ffi, _reference
from jax_tt._method import resolve_method
from jax_tt._ops._batch import Batch
from jax_tt._ops._spec import DenseSpec, Spec
from jax_tt._ops._vma import vary_over, varying_axes

_PLATFORMS = ("cpu", "cuda")
Cores = tuple[jax.Array, ...]


@functools.cache
def native_module() -> ModuleType | None:
    """`jax_tt._native`, or None where it is not built."""
    try:
        from jax_tt import _native
    except ImportError:
        return None
    return _native


def native_platforms() -> tuple[str, ...]:
    """Platforms that have native ops in this process."""
    module = native_module()
    return () if module is None else tuple(p for p in _PLATFORMS if module.available(p))


def choose(method: str, storage: Any = jnp.float32) -> str:
    """``"reference"``, ``"ffi"``, ``"cuda_emulated"``, or ``"auto"`` only where there is something to choose from.

    Args:
        method: as given to an op.
        storage: type of the table.

    Raises:
        ValueError: unknown method.
        RuntimeError: a native method without its native module.
        TypeError: a native method for a type that its kernels do not store.
    """
    method = resolve_method(method)
    if method == "reference":
        return method
    if method == "cuda_emulated":
        module = native_module()
        if module is None or not module.available(method):
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
        if method == "ffi" and (platforms == ("cuda",) or _default_platform() == "gpu"):
            _refuse_float64(method, storage)
        return method
    if method == "ffi":
        raise RuntimeError(
            "method='ffi': the native module of jax_tt is not available. Install a wheel or build it "
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
    reason = _ffi.why_unavailable(platform)
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


def forward(
    spec: Spec,
    cores: Cores,
    batch: Batch,
    method: str,
    save: bool,
    sentinel: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Weighted sums ``[S, nb, D]`` in the accumulator type and what the backward pass reuses.

    A sentinel that moved is an error on CPU natively; the reference has no errors at run time and returns NaN.
    """
    if method == "reference":
        return _reference.forward(spec, cores, batch, save, sentinel)
    axes = varying_axes(cores, batch)
    cores, batch, sentinel = vary_over((cores, batch, sentinel), axes)

    def native(platform: str, cores: Cores, batch: Batch, sentinel: Any) -> Any:
        return vary_over(native_forward(platform, spec, cores, batch, save, sentinel), axes)

    def reference(cores: Cores, batch: Batch, sentinel: Any) -> Any:
        out, _ = _reference.forward(spec, cores, batch, save, sentinel)
        platform = native_platforms()[0]
        _, saved = jax.eval_shape(partial(native, platform), cores, batch, sentinel)
        # All branches must return the same arrays, though the reference has nothing to save.
        return vary_over((out, tuple(jnp.zeros(s.shape, s.dtype) for s in saved)), axes)

    return run(method, native, reference, cores, batch, sentinel)


def plan(
    spec: Spec, cores: Cores, batch: Batch, out: jax.Array, method: str
) -> tuple[jax.Array, ...]:
    """What `backward` and `update` of a TT table need where no forward pass over the whole batch went before.

    ``out`` is the result that was computed instead; an update takes it only to run after it.
    """
    if method == "reference":
        return ()
    axes = varying_axes(cores, batch)
    cores, batch, out = vary_over((cores, batch, out), axes)

    def native(platform: str, cores: Cores, batch: Batch, out: jax.Array) -> Any:
        return vary_over(_module().tt_plan(spec, cores, batch, out, platform=platform), axes)

    def reference(cores: Cores, batch: Batch, out: jax.Array) -> Any:
        saved = jax.eval_shape(partial(native, native_platforms()[0]), cores, batch, out)
        return vary_over(tuple(jnp.zeros(s.shape, s.dtype) for s in saved), axes)

    return run(method, native, reference, cores, batch, out)


def backward(
    spec: Spec,
    cores: Cores,
    batch: Batch,
    residuals: Any,
    g: jax.Array,
    method: str,
    want_weights: bool,
) -> tuple[Cores, jax.Array | None]:
    """Gradients of the cores, in the accumulator type, and of the weights."""
    axes = varying_axes(cores, batch, g)

    def reference(cores: Cores, batch: Batch, residuals: Any, g: jax.Array) -> Any:
        return vary_over(_reference.backward(spec, cores, batch, residuals, g, want_weights), axes)

    def native(platform: str, cores: Cores, batch: Batch, residuals: Any, g: jax.Array) -> Any:
        return vary_over(
            _native_backward(platform, spec, cores, batch, residuals, g, want_weights), axes
        )

    return run(method, native, reference, cores, batch, residuals, g)


def update(
    spec: Spec,
    cores: Cores,
    slots: Any,
    batch: Batch,
    residuals: Any,
    g: jax.Array,
    arrays: dict[str, jax.Array],
    method: str,
    **static: Any,
) -> tuple[Cores, Any, jax.Array, jax.Array | None]:
    """Gradient and optimizer step; ``arrays`` holds hyper, inv_scale and seed."""

    def reference(
        cores: Cores, slots: Any, batch: Batch, residuals: Any, g: Any, arrays: Any
    ) -> Any:
        return _reference.update(spec, cores, slots, batch, residuals, g, **arrays, **static)

    def native(
        platform: str, cores: Cores, slots: Any, batch: Batch, residuals: Any, g: Any, arrays: Any
    ) -> Any:
        module = _module()
        options = {"platform": platform, **arrays, **static}
        if isinstance(spec, DenseSpec):
            table, slot, applied, dweights = module.dense_update(
                spec, cores[0], slots[0], batch, residuals, g, **options
            )
            return (table,), (tuple(slot),), applied, dweights
        new, slots, applied, dweights = module.tt_update(
            spec, cores, slots, batch, residuals, g, **options
        )
        return tuple(new), tuple(map(tuple, slots)), applied, dweights

    return run(method, native, reference, cores, slots, batch, residuals, g, arrays)


def native_forward(
    platform: str, spec: Spec, cores: Cores, batch: Batch, save: bool, sentinel: Any
) -> Any:
    """`forward` on the native module of one platform."""
    module = _module()
    tt = not isinstance(spec, DenseSpec)
    op, table = (module.tt_forward, cores) if tt else (module.dense_forward, cores[0])
    out, residuals = op(spec, table, batch, save, sentinel, platform=platform)
    return out, tuple(residuals)


def _native_backward(
    platform: str,
    spec: Spec,
    cores: Cores,
    batch: Batch,
    residuals: Any,
    g: jax.Array,
    want_weights: bool,
) -> Any:
    module = _module()
    args = (batch, residuals, g, want_weights, None)
    if isinstance(spec, DenseSpec):
        dtable, dweights = module.dense_backward(spec, cores[0], *args, platform=platform)
        return (dtable,), dweights
    dcores, dweights = module.tt_backward(spec, cores, *args, platform=platform)
    return tuple(dcores), dweights


def _module() -> Any:
    module = native_module()
    assert module is not None  # `choose` lets no native method through without it
    return module


def run(method: str, native: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> Any:
    """``native(platform, *args)`` or ``reference(*args)``; the platform is that which the program is lowered for."""
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
    if symbolic or any(_is_float64(leaf.dtype) for leaf in leaves):
        platforms = tuple(p for p in platforms if p != "cuda")
    branches = {platform: partial(native, platform) for platform in platforms}
    default = reference if method == "auto" else None
    return lax.platform_dependent(*args, default=default, **branches)
