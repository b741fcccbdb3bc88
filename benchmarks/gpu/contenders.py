"""Steps of each contender, as ``(step, state)``: ``step(state, ids) -> state``, ids ``[bags, bag_size]``."""

from typing import Any

import jax
import jax.numpy as jnp

import jax_tt
from benchmarks.gpu.timing import Step
from benchmarks.gpu.work import GpuWork
from benchmarks.work import LEARNING_RATE
from jax_tt import optimizers

RULE = optimizers.SGD(LEARNING_RATE)


def cores_of(work: GpuWork) -> tuple[jax.Array, ...]:
    return tuple(jax_tt.init_cores(jax.random.key(0), work.shape, "approx-normal"))


def tt_forward(work: GpuWork, method: str) -> tuple[Step, Any]:
    """Pooled rows, which are kept in the state so that the compiler cannot remove them."""
    n, cores = work.shape.num_embeddings, cores_of(work)
    start = jnp.zeros((work.bags, work.shape.features))

    def step(state: Any, ids: jax.Array) -> Any:
        cores, _ = state
        return cores, jax_tt.tt_embed_bag(cores, ids, num_embeddings=n, method=method)

    return step, (cores, start)


def tt_gradient(work: GpuWork, method: str) -> tuple[Step, Any]:
    """Forward and the gradients of the cores."""
    n, g, cores = work.shape.num_embeddings, work.gradient(), cores_of(work)

    def step(state: Any, ids: jax.Array) -> Any:
        cores, _ = state

        def loss(cores: Any) -> jax.Array:
            return jnp.vdot(jax_tt.tt_embed_bag(cores, ids, num_embeddings=n, method=method), g)

        return cores, jax.grad(loss)(cores)

    return step, (cores, jax.tree.map(jnp.zeros_like, cores))


def tt_fused(work: GpuWork, method: str) -> tuple[Step, Any]:
    """Forward, backward and SGD, fused."""
    n, g = work.shape.num_embeddings, work.gradient()

    def step(table: Any, ids: jax.Array) -> Any:
        def loss(table: Any) -> jax.Array:
            out = jax_tt.fused_tt_embed_bag(table, ids, RULE, num_embeddings=n, method=method)
            return jnp.vdot(out, g)

        return jax.grad(loss)(table)

    return step, jax_tt.init_fused_table(cores_of(work), RULE)


def _rows(work: GpuWork) -> jax.Array:
    return jnp.full((work.shape.num_embeddings, work.shape.features), 0.01, jnp.float32)


def dense_fused(work: GpuWork, method: str) -> tuple[Step, Any]:
    """A dense table of the same rows and columns: forward, backward and SGD, fused."""
    g = work.gradient()

    def step(table: Any, ids: jax.Array) -> Any:
        return jax.grad(lambda t: jnp.vdot(jax_tt.fused_embed_bag(t, ids, RULE, method=method), g))(
            table
        )

    return step, jax_tt.init_fused_table(_rows(work), RULE)


def flax_dense(work: GpuWork) -> tuple[Step, Any]:
    """The same with `nnx.Embed` and `optax.sgd`."""
    from benchmarks.contenders.flax_embed import dense_program

    step, state = dense_program(work.shape, work.gradient())
    return lambda state, ids: step(state, ids)[1], state
