"""How far a traced step walks through the package: files, changes of folder, depth of calls, and time.

    python -m scripts.walk

prints a row for each of a few steps. Calls are those of Python functions of the package that one tracing enters, after
another tracing has filled its caches; a change of room is a call from one folder of `scripts.layers` to another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from scripts.layers import LAYERS, PACKAGE

FOLDERS = {folder for layer in LAYERS for folder in layer}


class Walk(NamedTuple):
    calls: int
    files: int
    rooms: int
    levels: int


def milliseconds(step: Callable[..., Any], *args: Any, repeats: int = 5) -> float:
    """The time to trace a jitted function, with nothing in JAX's caches."""
    times = []
    for _ in range(repeats):
        jax.clear_caches()
        began = time.perf_counter()
        step.trace(*args)
        times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def walk(step: Callable[..., Any], *args: Any) -> Walk:
    """The walk of tracing a jitted function."""
    step.trace(*args)
    entered: list[str] = []
    stack: list[str] = []
    rooms = levels = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal rooms, levels
        file = frame.f_code.co_filename
        if not file.startswith(f"{PACKAGE}/"):
            return
        if event == "call":
            if stack and _room(stack[-1]) != _room(file):
                rooms += 1
            entered.append(file)
            stack.append(file)
            levels = max(levels, len(stack))
        elif event == "return":
            stack.pop()

    jax.clear_caches()
    sys.setprofile(profile)
    try:
        step.trace(*args)
    finally:
        sys.setprofile(None)
    return Walk(len(entered), len(set(entered)), rooms, levels)


def _room(file: str) -> str:
    parts = Path(file).relative_to(PACKAGE).parts[:-1]
    return next(name for k in range(len(parts), -1, -1) if (name := ".".join(parts[:k])) in FOLDERS)


def steps() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Jitted training steps and their arguments, by name."""
    rngs, rule = nnx.Rngs(0), jax_tt.optimizers.Adagrad(learning_rate=0.05)
    ids = np.zeros((16, 2), np.int32)
    bag = jax_tt.EmbedBag(100, 8, optimizer=rule, rngs=rngs)
    tables = {
        "user": jax_tt.dense_table(100, 8, optimizer=rule),
        "item": jax_tt.tt_table(1000, 8, tt_ranks=4, optimizer=rule),
        "ad": jax_tt.dense_table(50, 8, optimizer=rule),
    }
    features = {name: jax_tt.Feature(name) for name in tables}
    collection = jax_tt.EmbedCollection(tables, features, rngs=rngs)
    keyed = jax_tt.TableEmbedBag(jax_tt.hash_table(64, 8, optimizer=rule), rngs=rngs)
    return {
        "EmbedBag": _fused_step(bag, ids),
        "collection of three": _fused_step(collection, dict.fromkeys(features, ids)),
        "inserting hash table": _fused_step(keyed, keyed.host_batch(ids.astype(np.int64))),
        "nnx.Embed": _plain_step(nnx.Embed(100, 8, rngs=rngs), ids),
    }


def _fused_step(model: Any, ids: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, ids: Any) -> Any:
        loss, grads = jax_tt.value_and_grad(_loss)(model, ids)
        optimizer.update(model, grads)
        return loss

    return step, (model, jax_tt.FusedOptimizer(model, optax.sgd(0.05)), ids)


def _plain_step(model: Any, ids: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, ids: Any) -> Any:
        loss, grads = nnx.value_and_grad(_loss)(model, ids)
        optimizer.update(model, grads)
        return loss

    return step, (model, nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param), ids)


def _loss(model: Any, ids: Any) -> jax.Array:
    return sum(jnp.sum(rows**2) for rows in jax.tree.leaves(model(ids)))


def main() -> None:
    print(f"{'step':24}{'calls':>8}{'files':>8}{'rooms':>8}{'levels':>8}{'ms':>8}")
    for name, (step, args) in steps().items():
        numbers = "".join(f"{number:8}" for number in walk(step, *args))
        print(f"{name:24}{numbers}{milliseconds(step, *args):8.1f}")


if __name__ == "__main__":
    main()
