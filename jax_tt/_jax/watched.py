"""What a backward pass returns a cotangent for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Name = TypeVar("Name")


def watched(arrays: Mapping[Name, Any], reached: set[Name]) -> dict[Name, Any]:
    """Identity on arrays, or trees of them, by name.

    A backward pass adds to ``reached`` the name of each that has a cotangent other than a zero that JAX knows.
    """
    leaves, structure = jax.tree.flatten(dict(arrays))
    names = [name for name, tree in arrays.items() for _ in jax.tree.leaves(tree)]

    def note(k: int) -> None:
        reached.add(names[k])

    return jax.tree.unflatten(structure, _watched.bind(*leaves, note=note))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, note: Callable[[int], None]) -> Any:
    live = [k for k, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    passed = _watched.bind(*(tangents[k] for k in live), note=lambda k: note(live[k]))
    after = dict(zip(live, passed, strict=True))
    # The primals as they are: others know them by their identity.
    return list(primals), [after.get(k, tangent) for k, tangent in enumerate(tangents)]


def _transpose(cotangents: Sequence[Any], *_: Any, note: Callable[[int], None]) -> list[Any]:
    for k, cotangent in enumerate(cotangents):
        if not isinstance(cotangent, ad.Zero):
            note(k)
    return list(cotangents)


def _identity(*arrays: Any, note: Callable[[int], None]) -> list[Any]:
    del note
    return list(arrays)


_watched = Primitive("jax_tt_watched")
_watched.multiple_results = True
_watched.def_impl(_identity)
_watched.def_abstract_eval(_identity)
ad.primitive_jvps[_watched] = _jvp
ad.primitive_transposes[_watched] = _transpose
batching.primitive_batchers[_watched] = lambda arrays, axes, *, note: (
    _watched.bind(*arrays, note=note),
    axes,
)
mlir.register_lowering(_watched, lambda _, *arrays, note: arrays)
