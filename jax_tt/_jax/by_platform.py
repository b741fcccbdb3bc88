"""`by_platform`: a native op, or the reference on platforms that do not have it.

Unlike `jax.lax.platform_dependent`, it traces the reference only when a program is lowered for such a platform. That
halves the time to trace a program of many tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def by_platform(
    native: Mapping[str, Callable[..., Any]], reference: Callable[..., Any] | None, *args: Any
) -> Any:
    """``native[platform](*args)`` for the platform that the program is lowered for, or ``reference(*args)``.

    Args:
        native: functions by platform.
        reference: for other platforms, with results of the same types, or None if there are no others. It must not
            close over traced values, and has no derivatives.
        *args: trees of arrays.
    """
    if reference is None:
        return lax.platform_dependent(*args, **native)
    # Traced before the reference, so that the types of the results are known there.
    first = next(iter(native))
    results: list[Any] = []

    def traced(*args: Any) -> Any:
        result = native[first](*args)
        results.append(jax.tree.map(jax.typeof, result))
        return result

    def default(*args: Any) -> Any:
        if not results:  # in an eager call for this platform, which traces no other function
            return reference(*args)
        leaves, structure = jax.tree.flatten(args)
        types, result_structure = jax.tree.flatten(results[0])

        def flat(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(reference(*jax.tree.unflatten(structure, leaves)))

        found = _later.bind(*leaves, function=flat, types=tuple(types))
        return jax.tree.unflatten(result_structure, found)

    return lax.platform_dependent(*args, default=default, **{**native, first: traced})


# ``function(*args)``, whose results have these types; it is traced when it is lowered.
_later = Primitive("jax_tt_later")
_later.multiple_results = True
_later.def_impl(lambda *args, function, types: function(*args))
_later.def_abstract_eval(lambda *args, function, types: types)


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
    return _later.bind(*args, function=mapped, types=kinds), [0] * len(types)


mlir.register_lowering(_later, _lower)
batching.primitive_batchers[_later] = _batched
