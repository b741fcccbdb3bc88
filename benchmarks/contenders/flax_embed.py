"""flax: `nnx.Embed` with `optax.sgd`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work


def dense_program(
    shape: jax_tt.TTShape, gradient: jax.Array
) -> tuple[Callable[[Any, jax.Array], tuple[jax.Array, Any]], Any]:
    """Forward, dense gradient and SGD on a whole table of ``shape``'s rows and columns.

    Returns:
        The step ``(state, ids [bags, bag_size]) -> (loss, state)``, and the state it starts from.
    """
    model = nnx.Embed(
        shape.num_embeddings,
        shape.features,
        embedding_init=nnx.initializers.constant(0.01),
        rngs=nnx.Rngs(0),
    )
    graph, params = nnx.split(model)
    tx = optax.sgd(LEARNING_RATE)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.vdot(nnx.merge(graph, params)(ids).sum(axis=1), gradient)

    def step(state: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        params, slots = state
        value, gradients = jax.value_and_grad(loss)(params, ids)
        updates, slots = tx.update(gradients, slots, params)
        return value, (optax.apply_updates(params, updates), slots)

    return step, (params, tx.init(params))


def dense_step(work: Work) -> Call:
    """`dense_program` jitted, its parameters donated."""
    step, state = dense_program(work.shape, jnp.asarray(work.gradient))
    shape = (work.bags, work.bag_size)
    ids = [jnp.asarray(batch.reshape(shape), np.int32) for batch in work.batches]
    step = jax.jit(step, donate_argnums=0)

    def call(i: int) -> object:
        nonlocal state
        value, state = step(state, ids[i % len(ids)])
        return jax.block_until_ready((value, state))

    return call
