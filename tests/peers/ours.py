"""A collection of jax_tt with the tables of `tests.peers.tables`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from tests.peers.tables import Batch, Tables, goal


class Ours:
    """A collection with its state.

    Attributes:
        collection: its features have the names `Tables.keys`.
        state: arrays by table and name.
        lookup: options of all calls.
    """

    def __init__(
        self, tables: Tables, values: list[np.ndarray], lookup: jax_tt.Lookup, optimizer: Any = None
    ) -> None:
        described = {
            f"t{k}": jax_tt.dense_table(
                *value.shape,
                param_dtype=value.dtype,
                optimizer=optimizer,
                stochastic_rounding=False,
            )
            for k, value in enumerate(values)
        }
        features = {
            key: jax_tt.Feature(f"t{table}", combiner=tables.combiner)
            for key, table in zip(tables.keys, tables.of_features, strict=True)
        }
        self.collection = jax_tt.Collection(described, features)
        self.lookup = lookup
        state = jax.jit(self.collection.init)(jax.random.key(0))
        given = {f"t{k}": {"embedding": jnp.asarray(value)} for k, value in enumerate(values)}
        self.state = self.collection.replaced(state, given)

    def rows(self, batch: Batch) -> list[np.ndarray]:
        """The results of all features."""
        rows = _forward(self.collection, self.lookup, self.state, self.keyed(batch))
        return self._without_padding(rows, batch)

    def step(self, batch: Batch) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Updates the tables; the results of all features and the gradient of the weights."""
        rows, self.state, gradient = _step(
            self.collection, self.lookup, self.state, self.keyed(batch)
        )
        if gradient is not None:
            gradient = np.asarray(gradient)[: len(batch.ids)]
        return self._without_padding(rows, batch), gradient

    def values(self) -> list[np.ndarray]:
        """The values of all tables."""
        return self.arrays("embedding")

    def arrays(self, name: str) -> list[np.ndarray]:
        """An array of every table, e.g. a slot."""
        return [
            np.asarray(self.collection.of(self.state, table)[name])
            for table in self.collection.tables
        ]

    def keyed(self, batch: Batch) -> jax_tt.KeyedBags:
        """With one capacity for all batches of these sizes, so that one program serves them."""
        return jax_tt.KeyedBags.from_offsets(
            list(self.collection.features),
            batch.ids,
            batch.offsets,
            batch.weights,
            batch_sizes=batch.sizes,
            capacity=batch.capacity,
        )

    def _without_padding(self, rows: Any, batch: Batch) -> list[np.ndarray]:
        """By feature; sequences end with rows of zeros for the capacity that is not used."""
        counts = zip(self.collection.features.items(), batch.lengths_of_features, strict=True)
        return [
            np.asarray(rows[name])[: count if feature.combiner is None else None]
            for (name, feature), count in counts
        ]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    collection: jax_tt.Collection, lookup: jax_tt.Lookup, state: Any, batch: jax_tt.KeyedBags
) -> Any:
    return jax_tt.lookup_features(collection, state, batch, lookup)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(
    collection: jax_tt.Collection, lookup: jax_tt.Lookup, state: Any, batch: jax_tt.KeyedBags
) -> Any:
    def loss(trained: Any, weights: Any) -> Any:
        arrays = collection.replaced(state, trained)
        bags = dataclasses.replace(batch, weights=weights)
        rows, _ = jax_tt.lookup_features(collection, arrays, bags, lookup)
        parts = [
            jnp.sum((rows[name].astype(jnp.float32) - goal(k)) ** 2) / 2
            for k, name in enumerate(collection.features)
        ]
        return sum(parts), rows

    arguments = (0,) if batch.weights is None else (0, 1)
    cotangents, rows = jax.grad(loss, arguments, has_aux=True)(
        collection.trained(state), batch.weights
    )
    state, _ = collection.overwritten(state, cotangents[0])
    return rows, state, cotangents[1] if len(cotangents) > 1 else None
