"""A dense table in plain JAX, updated in place: what a JAX user writes to avoid a dense gradient.

The rows of the batch are gathered, the loss is differentiated with respect to them, and the donated table is updated
with `.at[ids].add`. Its step touches only the rows of the batch, like that of a fused table. It does not return the
loss: the gradient of the benchmarks' loss does not depend on the rows, as that of a model does, and a program that
reads them for the loss alone would copy the table.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work

EPS = 1e-10
Step = Callable[[Any, jax.Array], Any]


def sgd_program(work: Work) -> tuple[Step, jax.Array]:
    """The step ``(table, ids [nnz]) -> table``, not yet jitted, and the table it starts from."""

    def step(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table.at[ids].add(-LEARNING_RATE * _row_gradients(work, table, ids))

    return step, _table(work)


def rowwise_adagrad_program(work: Work) -> tuple[Step, tuple[jax.Array, jax.Array]]:
    """As `sgd_program`, for a state of the table and one sum of squares per row.

    Adagrad needs the whole gradient of a row before it squares it, so duplicate ids are summed first.
    """

    def step(state: Any, ids: jax.Array) -> Any:
        table, sums = state
        grads = _row_gradients(work, table, ids)
        # Unused places of the fixed size hold an id beyond the table, which "drop" leaves out.
        unique, inverse = jnp.unique(
            ids, size=ids.size, fill_value=table.shape[0], return_inverse=True
        )
        grads = jax.ops.segment_sum(grads, inverse, num_segments=ids.size)
        sums = sums.at[unique].add(jnp.mean(grads**2, axis=1), mode="drop")
        scale = jnp.sqrt(sums.at[unique].get(mode="fill", fill_value=1)) + EPS
        updates = -LEARNING_RATE * grads / scale[:, None]
        return table.at[unique].add(updates, mode="drop"), sums

    table = _table(work)
    return step, (table, jnp.zeros(table.shape[0], table.dtype))


def sgd_step(work: Work) -> Call:
    """`sgd_program`, jitted with the table donated."""
    return _training(work, *sgd_program(work))


def rowwise_adagrad_step(work: Work) -> Call:
    """`rowwise_adagrad_program`, jitted with table and sums donated."""
    return _training(work, *rowwise_adagrad_program(work))


def _table(work: Work) -> jax.Array:
    return jnp.full((work.shape.num_embeddings, work.shape.features), 0.01, jnp.float32)


def _row_gradients(work: Work, table: jax.Array, ids: jax.Array) -> jax.Array:
    gradient = jnp.asarray(work.gradient)

    def loss(rows: jax.Array) -> jax.Array:
        return jnp.vdot(rows.reshape(work.bags, work.bag_size, -1).sum(axis=1), gradient)

    return jax.grad(loss)(table[ids])


def _training(work: Work, step: Step, state: Any) -> Call:
    ids = [jnp.asarray(batch, np.int32) for batch in work.batches]
    step = jax.jit(step, donate_argnums=0)

    def call(i: int) -> object:
        nonlocal state
        state = step(state, ids[i % len(ids)])
        return jax.block_until_ready(state)

    return call
