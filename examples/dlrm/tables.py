"""Which tables a variant has, and the rule that updates them."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_tt
from examples.dlrm import devices
from examples.dlrm.config import Config
from examples.dlrm.embeddings import CollectedTables, FlaxTables, Place

SHARED = "shared"


def create_tables(
    config: Config, variant: str, table_sizes: Sequence[int], *, rngs: nnx.Rngs
) -> CollectedTables | FlaxTables:
    """The tables of one of `VARIANTS`.

    * dense: a table for every feature. It starts with entries of N(0, 1 / 3N).
    * tt: the features of at least `config.tt_min_rows` rows lie one after the other in one tensor train,
      or with `config.separate` have one each. The others are dense.
    * narrow: as dense, but the features of at least `config.tt_min_rows` rows have `config.tt_features` columns.
    * mixed: what `jax_tt.plan` chooses for every table within a budget of `config.plan_ratio`.
    * int8: as dense, with 8 bits a number, which every step rounds stochastically.
    """
    kind, fused = variant.split("_")
    rule = _fused_rule(config, variant) if fused == "fused" else None
    own = [Place(f"table_{t}", 0, hot) for t, hot in enumerate(config.multi_hot)]
    if variant == "dense_optax":
        return FlaxTables(
            [
                nnx.Embed(rows, config.features, embedding_init=_dense_init(rows), rngs=rngs)
                for rows in table_sizes
            ],
            own,
        )
    sizes = {place.table: rows for place, rows in zip(own, table_sizes, strict=True)}
    if kind == "mixed":
        tables, places = _planned(config, sizes, rule), own
    elif kind == "int8":
        tables, places = _quantized(config, sizes, rule), own
    elif kind == "tt" and not config.separate:
        tables, places = _sharing(config, sizes, own, rule)
    else:
        large = {"dense": _dense, "tt": _tensor_train, "narrow": _narrow}[kind]
        tables, places = _separate(config, sizes, rule, large), own
    mesh = devices.mesh_of(config)
    if mesh is not None:
        tables = jax_tt.shard_tables(tables, mesh, devices.AXIS)
    frozen = not config.cache_refresh
    return CollectedTables(tables, places, config.features, frozen_caches=frozen, rngs=rngs)


def optax_rule(config: Config, variant: str) -> optax.GradientTransformation:
    """The rule of tables without a fused update; the same one in optax."""
    rate = _learning_rate(config, variant)
    if config.table_rule == "sgd":
        return optax.sgd(rate)
    # The rule of jax_tt's Adagrad: optax adds eps under the root, jax_tt 1e-10 to the root.
    return optax.adagrad(rate, initial_accumulator_value=0.0, eps=1e-20)


def _fused_rule(config: Config, variant: str) -> jax_tt.optimizers.Optimizer:
    rules = {"sgd": jax_tt.optimizers.SGD, "adagrad": jax_tt.optimizers.Adagrad}
    return rules[config.table_rule](_learning_rate(config, variant))


def _learning_rate(config: Config, variant: str) -> float:
    return config.tt_learning_rate if variant.startswith("tt") else config.learning_rate


Rule = jax_tt.optimizers.Optimizer | None
Tables = dict[str, jax_tt.Table]


def _separate(
    config: Config,
    sizes: Mapping[str, int],
    rule: Rule,
    large: Callable[[Config, int, Rule], jax_tt.Table],
) -> Tables:
    return {
        name: (large if rows >= config.tt_min_rows else _dense)(config, rows, rule)
        for name, rows in sizes.items()
    }


def _sharing(
    config: Config, sizes: Mapping[str, int], own: Sequence[Place], rule: Rule
) -> tuple[Tables, list[Place]]:
    """Dense tables, and one tensor train with the rows of all large ones."""
    large = [name for name, rows in sizes.items() if rows >= config.tt_min_rows]
    ends = list(itertools.accumulate(sizes[name] for name in large))
    first = {name: end - sizes[name] for name, end in zip(large, ends, strict=True)}
    tables = {n: _dense(config, rows, rule) for n, rows in sizes.items() if n not in first}
    if large:
        tables[SHARED] = _tensor_train(config, ends[-1], rule)
    places = [
        place._replace(table=SHARED, first=first[place.table]) if place.table in first else place
        for place in own
    ]
    return tables, places


def _planned(config: Config, sizes: Mapping[str, int], rule: Rule) -> Tables:
    dense_bytes = 4 * config.features * sum(sizes.values())
    budget = int(dense_bytes / config.plan_ratio)
    plan = jax_tt.plan({name: (rows, config.features) for name, rows in sizes.items()}, budget)
    update = None if rule is None else jax_tt.Update(rule)
    return {
        name: _dense(config, planned.num_embeddings, rule)
        if planned.kind == "dense"
        else planned.table(update=update)
        for name, planned in plan.items()
    }


def _quantized(config: Config, sizes: Mapping[str, int], rule: Rule) -> Tables:
    update = None if rule is None else jax_tt.Update(rule)
    return {
        name: jax_tt.tables.QuantizedTable(
            rows, config.features, bits=8, update=update, embedding_init=_dense_init(rows)
        )
        for name, rows in sizes.items()
    }


def _dense(config: Config, rows: int, rule: Rule) -> jax_tt.Table:
    return _dense_of(rows, config.features, rule)


def _narrow(config: Config, rows: int, rule: Rule) -> jax_tt.Table:
    return _dense_of(rows, _large_features(config), rule)


def _dense_of(rows: int, features: int, rule: Rule) -> jax_tt.Table:
    return jax_tt.dense_table(rows, features, optimizer=rule, embedding_init=_dense_init(rows))


def _large_features(config: Config) -> int:
    return config.tt_features or config.features


def _tensor_train(config: Config, rows: int, rule: Rule) -> jax_tt.Table:
    features, ranks, cache = _large_features(config), config.tt_ranks, _cache(config, rows)
    return jax_tt.tt_table(rows, features, tt_ranks=ranks, optimizer=rule, cache=cache)


def _cache(config: Config, rows: int) -> jax_tt.RowCache | None:
    if not config.cache:
        return None
    capacity = max(1, round(config.cache * rows))
    if config.cache_refresh:
        every, dtype = config.cache_refresh, config.cache_dtype
        return jax_tt.RowCache(capacity, refresh_every=every, dtype=dtype)
    return jax_tt.RowCache(capacity, counters=1, write_back=None, dtype=config.cache_dtype)


def _dense_init(rows: int) -> nnx.Initializer:
    """Entries of N(0, 1 / 3N), drawn a block of rows at a time.

    `nnx.initializers.normal` temporarily needs four times the memory of the table, which for a large
    table is more than training needs.
    """
    stddev = math.sqrt(1.0 / (3.0 * rows))

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
