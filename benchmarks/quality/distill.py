"""Finetunes small tables such that their scores are those of trained ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.retrieval.data import Interactions

Params = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Small:
    """A small table.

    Attributes:
        rows: `(params, constants, ids [n]) -> [n, features]`.
        params: float32 arrays that are trained.
        constants: arrays that are not, such as codes.
        stored: rounds params to the types in which they are stored.
        nbytes: of everything that is stored.
        detail: what it is, in words.
    """

    rows: Callable[[Mapping[str, Any], Mapping[str, Any], jax.Array], jax.Array]
    params: Params
    constants: dict[str, jax.Array]
    stored: Callable[[Params], Params]
    nbytes: int
    detail: str

    def dense(self, params: Params | None = None) -> np.ndarray:
        """All rows, of the stored params."""
        stored = self.stored(self.params if params is None else params)
        found = jax.jit(self.rows)(stored, self.constants, jnp.arange(self.num_rows))
        return np.asarray(found)

    @property
    def num_rows(self) -> int:
        """Ids of the table."""
        return int(self.constants["ids"].shape[0])


def distill(
    tables: tuple[Small, Small],
    teacher: tuple[np.ndarray, np.ndarray],
    data: Interactions,
    *,
    learning_rate: float,
    epochs: int,
    batch_size: int = 2048,
    negatives: int = 256,
    seed: int = 0,
) -> tuple[Params, Params]:
    """The params of tables of users and items after training on the scores of a teacher.

    Each step takes users of train pairs. The teacher's scores of the pair's item and of random items, which the batch
    shares, are turned into probabilities by softmax; the loss is the cross entropy of those of the small tables.
    """
    size = min(batch_size, len(data.train_users))
    steps = len(data.train_users) // size
    optimizer = optax.adam(optax.linear_schedule(learning_rate, 0.0, epochs * steps))
    params = tuple(table.params for table in tables)
    constants = tuple(table.constants for table in tables)
    known = tuple(jnp.asarray(rows) for rows in teacher)
    pairs = jnp.stack([jnp.asarray(data.train_users), jnp.asarray(data.train_items)])
    scores = partial(_log_probabilities, tuple(table.rows for table in tables))

    @partial(jax.jit, donate_argnums=(0, 1))
    def epoch(params: Any, state: Any, constants: Any, known: Any, pairs: Any, key: Any) -> Any:
        pairs = jax.random.permutation(key, pairs, axis=1)

        def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            params, state = carry
            users, items = jax.lax.dynamic_slice_in_dim(pairs, i * size, size, axis=1)
            others = jax.random.randint(jax.random.fold_in(key, i), (negatives,), 0, data.num_items)
            wanted = jnp.exp(
                _of_rows(known[0][users], known[1][items], known[1][others], items, others)
            )

            def loss(params: Any) -> jax.Array:
                found = scores(params, constants, users, items, others)
                return -jnp.mean(jnp.sum(jnp.where(wanted > 0, wanted * found, 0.0), axis=1))

            updates, state = optimizer.update(jax.grad(loss)(params), state)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, steps, step, (params, state))

    params = jax.tree.map(jnp.array, params)  # the caller's are not donated
    state = optimizer.init(params)
    for number in range(epochs):
        key = jax.random.fold_in(jax.random.key(seed), number)
        params, state = epoch(params, state, constants, known, pairs, key)
    return params


def _log_probabilities(
    rows: Any, params: Any, constants: Any, users: jax.Array, items: jax.Array, others: jax.Array
) -> jax.Array:
    user = rows[0](params[0], constants[0], users)
    item = rows[1](params[1], constants[1], jnp.concatenate([items, others]))
    return _of_rows(user, item[: len(items)], item[len(items) :], items, others)


def _of_rows(
    user: jax.Array, own: jax.Array, other: jax.Array, items: jax.Array, others: jax.Array
) -> jax.Array:
    """Log probabilities [B, 1 + n] of the pair's item and of the others; an item is not counted twice."""
    repeated = items[:, None] == others
    scores = jnp.concatenate(
        [jnp.sum(user * own, axis=1, keepdims=True), jnp.where(repeated, -1e9, user @ other.T)],
        axis=1,
    )
    return jax.nn.log_softmax(scores, axis=1)
