"""Training steps of layers whose table has 64-bit keys, and the same step of a layer with static rows.

All of them are one jitted, donated program, which takes the layer apart and puts it together only while it is traced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work

RULE = jax_tt.optimizers.SGD(LEARNING_RATE)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _inserted(table: jax_tt.tables.HashTable, state: Any, keys: Any) -> Any:
    return jax_tt.dynamic.insert(table, state, keys)[1]


def filled(table: jax_tt.tables.HashTable, load: float) -> tuple[dict[str, Any], np.ndarray]:
    """The state of a table after batches of new keys, and the keys that it holds with their slots."""
    rng = np.random.default_rng(0)
    state = jax.jit(table.init)(jax.random.key(0))
    keys = rng.integers(2**64, size=int(load * table.num_embeddings) // 64 * 64, dtype=np.uint64)
    for part in np.split(keys, 64):
        state = _inserted(table, state, jax_tt.dynamic.split_keys(part))
    return state, jax_tt.dynamic.keys_of(table, state)


def bags_of(ids: Any) -> jax_tt.Bags:
    """Bags on the device."""
    return jax.tree.map(jnp.asarray, jax_tt.Bags(ids))


class Steps:
    """The steps on one batch size, whose ids are the slots of keys or the keys themselves.

    Args:
        rows: the capacity, and the rows of the static table.
        features: columns.
        bags, bag_size: of a batch.
        load: of the table.
        calls: of a step with new keys, at most.
    """

    def __init__(
        self, rows: int, features: int, bags: int, bag_size: int, load: float, calls: int
    ) -> None:
        self.table = jax_tt.hash_table(rows, features, optimizer=RULE)
        self.state, held = filled(self.table, load)
        rng = np.random.default_rng(1)
        picked = [rng.integers(held.size, size=bags * bag_size) for _ in range(10)]
        shape = jax_tt.TTShape.suggest(rows, features, ranks=2)
        self.work = Work(shape, bags, bag_size, [held["slot"][one] for one in picked])
        self.keys = [held["key"][one] for one in picked]
        self.calls = calls

    def static(self) -> Call:
        """A table of static rows."""
        shape = self.work.shape
        layer = jax_tt.EmbedBag(
            shape.num_embeddings, shape.features, optimizer=RULE, rngs=nnx.Rngs(0)
        )
        return self._training(layer, self.work.batches, bags_of)

    def explicit(self) -> Call:
        """The batch is inserted before the loss, which looks up keys with their slots."""

        def before(layer: Any, batch: jax_tt.Bags) -> jax_tt.Bags:
            return jax_tt.dynamic.with_slots(batch, layer.insert(batch))

        return self._training(self._layer(), self.keys, _keyed, before)

    def inserting(self) -> Call:
        """The call of the layer inserts the batch, all of which is in the table."""
        return self._training(self._layer(), self.keys, _keyed)

    def half_new(self) -> Call:
        """The same with batches of which every other key is in no earlier one."""
        batches = []
        for number in range(self.calls):
            keys = self.keys[number % len(self.keys)].copy()
            new = keys[::2]
            new[:] = (number << 32) + np.arange(new.size)
            batches.append(keys)
        return self._training(self._layer(), batches, _keyed)

    def _layer(self) -> jax_tt.TableEmbedBag:
        layer = jax_tt.TableEmbedBag(self.table, rngs=nnx.Rngs(0))
        for name, value in self.state.items():
            getattr(layer, name)[...] = jnp.copy(value)
        return layer

    def _training(
        self,
        layer: Any,
        batches: list[np.ndarray],
        bags: Callable[[np.ndarray], jax_tt.Bags],
        before: Callable[[Any, jax_tt.Bags], jax_tt.Bags] = lambda layer, batch: batch,
    ) -> Call:
        gradient = jnp.asarray(self.work.gradient)
        optimizer = jax_tt.FusedOptimizer(layer, optax.sgd(LEARNING_RATE))
        described, state = nnx.split((layer, optimizer))
        on_device = [bags(x.reshape(self.work.bags, self.work.bag_size)) for x in batches]

        @partial(jax.jit, donate_argnums=0)
        def step(state: Any, batch: jax_tt.Bags) -> tuple[Any, jax.Array]:
            layer, optimizer = nnx.merge(described, state)
            batch = before(layer, batch)

            def loss(layer: Any) -> jax.Array:
                return jnp.vdot(layer(batch), gradient)

            value, gradients = jax_tt.value_and_grad(loss)(layer)
            optimizer.update(layer, gradients)
            return nnx.state((layer, optimizer)), value

        def call(i: int) -> object:
            nonlocal state
            state, value = step(state, on_device[i % len(on_device)])
            return jax.block_until_ready((value, state))

        return call


def _keyed(keys: np.ndarray) -> jax_tt.Bags:
    return bags_of(jax_tt.dynamic.split_keys(keys))
