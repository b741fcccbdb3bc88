"""flax: `nnx.Embed` with `optax.sgd`, jitted, its parameters donated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work


def dense_step(work: Work) -> Call:
    """Forward, dense gradient and SGD on the whole table."""
    model = nnx.Embed(
        work.shape.num_embeddings,
        work.shape.features,
        embedding_init=nnx.initializers.constant(0.01),
        rngs=nnx.Rngs(0),
    )
    graph, params = nnx.split(model)
    del model  # its table is donated below
    tx = optax.sgd(LEARNING_RATE)
    slots = tx.init(params)
    gradient = jnp.asarray(work.gradient)
    shape = (work.bags, work.bag_size)
    ids = [jnp.asarray(batch.reshape(shape), np.int32) for batch in work.batches]

    def loss(params, ids):
        return jnp.vdot(nnx.merge(graph, params)(ids).sum(axis=1), gradient)

    def step(params, slots, ids):
        value, gradients = jax.value_and_grad(loss)(params, ids)
        updates, slots = tx.update(gradients, slots, params)
        return value, optax.apply_updates(params, updates), slots

    step = jax.jit(step, donate_argnums=(0, 1))

    def call(i: int) -> object:
        nonlocal params, slots
        value, params, slots = step(params, slots, ids[i % len(ids)])
        return jax.block_until_ready((value, params))

    return call
