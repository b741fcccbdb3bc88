"""Layers of many tables, and the ways in which NNX calls their steps and evaluations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_tt
from benchmarks.contenders.collections import Tables
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE

# A function of modules and a batch, compiled in one of these ways.
STEPS: dict[str, Callable[..., Callable[..., Any]]] = {
    "nnx.jit": lambda step, *modules: _bound(nnx.jit(step, donate_argnums=(0, 1)), *modules),
    "nnx.cached_partial": lambda step, *modules: nnx.cached_partial(
        nnx.jit(step, donate_argnums=(0, 1)), *modules
    ),
    "nnx.jit, graph=False": lambda step, *modules: _bound(
        nnx.jit(step, donate_argnums=(0, 1), graph=False), *modules
    ),
    "nnx.jit_partial": lambda step, *modules: nnx.jit_partial(
        step, *modules, donate_argnums=0, graph=False
    ),
}
EVALUATIONS: dict[str, Callable[..., Callable[..., Any]]] = {
    "nnx.jit": lambda function, *modules: _bound(nnx.jit(function), *modules),
    "nnx.jit, graph=False": lambda function, *modules: _bound(
        nnx.jit(function, graph=False), *modules
    ),
}


class Embeds(nnx.Module):
    """A plain ``nnx.Embed`` for each table."""

    def __init__(self, work: Tables) -> None:
        rngs = nnx.Rngs(0)
        self.tables = nnx.List([nnx.Embed(n, work.features, rngs=rngs) for n in work.sizes])

    def concatenated(self, batch: dict[str, jax.Array]) -> jax.Array:
        rows = [table(ids) for table, ids in zip(self.tables, batch.values(), strict=True)]
        return jnp.concatenate([own.sum(axis=1) for own in rows], axis=1)


def collection(work: Tables, stack: bool) -> jax_tt.EmbedCollection:
    """A layer of the tables."""
    tables = {f"t{k}": work.table(rows) for k, rows in enumerate(work.sizes)}
    features = {name: jax_tt.Feature(name) for name in tables}
    return jax_tt.EmbedCollection(tables, features, stack=stack, rngs=nnx.Rngs(0))


def steps(work: Tables, make: Callable[[], Any]) -> dict[str, Call]:
    """Training steps by the way in which they are called, each with a layer of its own."""
    gradient = jnp.asarray(work.gradient)

    def step(model: Any, opt: Any, batch: Any) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            return jnp.vdot(model.concatenated(batch), gradient)

        value, grads = jax_tt.value_and_grad(loss)(model)
        opt.update(model, grads)
        return value

    found = {}
    for way, compiled in STEPS.items():
        model = make()
        opt = jax_tt.FusedOptimizer(model, optax.sgd(LEARNING_RATE))
        found[way] = _on_batches(work, compiled(step, model, opt))
    return found


def evaluations(work: Tables, make: Callable[[], Any]) -> dict[str, Call]:
    """Evaluations of a layer by the way in which they are called."""

    def evaluate(model: Any, batch: Any) -> jax.Array:
        return model.concatenated(batch)

    model = make()
    model.eval()
    return {
        way: _on_batches(work, compiled(evaluate, model)) for way, compiled in EVALUATIONS.items()
    }


def _bound(function: Callable[..., Any], *modules: Any) -> Callable[..., Any]:
    return lambda batch: function(*modules, batch)


def _on_batches(work: Tables, function: Callable[..., Any]) -> Call:
    batches = [{f"t{k}": jnp.asarray(x) for k, x in enumerate(batch)} for batch in work.batches]
    return lambda i: jax.block_until_ready(function(batches[i % len(batches)]))
