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
    options: jax_tt.WriteBack | None = None,
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
        write_back=options or jax_tt.WriteBack(),
    )
    cores = jax_tt.init_cores(jax.random.key(0), shape)
    table = jax_tt.init_cached_table(
        jax_tt.init_fused_table(cores, rule), cache, num_embeddings=num, optimizer=rule
    )
    # Tastes that change from batch to batch, but are the same for the same item: something to learn for every row.
    tastes = jax.random.normal(jax.random.key(1), (num, FEATURES)) / np.sqrt(FEATURES)

    def loss(weights: Any, state: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        state = state._replace(table=weights[0], rows=weights[1])
        rows, directory = jax_tt.cached_tt_lookup(
            state, ids, cache, optimizer=rule, num_embeddings=num
        )
        scores = tastes[ids] @ rows.T
        same = (ids[:, None] == ids[None, :]) & ~jnp.eye(ids.size, dtype=bool)
        chosen = jnp.diagonal(jax.nn.log_softmax(jnp.where(same, -1e9, scores)))
        return -jnp.sum(chosen), directory

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, ids: jax.Array) -> Any:
        (table, rows), directory = jax.grad(loss, has_aux=True)(
            (state.table, state.rows), state, ids
        )
        return jax_tt.CachedTable(table, rows, directory)

    populate = jax.jit(
        partial(jax_tt.populate_cache, cache=cache, num_embeddings=num, optimizer=rule)
    )
    records = []
    for n in range(steps):
        start = n * BATCH % (items.size - BATCH)
        table = step(table, jnp.asarray(items[start : start + BATCH]))
        if (n + 1) % every == 0:
            new = populate(table)
            records.append(_record(n + 1, table, new, shape))
            table = new
    return records


def _record(step: int, old: Any, new: Any, shape: jax_tt.TTShape) -> Record:
    tags, after_tags = (np.asarray(t.directory.tags).reshape(-1) for t in (old, new))
    gone = (tags != after_tags) & (tags >= 0)
    ids, rows = tags[gone], np.asarray(old.values)[gone]
    figures = measure(old.cores, new.cores, ids, rows, tags[tags >= 0], shape.num_embeddings)
    compression = shape.num_embeddings * shape.features / shape.num_params
    return Record(step, ids.size, *figures, compression, old.cores, ids, rows)


def measure(
    old: Any, new: Any, ids: np.ndarray, rows: np.ndarray, cached: np.ndarray, num_embeddings: int
) -> tuple[float, float, float, float]:
    """``learned``, ``left``, ``damage`` and ``moved`` of a `Record`."""
    before, after = (
        np.asarray(jax_tt.tt_to_dense(cores, num_embeddings), np.float64) for cores in (old, new)
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
    record: Record, count: int, options: jax_tt.WriteBack, num_embeddings: int
) -> tuple[float, float, float, float]:
    """`measure` with only the first rows of a record written back, under other options."""
    table, cores = TTTable.of(record.cores, num_embeddings)
    ids, rows = record.ids[:count], record.rows[:count]
    fit = jax.jit(
        lambda ids, rows: write_back(table, cores, ids, rows, options, jax.random.key(0), "auto")
    )
    new = fit(jnp.asarray(ids), jnp.asarray(rows))
    return measure(cores, new, ids, rows, record.ids, num_embeddings)
