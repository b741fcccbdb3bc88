"""Trains a recommender with a row cache and measures, at every populate, how well write-back preserves evicted rows.

Used by the tests and by the picture in the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt._kinds.cached.write_back import write_back
from jax_tt._kinds.tensor_train.table import TTTable

FEATURES = 32
BATCH = 512


@dataclass(frozen=True)
class Record:
    """One populate.

    Attributes:
        step: training steps before it.
        evicted: evicted rows.
        learned: squared distance of the evicted rows from those that the cores gave.
        left: the same after write-back, as a share of it.
        damage: squared change of all rows that were not cached, as a multiple of ``learned``.
        moved: the same as a share of their squares.
        compression: how much smaller the table is than a dense one.
        cores, ids, rows: what was written back, and where.
    """

    step: int
    evicted: int
    learned: float
    left: float
    damage: float
    moved: float
    compression: float
    cores: tuple[jax.Array, ...]
    ids: np.ndarray
    rows: np.ndarray


def train(
    items: np.ndarray,
    rank: int,
    policy: str,
    steps: int,
    every: int,
    options: jax_tt.cache.WriteBack | None = None,
) -> list[Record]:
    """Two towers, a random fixed user side: each batch tells its items from each other, by the fused Adagrad.

    Args:
        items: stream of ids, `BATCH` of them a step.
        rank: TT ranks.
        policy: of the cache, which holds 1 % of the rows.
        steps: to train.
        every: steps between two populates.
        options: of the write-back.
    """
    num = int(items.max()) + 1
    shape = jax_tt.TTShape.suggest(num, FEATURES, ranks=rank)
    rule = jax_tt.optimizers.Adagrad(0.1, initial_accumulator_value=0.01)
    cache = jax_tt.RowCache(
        capacity=num // 100,
        ways=8,
        counters=64 * (num // 100),
        policy=policy,
        write_back=options or jax_tt.cache.WriteBack(),
    )
    train = jax_tt.tables.TTTable.of_shape(shape, update=jax_tt.Update(rule))
    table = jax_tt.tables.RowCachedTable(train, cache)
    state = table.init(jax.random.key(0))
    # Tastes that change from batch to batch, but are the same for the same item: something to learn for every row.
    tastes = jax.random.normal(jax.random.key(1), (num, FEATURES)) / np.sqrt(FEATURES)

    def loss(trained: Any, state: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        rows, after = jax_tt.lookup(table, {**state, **trained}, ids)
        scores = tastes[ids] @ rows.T
        same = (ids[:, None] == ids[None, :]) & ~jnp.eye(ids.size, dtype=bool)
        chosen = jnp.diagonal(jax.nn.log_softmax(jnp.where(same, -1e9, scores)))
        return -jnp.sum(chosen), after

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, ids: jax.Array) -> Any:
        trained = {name: state[name] for name in table.spec.trained_names}
        trained, after = jax.grad(loss, has_aux=True)(trained, state, ids)
        return {**after, **trained}

    populate = jax.jit(partial(jax_tt.cache.populate, table))
    records = []
    for n in range(steps):
        start = n * BATCH % (items.size - BATCH)
        state = step(state, jnp.asarray(items[start : start + BATCH]))
        if (n + 1) % every == 0:
            new = populate(state)
            records.append(_record(n + 1, train, state, new))
            state = new
    return records


def _record(step: int, train: jax_tt.tables.TTTable, old: Any, new: Any) -> Record:
    tags, after_tags = (np.asarray(state["cache_tags"]).reshape(-1) for state in (old, new))
    gone = (tags != after_tags) & (tags >= 0)
    ids, rows = tags[gone], np.asarray(old["cache_rows"])[gone]
    before, after = (train.spec.params(state) for state in (old, new))
    shape = train.shape
    figures = measure(before, after, ids, rows, tags[tags >= 0], shape.num_embeddings)
    compression = shape.num_embeddings * shape.features / shape.num_params
    return Record(step, ids.size, *figures, compression, before, ids, rows)


def measure(
    old: Any, new: Any, ids: np.ndarray, rows: np.ndarray, cached: np.ndarray, num_embeddings: int
) -> tuple[float, float, float, float]:
    """``learned``, ``left``, ``damage`` and ``moved`` of a `Record`."""
    before, after = (
        np.asarray(jax_tt.tt.to_dense(cores, num_embeddings), np.float64) for cores in (old, new)
    )
    others = np.ones(num_embeddings, bool)
    others[cached] = others[ids] = False
    learned = ((rows - before[ids]) ** 2).sum()
    change = ((after - before)[others] ** 2).sum()
    left = ((rows - after[ids]) ** 2).sum()
    share = 1 / learned if learned else 0.0
    return (
        float(learned),
        float(left * share),
        float(change * share),
        float(change / (before[others] ** 2).sum()),
    )


def rewritten(
    record: Record, count: int, options: jax_tt.cache.WriteBack, num_embeddings: int
) -> tuple[float, float, float, float]:
    """`measure` with only the first rows of a record written back, under other options."""
    table, cores = TTTable.of(record.cores, num_embeddings)
    ids, rows = record.ids[:count], record.rows[:count]
    fit = jax.jit(
        lambda ids, rows: write_back(table, cores, ids, rows, options, jax.random.key(0), "auto")
    )
    new = fit(jnp.asarray(ids), jnp.asarray(rows))
    return measure(cores, new, ids, rows, record.ids, num_embeddings)
