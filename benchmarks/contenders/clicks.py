"""Whole training steps of DLRM with dense tables under row-wise Adagrad: jax_tt's collection, and plain JAX by hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from benchmarks.ids import zipf_ids
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE
from examples.dlrm.batch import NUM_DENSE, Batch
from examples.dlrm.embeddings import CollectedTables, Place
from examples.dlrm.learner import Learner
from examples.dlrm.model import DLRM
from jax_tt import optimizers

MLP_LEARNING_RATE = 0.01
EPS = 1e-10


@dataclasses.dataclass(frozen=True)
class Clicks:
    """A click log with one Zipf id per table, and the layers of the model that learns it."""

    sizes: tuple[int, ...]
    features: int
    samples: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @functools.cached_property
    def batches(self) -> list[Batch]:
        rng = np.random.default_rng(0)
        return [self._batch(rng) for _ in range(8)]

    def _batch(self, rng: np.random.Generator) -> Batch:
        columns = [zipf_ids(rng, rows, self.samples).astype(np.int32) for rows in self.sizes]
        dense = rng.standard_normal((self.samples, NUM_DENSE), np.float32)
        label = (rng.random(self.samples) < 0.25).astype(np.float32)
        return Batch(dense, np.stack(columns, axis=1), label)


def together(work: Clicks) -> Call:
    """The step of the DLRM example: all tables in one collection, updated in the backward pass."""
    rule = optimizers.RowWiseAdagrad(LEARNING_RATE)
    places = [Place(f"table_{t}", 0, 1) for t in range(len(work.sizes))]
    tables = {
        place.table: jax_tt.dense_table(rows, work.features, optimizer=rule)
        for place, rows in zip(places, work.sizes, strict=True)
    }
    rngs = nnx.Rngs(0)
    collected = CollectedTables(tables, places, work.features, frozen_caches=True, rngs=rngs)
    model = _model(work, collected, rngs)
    optimizer = jax_tt.FusedOptimizer(model, optax.sgd(MLP_LEARNING_RATE))
    graph, state = nnx.split((model, optimizer))
    learner, values = Learner(graph, state), jax.tree.leaves(state)
    batches = [jax.device_put(batch) for batch in work.batches]

    def call(i: int) -> object:
        nonlocal values
        values, loss = learner.step(values, batches[i % len(batches)])
        return jax.block_until_ready((values, loss))

    return call


def by_hand(work: Clicks) -> Call:
    """The same model, differentiated with respect to the rows of the batch, and tables updated in place with JAX.

    The gradients of equal ids are summed by table if that has about as many rows as the batch, and otherwise after
    `jnp.unique`; each is the faster one there.
    """
    model = _model(work, _Given(), nnx.Rngs(0))
    graph, state = nnx.split(
        (model, nnx.Optimizer(model, optax.sgd(MLP_LEARNING_RATE), wrt=nnx.Param))
    )
    structure = jax.tree.structure(state)
    values = jax.tree.leaves(state)
    tables = [jnp.full((rows, work.features), 0.01, jnp.float32) for rows in work.sizes]
    sums = [jnp.zeros(rows, jnp.float32) for rows in work.sizes]
    batches = [jax.device_put(batch) for batch in work.batches]

    def step(state: Any, batch: Batch) -> Any:
        values, tables, sums = state
        model, optimizer = nnx.merge(graph, jax.tree.unflatten(structure, values))
        columns = list(jnp.asarray(batch.ids).T)
        rows = jnp.stack([table[ids] for table, ids in zip(tables, columns, strict=True)], axis=1)

        def loss_of(model: DLRM, rows: jax.Array) -> jax.Array:
            logits = model(jnp.asarray(batch.dense), rows)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.asarray(batch.label)))

        loss, (grads, of_rows) = nnx.value_and_grad(loss_of, argnums=(0, 1))(model, rows)
        optimizer.update(model, grads)
        # Tables are changed after everything that reads them, or XLA copies them.
        tables, columns, of_rows = jax.lax.optimization_barrier((tables, columns, of_rows))
        stepped = [
            _rowwise_adagrad(table, own, ids, of_rows[:, t])
            for t, (table, own, ids) in enumerate(zip(tables, sums, columns, strict=True))
        ]
        values = jax.tree.leaves(nnx.state((model, optimizer)))
        return (values, *(list(new) for new in zip(*stepped, strict=True))), loss

    jitted = jax.jit(step, donate_argnums=0)
    state = values, tables, sums

    def call(i: int) -> object:
        nonlocal state
        state, loss = jitted(state, batches[i % len(batches)])
        return jax.block_until_ready((state, loss))

    return call


class _Given(nnx.Module):
    """Takes the rows themselves instead of ids."""

    def __call__(self, rows: jax.Array) -> jax.Array:
        return rows


def _model(work: Clicks, tables: nnx.Module, rngs: nnx.Rngs) -> DLRM:
    return DLRM(tables, len(work.sizes), work.features, work.bottom, work.top, rngs=rngs)


def _rowwise_adagrad(
    table: jax.Array, sums: jax.Array, ids: jax.Array, gradients: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows = len(table)
    if rows <= 2 * len(ids):
        total = jax.ops.segment_sum(gradients, ids, num_segments=rows)
        sums = sums + jnp.mean(total**2, axis=1)
        # Rows that the batch does not have get no update, since their gradient is zero.
        return table - LEARNING_RATE * total / (jnp.sqrt(sums) + EPS)[:, None], sums
    # Unused places of the fixed size hold an id beyond the table, which "drop" leaves out.
    unique, inverse = jnp.unique(ids, size=ids.size, fill_value=rows, return_inverse=True)
    total = jax.ops.segment_sum(gradients, inverse, num_segments=ids.size)
    sums = sums.at[unique].add(jnp.mean(total**2, axis=1), mode="drop")
    scale = jnp.sqrt(sums.at[unique].get(mode="fill", fill_value=1)) + EPS
    return table.at[unique].add(-LEARNING_RATE * total / scale[:, None], mode="drop"), sums
