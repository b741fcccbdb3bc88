"""DLRM in Flax NNX: bottom MLP, embedding tables in four variants, dot interaction, top MLP."""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from examples.dlrm.batch import NUM_DENSE
from examples.dlrm.config import Config


class MLP(nnx.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: Sequence[int], *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(widths)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class DLRM(nnx.Module):
    """Click-through model: the features are the dot products of all pairs of embeddings.

    Args:
      tables: the tables of T categorical features, int32 [B, T] -> [B, T, D].
      num_tables: T.
      features: D, the width of every table.
      bottom: hidden widths of the MLP that turns the numeric features into one more vector of D.
      top: hidden widths of the MLP that turns all dot products into one log-odds.
    """

    def __init__(
        self,
        tables: nnx.Module,
        num_tables: int,
        features: int,
        bottom: Sequence[int],
        top: Sequence[int],
        *,
        rngs: nnx.Rngs,
    ):
        vectors = num_tables + 1
        self.tables = tables
        self.bottom = MLP([NUM_DENSE, *bottom, features], rngs=rngs)
        self.top = MLP([features + vectors * (vectors - 1) // 2, *top, 1], rngs=rngs)

    def __call__(self, dense: jax.Array, ids: jax.Array) -> jax.Array:
        """Log-odds of a click [B] from dense [B, NUM_DENSE] and ids [B, T]."""
        x = jax.nn.relu(self.bottom(dense))
        vectors = jnp.concatenate([x[:, None], self.tables(ids)], axis=1)
        products = jnp.einsum("bsd,btd->bst", vectors, vectors)
        s, t = np.tril_indices(vectors.shape[1], -1)  # each pair once
        return self.top(jnp.concatenate([x, products[:, s, t]], axis=1))[:, 0]


class CollectedTables(nnx.Module):
    """Tables of any kinds, looked up in one call."""

    def __init__(self, tables: Sequence[jax_tt.Table], *, rngs: nnx.Rngs):
        named = {f"table_{t}": table for t, table in enumerate(tables)}
        features = {name: jax_tt.Feature(name, combiner=None) for name in named}
        self.collection = jax_tt.EmbedCollection(named, features, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        features = enumerate(self.collection.features)
        return self.collection.stacked({name: ids[:, t] for t, name in features})


class FlaxTables(nnx.Module):
    """Dense tables as Flax has them."""

    def __init__(self, tables: Sequence[nnx.Embed]):
        self.tables = nnx.List(tables)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.stack([table(ids[:, t]) for t, table in enumerate(self.tables)], axis=1)


def create(config: Config, variant: str, table_sizes: Sequence[int]) -> tuple[DLRM, nnx.Optimizer]:
    """The model with its tables in one of `VARIANTS`, and the optimizer that trains it.

    Tables below `config.tt_min_rows` rows stay dense in every variant. All tables start with
    entries of N(0, 1 / 3N) and are updated by the same rule at the same learning rate; the MLPs by
    Adam.
    """
    rngs = nnx.Rngs(config.seed)
    compress, fuse = variant.startswith("tt"), variant.endswith("fused")
    rule = _fused_rule(config) if fuse else None

    def init(rows: int) -> nnx.Initializer:
        return _normal_in_blocks(math.sqrt(1.0 / (3.0 * rows)))

    def table(rows: int) -> jax_tt.Table:
        if compress and rows >= config.tt_min_rows:
            ranks, cache = config.tt_ranks, _cache(config, rows)
            return jax_tt.tt_table(
                rows, config.features, tt_ranks=ranks, optimizer=rule, cache=cache
            )
        return jax_tt.dense_table(rows, config.features, optimizer=rule, embedding_init=init(rows))

    if compress or fuse:
        tables = CollectedTables([table(rows) for rows in table_sizes], rngs=rngs)
    else:
        tables = FlaxTables(
            [
                nnx.Embed(rows, config.features, embedding_init=init(rows), rngs=rngs)
                for rows in table_sizes
            ]
        )
    sizes = len(table_sizes), config.features, config.bottom, config.top
    model = DLRM(tables, *sizes, rngs=rngs)
    mlps = optax.adam(config.mlp_learning_rate)
    if fuse:
        return model, jax_tt.FusedOptimizer(model, mlps)
    tx = optax.partition({"tables": _optax_rule(config), "mlps": mlps}, _label)
    if compress and config.cache:
        return model, jax_tt.FusedOptimizer(model, tx)  # which refreshes the caches, too
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def hit_rate(model: DLRM) -> float | None:
    """Share of the requests to cached tables that were hits; None without a cache."""
    if not isinstance(model.tables, CollectedTables):
        return None
    layers = model.tables.collection.tables.values()
    figures = [layer.cache_statistics() for layer in layers if layer.cache is not None]
    requested = sum(f["requested"] for f in figures)
    return 1 - sum(f["misses"] for f in figures) / requested if requested else None


def _cache(config: Config, rows: int) -> jax_tt.RowCache | None:
    if not config.cache:
        return None
    capacity = max(1, round(config.cache * rows))
    return jax_tt.RowCache(capacity, refresh_every=config.cache_refresh)


def _normal_in_blocks(stddev: float) -> nnx.Initializer:
    """Normal entries, drawn a block of rows at a time.

    `nnx.initializers.normal` temporarily needs four times the memory of the table, which for a large
    table is more than training needs.
    """

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        rows, features = shape
        block = min(rows, 1 << 16)

        def fill(i: jax.Array, table: jax.Array) -> jax.Array:
            values = stddev * jax.random.normal(
                jax.random.fold_in(key, i), (block, features), dtype
            )
            # The last block reaches back, so that all have one shape.
            return jax.lax.dynamic_update_slice(
                table, values, (jnp.minimum(i * block, rows - block), 0)
            )

        return jax.lax.fori_loop(0, -(-rows // block), fill, jnp.zeros(shape, dtype))

    return init


def _label(params: nnx.State) -> nnx.State:
    """Names the transformation that updates each parameter."""
    return jax.tree.map_with_path(
        lambda path, _: (
            "tables" if jax.tree_util.keystr(path[:1], simple=True) == "tables" else "mlps"
        ),
        params,
    )


def _fused_rule(config: Config):
    rules = {"sgd": jax_tt.optimizers.SGD, "adagrad": jax_tt.optimizers.Adagrad}
    return rules[config.table_rule](config.learning_rate)


def _optax_rule(config: Config) -> optax.GradientTransformation:
    if config.table_rule == "sgd":
        return optax.sgd(config.learning_rate)
    # The rule of jax_tt's Adagrad: optax adds eps under the root, jax_tt 1e-10 to the root.
    return optax.adagrad(config.learning_rate, initial_accumulator_value=0.0, eps=1e-20)
