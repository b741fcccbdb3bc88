"""Counts the functions of the package that eager fused forward passes go through, and how deep they nest."""

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


def eager_collection_forward() -> Calls:
    """Those of a collection of a dense, a tensor-train and a quantized table."""
    rule = jax_tt.optimizers.Adagrad(0.05)
    tables = {
        "dense": jax_tt.dense_table(1000, 16, optimizer=rule),
        "train": jax_tt.tt_table(1000, 16, tt_ranks=4, optimizer=rule),
        "quantized": jax_tt.quantized_table(1000, 16, 8),
    }
    features = {name: jax_tt.Feature(name) for name in tables}
    layer = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
    batch = dict.fromkeys(tables, jnp.array([[1, 2], [3, 999]]))
    layer(batch)
    return count(lambda: layer(batch))


def main() -> None:
    counted = {"TTEmbedBag": eager_fused_forward(), "collection": eager_collection_forward()}
    for which, calls in counted.items():
        for name, times in calls.functions.items():
            print(f"{times:4d} {name}")
        total = sum(calls.functions.values())
        print(f"{which}: {len(calls.functions)} functions, {total} calls, {calls.depth} deep")


if __name__ == "__main__":
    main()
