"""Matrix factorisation with any kind of table: a score is the inner product of a user's and an item's row."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from examples.retrieval.settings import Variant
from examples.retrieval.sizes import split_ratio
from examples.retrieval.tables import arrays, make_table


class MatrixFactorization(nnx.Module):
    """Two tables of the same width.

    Args:
        num_users, num_items, features: sizes; rows are vectors of `features` numbers.
        variant: kind of table.
        init_std: standard deviation of the initial table entries.
        learning_rate: number or schedule of the fused Adam; the other variants leave it to optax.
        tt_ranks: rank(s) of TT tables without a ratio.
        ratio: float32 bytes of dense tables over bytes of the compressed ones, at least.
        order: of the ids of TT tables: `(ids, shape) -> IdOrder or None`, `ids` being "users" or "items".
        start: rows of "users" and of "items" to start from, or None for random ones.
        dtype: storage type of compressed tables, see `tables.make_table`.
    """

    def __init__(
        self,
        num_users: int,
        num_items: int,
        features: int,
        variant: Variant,
        *,
        init_std: float,
        learning_rate: Any,
        tt_ranks: int | tuple[int, ...],
        ratio: float | None = None,
        order: Callable[[str, jax_tt.TTShape], jax_tt.order.IdOrder | None] = lambda ids, shape: (
            None
        ),
        start: Mapping[str, np.ndarray | None] = MappingProxyType({"users": None, "items": None}),
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        sizes = {"users": num_users, "items": num_items}
        split = split_ratio(variant.table, sizes.values(), features, ratio)
        ratios = dict(zip(sizes, split, strict=True))

        def table(ids: str) -> Any:
            return make_table(
                variant.table,
                sizes[ids],
                features,
                std=init_std,
                optimizer=jax_tt.optimizers.Adam(learning_rate) if variant.fused else None,
                ratio=ratios[ids],
                tt_ranks=tt_ranks,
                order=lambda shape: order(ids, shape),
                start=start[ids],
                dtype=dtype,
                rngs=rngs,
            )

        self.users, self.items = table("users"), table("items")

    def user_rows(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        return self.users(ids)

    def item_rows(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]. A fused table can be looked up once a step: give all ids of a step in one call."""
        return self.items(ids)


def make_optimizer(model: MatrixFactorization, learning_rate: Any) -> jax_tt.FusedOptimizer:
    """Adam for the parameters that optax updates; fused tables are overwritten by their new values."""
    return jax_tt.FusedOptimizer(model, optax.adam(learning_rate))


def loss_fn(
    model: MatrixFactorization,
    users: jax.Array,
    items: jax.Array,
    negatives: jax.Array,
    loss: str,
    l2: float,
) -> tuple[jax.Array, jax.Array]:
    """Ranking loss of (user, item) pairs against random items.

    Args:
        users, items: [B] train pairs.
        negatives: [B] one random item per pair ("bpr"), or [n] random items shared by all pairs ("softmax").
        loss: "bpr": -log sigmoid(positive - negative); "softmax": -log softmax of the positive among the n negatives,
            which for n = 1 is the same thing.
        l2: weight of half the mean squared length of each kind of row looked up.

    Returns:
        The loss to differentiate, and its part without the L2 term to show.
    """
    user = model.user_rows(users)
    # One call for both: a fused table is updated by its lookup, so a loss may hold one lookup of it.
    rows = model.item_rows(jnp.concatenate([items, negatives]))
    positive, negative = rows[: len(items)], rows[len(items) :]
    score = jnp.sum(user * positive, axis=1)
    if loss == "bpr":
        ranking = jax.nn.softplus(jnp.sum(user * negative, axis=1) - score)
    else:
        others = jnp.where(items[:, None] == negatives, -jnp.inf, user @ negative.T)
        ranking = jnp.logaddexp(jax.nn.logsumexp(others, axis=1), score) - score
    ranking = jnp.mean(ranking)
    lengths = [jnp.mean(jnp.sum(jnp.square(x), axis=1)) for x in (user, positive, negative)]
    return ranking + 0.5 * l2 * sum(lengths), ranking


def num_parameters(model: MatrixFactorization) -> int:
    """Entries of tables, cores or factors, without the optimizer's slots."""
    return sum(value.size for value in _arrays(model))


def num_bytes(model: MatrixFactorization) -> int:
    """Bytes of what `num_parameters` counts, and of the orders of ids."""
    return sum(value.nbytes for value in _arrays(model)) + order_bytes(model)


def order_bytes(model: MatrixFactorization) -> int:
    """Bytes of the orders of ids alone."""
    return sum(value.nbytes for value in jax.tree.leaves(nnx.state(model, jax_tt.IdOrderState)))


def _arrays(model: MatrixFactorization) -> list[jax.Array]:
    return [*arrays(model.users), *arrays(model.items)]
