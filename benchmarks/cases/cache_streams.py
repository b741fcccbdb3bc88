"""Hit rate and cost of a row cache on streams of ids, refreshed as in training."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.streams import streams
from benchmarks.timing import Timing
from benchmarks.work import LEARNING_RATE

OPTIMIZER = jax_tt.optimizers.SGD(LEARNING_RATE)
FEATURES, RANK, BATCH, REFRESH_EVERY = 64, 32, 4096, 10
SHARES = (0.001, 0.01, 0.1)


@case(
    "cache_streams",
    "Row caches of 0.1, 1 and 10 % of the rows on Zipf and real streams, D = 64, rank 32",
)
def measure(settings: Settings, report: Report) -> None:
    for name, (ids, rows) in streams(settings.quick).items():
        batch = BATCH if not settings.quick else 256
        batches = ids[: len(ids) // batch * batch].reshape(-1, batch)
        plain = _plain(batches, rows)
        report.timings({(name, "fused step without a cache"): plain})
        popular = np.sort(np.bincount(batches.reshape(-1), minlength=rows))[::-1]
        for share in SHARES:
            capacity = max(1, round(share * rows))
            cache = jax_tt.RowCache(capacity, counters=rows, refresh_every=REFRESH_EVERY)
            cached, hit_rate = _cached(batches, rows, cache)
            report.timings({(name, f"fused step, {share:.1%} cached, refreshes included"): cached})
            label = f"{name.lower().replace(' ', '_').replace('.', '_').replace('-', '_')}_{share * 1000:.0f}"
            report.figure(
                f"hits_{label}", 100 * hit_rate, "%",
                f"{name}: hit rate of a cache of {share:.1%} of the rows, first batch to last",
            )  # fmt: skip
            report.figure(
                f"ideal_{label}", 100 * popular[:capacity].sum() / batches.size, "%",
                f"{name}: hit rate of the best set of as many rows, chosen with hindsight",
            )  # fmt: skip


def _plain(batches: np.ndarray, rows: int) -> Timing:
    """Steps without a cache."""

    table = jax_tt.tt_table(rows, FEATURES, tt_ranks=RANK, optimizer=OPTIMIZER)

    def step(state: dict[str, jax.Array], ids: jax.Array) -> dict[str, jax.Array]:
        return jax.grad(lambda state: jnp.sum(jax_tt.lookup(table, state, ids)[0]))(state)

    return _timed(step, table.init(jax.random.key(0)), batches)[0]


def _cached(batches: np.ndarray, rows: int, cache: jax_tt.RowCache) -> tuple[Timing, float]:
    """Steps with one, and its hit rate."""

    table = jax_tt.tt_table(rows, FEATURES, tt_ranks=RANK, optimizer=OPTIMIZER, cache=cache)

    def step(state: dict[str, jax.Array], ids: jax.Array) -> dict[str, jax.Array]:
        def loss(trained: Any) -> Any:
            out, after = jax_tt.lookup(table, {**state, **trained}, ids)
            return jnp.sum(out), after

        trained = {name: state[name] for name in table.spec.trained_names}
        (_, after), trained = jax.value_and_grad(loss, has_aux=True)(trained)
        return jax_tt.cache.refresh(table, {**after, **trained})

    timing, state = _timed(step, table.init(jax.random.key(0)), batches)
    return timing, jax_tt.cache.statistics(table, state)["hit_rate"]


def _timed(step: Any, table: Any, batches: np.ndarray) -> tuple[Timing, Any]:
    """Time of a step, on average over the ten between two refreshes, and the table at the end."""
    program = jax.jit(step, donate_argnums=0)
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        table = jax.block_until_ready(program(table, batch))
        seconds.append(time.perf_counter() - start)
    whole = len(seconds) // REFRESH_EVERY * REFRESH_EVERY
    rounds = np.reshape(seconds[:whole] or seconds, (-1, REFRESH_EVERY if whole else len(seconds)))
    means = [float(mean) for mean in rounds.mean(axis=1)]
    return Timing.of(means[1:] or means), table  # the first one compiles
