"""Sees whether the compiled steps of a page copy arrays: compares addresses of buffers before and after every call."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from flax import nnx

# Shape, type and device of arrays. What comes to a device that had none of the kind is placed there, not copied.
Kind = tuple[tuple[int, ...], str, jax.Device]


@contextlib.contextmanager
def watching(file: str) -> Iterator[list[str]]:
    """Yields the names of the functions of ``file`` that are jitted and called meanwhile.

    Raises:
        AssertionError: a call returned an array of the shape and type of an array with two dimensions or more that it
            was given, an NNX module's included, in other memory.
    """
    called: list[str] = []
    plain = jax.jit
    with (
        mock.patch.object(jax, "jit", _watched(plain, plain, file, called)),
        mock.patch.object(nnx, "jit", _watched(nnx.jit, plain, file, called)),
    ):
        yield called


def _watched(
    jit: Callable[..., Any], plain: Callable[..., Any], file: str, called: list[str]
) -> Callable[..., Any]:
    @functools.wraps(jit)
    def replaced(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(replaced, **options)
        with mock.patch.object(jax, "jit", plain):  # nnx.jit calls it
            compiled = jit(function, **options)
        code = getattr(inspect.unwrap(function), "__code__", None)
        # Gradients of a loss are arrays of their own, and what a function of the page jits is no step.
        if code is None or code.co_filename != file or code.co_qualname.startswith("loss"):
            return compiled
        if "<locals>" in code.co_qualname:
            return compiled

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(function.__name__)
            before = _buffers((args, kwargs))
            results = compiled(*args, **kwargs)
            # Modules among the arguments have the arrays after the call.
            after = _buffers((results, [arg for arg in args if isinstance(arg, nnx.Pytree)]))
            for kind, places in after.items():
                copies = places - before.get(kind, places)
                where = f"{file}:{code.co_firstlineno}: {function.__name__}"
                assert not copies, f"{where} copies {len(copies)} arrays {kind[1]}{list(kind[0])}"
            return results

        return call

    return replaced


def _buffers(tree: Any) -> dict[Kind, set[int]]:
    """The addresses of arrays with two dimensions or more."""
    found: dict[Kind, set[int]] = {}
    leaves = jax.tree.leaves(tree, is_leaf=lambda value: isinstance(value, nnx.Pytree))
    arrays = [
        array
        for leaf in leaves
        for array in jax.tree.leaves(nnx.state(leaf) if isinstance(leaf, nnx.Pytree) else leaf)
    ]
    for array in arrays:
        if not isinstance(array, jax.Array) or array.ndim < 2 or array.is_deleted():
            continue
        for shard in array.addressable_shards:
            places = found.setdefault((array.shape, str(array.dtype), shard.device), set())
            places.add(shard.data.unsafe_buffer_pointer())
    return found
