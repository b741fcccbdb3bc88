"""The compiled functions of a model, and the values that they begin with."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_tt
from examples.dlrm.batch import Batch, ClickData
from examples.dlrm.config import Config
from examples.dlrm.create import ClickModel, create
from examples.dlrm.devices import divided, mesh_of, on_all
from examples.dlrm.embeddings import CollectedTables


class Learner:
    """The compiled functions of one model; its values travel as a list of arrays.

    A list reaches a compiled function sooner than an `nnx.State`, whose variables are taken apart in
    Python: a model with row caches has a hundred.

    Args:
      graphdef: structure of the pair (model, optimizer), from `nnx.split`.
      state: the values that belong to it; only its structure is used.
      mesh: the devices that batches are divided over, or None.
    """

    def __init__(self, graphdef: nnx.GraphDef, state: nnx.State, mesh: Mesh | None = None):
        self._graphdef = graphdef
        self._mesh = mesh
        self._structure = jax.tree.structure(state)
        # Donated: the old tables are overwritten where they lie.
        self._compiled = jax.jit(self._step, donate_argnums=0)
        # Every process computes the scores.
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self.predict = jax.jit(self._predict, out_shardings=everywhere)

    def step(self, values: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], jax.Array]:
        """The values after one step, and the loss before it."""
        return self._compiled(values, divided(batch, self._mesh))

    def state(self, values: list[jax.Array]) -> nnx.State:
        """The values as a state."""
        return jax.tree.unflatten(self._structure, values)

    def merge(self, values: list[jax.Array]) -> tuple[ClickModel, nnx.Optimizer]:
        """The model and its optimizer with these values."""
        return nnx.merge(self._graphdef, self.state(values))

    def _step(self, values: list[jax.Array], batch: Batch) -> tuple[list[jax.Array], jax.Array]:
        model, optimizer = self.merge(values)
        dense, ids, label = map(jnp.asarray, batch)

        def loss_of(model: ClickModel) -> jax.Array:
            return jnp.mean(optax.sigmoid_binary_cross_entropy(model(dense, ids), label))

        loss, grads = jax_tt.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return jax.tree.leaves(nnx.state((model, optimizer))), loss

    def _predict(self, values: list[jax.Array], batch: Batch) -> jax.Array:
        """Log-odds of a click [B]."""
        model, _ = self.merge(values)
        model.eval()
        return model(jnp.asarray(batch.dense), jnp.asarray(batch.ids))


def start(config: Config, variant: str, data: ClickData) -> tuple[Learner, list[jax.Array]]:
    """A new model, whose frozen caches hold the rows that are frequent at the start of the log."""
    model, optimizer = create(config, variant, data.table_sizes)
    if isinstance(model.tables, CollectedTables) and model.tables.frozen_caches:
        sample = itertools.islice(data.stream(data.start), config.cache_sample)
        model.tables.fill_caches(np.concatenate([batch.ids for batch, _ in sample]))
    graphdef, state = nnx.split((model, optimizer))
    mesh = mesh_of(config)
    return Learner(graphdef, state, mesh), on_all(jax.tree.leaves(state), mesh)
