"""Counts the functions of the package that an eager fused forward pass goes through, and how deep they nest."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

import jax_tt

_EXPRESSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>"}
PACKAGE = str(Path(jax_tt.__file__).parent)


class Calls(NamedTuple):
    """Calls by function, and the most of them that were open at once."""

    functions: Counter[str]
    depth: int


def count(function: Callable[[], Any]) -> Calls:
    """What ``function`` calls of the package."""
    functions: Counter[str] = Counter()
    open_now = most = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal open_now, most
        code = frame.f_code
        # Comprehensions and generator expressions have frames, but nobody reads them as functions.
        if not code.co_filename.startswith(PACKAGE) or code.co_name in _EXPRESSIONS:
            return
        if event == "call":
            functions[f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"] += 1
            open_now += 1
            most = max(most, open_now)
        elif event == "return":
            open_now -= 1

    gc.disable()  # a collection would call finalizers
    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return Calls(functions, most)


def eager_fused_forward() -> Calls:
    """Those of a fused `TTEmbedBag`, outside of ``jit``, after a first call."""
    rule = jax_tt.optimizers.Adagrad(0.05)
    layer = jax_tt.TTEmbedBag(1000, 16, tt_ranks=4, optimizer=rule, rngs=nnx.Rngs(0))
    ids = jnp.array([[1, 2], [3, 999]])
    layer(ids)
    return count(lambda: layer(ids))


def main() -> None:
    calls = eager_fused_forward()
    for name, times in calls.functions.items():
        print(f"{times:4d} {name}")
    total = sum(calls.functions.values())
    print(f"{len(calls.functions)} functions, {total} calls, {calls.depth} deep")


if __name__ == "__main__":
    main()
