"""A click model of two ids, and its training step.

The log-odds of a click are bias + a + b + <u, v>, where [a, u] is the row of the user and [b, v] that of the item.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_tt

BIAS_LEARNING_RATE = 0.1


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    collection: jax_tt.Collection, state: Any, bias: jax.Array, ids: Any, labels: jax.Array
) -> tuple[Any, jax.Array, jax.Array, dict[str, Any]]:
    """One step, which inserts new keys into hash tables first.

    Returns:
        The state and the bias after the step, the log-odds [B] before it, and the counts of the insertions by table.
    """
    state, counts = _with_keys(collection, state, ids)

    def loss(trained: Any, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        arrays = collection.replaced(state, trained)
        rows, _ = jax_tt.lookup_features(collection, arrays, ids)
        logits = log_odds(bias, rows)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), logits

    trained = collection.trained(state)
    (of_tables, of_bias), logits = jax.grad(loss, argnums=(0, 1), has_aux=True)(trained, bias)
    state, _ = collection.overwritten(state, of_tables)
    return state, bias - BIAS_LEARNING_RATE * of_bias, logits, counts


def log_odds(bias: jax.Array, rows: Mapping[str, jax.Array]) -> jax.Array:
    """Of rows [B, D] by feature; [B]."""
    user, item = rows["user"], rows["item"]
    return bias + user[:, 0] + item[:, 0] + jnp.sum(user[:, 1:] * item[:, 1:], axis=1)


def _with_keys(
    collection: jax_tt.Collection, state: Any, ids: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    state, counts = dict(state), {}
    for name, table in collection.tables.items():
        if isinstance(table, jax_tt.tables.HashTable):
            inserted, state[name] = jax_tt.dynamic.insert(table, state[name], ids[name])
            counts[name] = inserted.counts
    return state, counts
