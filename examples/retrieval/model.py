"""Matrix factorisation with dense or TT tables: a score is the inner product of a user's and an item's row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from examples.retrieval.data import Interactions
from examples.retrieval.settings import VARIANTS, Config


class MatrixFactorization(nnx.Module):
    """Two tables of the same width.

    Args:
        users, items: layers from ids ``[n]`` to rows ``[n, features]``. A fused one can be looked up once a step: give
            all ids of a step in one call.
    """

    def __init__(self, users: Any, items: Any):
        self.users, self.items = users, items


def make_model(config: Config, data: Interactions) -> MatrixFactorization:
    """The model of a variant."""
    rngs = nnx.Rngs(config.seed)
    users = _table(config, data, "users", rngs)
    return MatrixFactorization(users, _table(config, data, "items", rngs))


def _table(config: Config, data: Interactions, ids: str, rngs: nnx.Rngs) -> Any:
    variant = VARIANTS[config.variant]
    rows = data.num_users if ids == "users" else data.num_items
    optimizer = jax_tt.optimizers.Adam(learning_rate(config, data)) if variant.fused else None
    if variant.table == "tt":
        shape = jax_tt.TTShape.suggest(rows, config.features, config.tt_rank)
        return jax_tt.TTEmbed(
            **shape.layer_arguments(),
            core_init=scaled_init(shape, config.init_std),
            optimizer=optimizer,
            id_order=make_order(config.order, data, ids, shape),
            rngs=rngs,
        )
    init = nnx.initializers.normal(config.init_std)
    if optimizer is None:
        return nnx.Embed(rows, config.features, embedding_init=init, rngs=rngs)
    return jax_tt.Embed(rows, config.features, embedding_init=init, optimizer=optimizer, rngs=rngs)


def scaled_init(shape: jax_tt.TTShape, std: float) -> Any:
    """Normal core entries for table entries of standard deviation `std`: each is a sum of prod(ranks) products of d."""
    return nnx.initializers.normal((std / np.sqrt(np.prod(shape.ranks))) ** (1 / shape.d))


def make_order(
    kind: str, data: Interactions, ids: str, shape: jax_tt.TTShape
) -> jax_tt.order.IdOrder | None:
    """The order of the ids of a TT table, from the train interactions alone.

    Args:
        kind: "none": the original order; "interactions": users who took the same items, or items of the same users,
            share digits; "counts": the most frequent first.
        ids: "users" or "items".
    """
    these, others = data.train_items, data.train_users
    if ids == "users":
        these, others = others, these
    if kind == "counts":
        return jax_tt.order.from_counts(np.bincount(these, minlength=shape.num_embeddings))
    if kind == "interactions":
        return jax_tt.order.from_interactions((others, these), shape)
    return None


def steps_per_epoch(config: Config, data: Interactions) -> int:
    """Minibatches an epoch; interactions that do not fill one are left to other epochs."""
    return max(1, len(data.train_users) // config.batch_size)


def learning_rate(config: Config, data: Interactions) -> optax.Schedule:
    """The learning rate of every step, fused or not."""
    steps = config.epochs * steps_per_epoch(config, data)
    return optax.linear_schedule(config.learning_rate, 0.0, steps)


def loss_fn(
    model: MatrixFactorization, users: jax.Array, items: jax.Array, negatives: jax.Array, l2: float
) -> tuple[jax.Array, jax.Array]:
    """Sampled softmax: -log of the share of each pair's item among it and random items.

    Args:
        users, items: train pairs ``[B]``.
        negatives: random items ``[n]`` that all pairs share.
        l2: weight of half the mean squared length of each kind of row looked up.

    Returns:
        The loss to differentiate, and its part without the L2 term to show.
    """
    user = model.users(users)
    # One call for both: a fused table is updated by its lookup, so a loss may hold one lookup of it.
    rows = model.items(jnp.concatenate([items, negatives]))
    positive, negative = rows[: len(items)], rows[len(items) :]
    score = jnp.sum(user * positive, axis=1)
    others = jnp.where(items[:, None] == negatives, -jnp.inf, user @ negative.T)
    ranking = jnp.mean(jnp.logaddexp(jax.nn.logsumexp(others, axis=1), score) - score)
    lengths = [jnp.mean(jnp.sum(jnp.square(x), axis=1)) for x in (user, positive, negative)]
    return ranking + 0.5 * l2 * sum(lengths), ranking


def arrays(table: Any) -> list[jax.Array]:
    """What is trained of a table, without the optimizer's slots; layers other than these have a method for it."""
    if isinstance(table, jax_tt.TableEmbed):
        return list(jax_tt.tables.innermost(table.table).spec.params(table.state()))
    return [table.embedding[...]] if isinstance(table, nnx.Embed) else table.arrays()


def sizes(model: MatrixFactorization) -> dict[str, int]:
    """Parameters and bytes of the tables, and the bytes of the orders of ids, which the bytes include."""
    trained = [*arrays(model.users), *arrays(model.items)]
    orders = jax.tree.leaves(nnx.state(model, jax_tt.nnx.IdOrderState))
    return {
        "parameters": sum(value.size for value in trained),
        "bytes": sum(value.nbytes for value in [*trained, *orders]),
        "order_bytes": sum(value.nbytes for value in orders),
    }
