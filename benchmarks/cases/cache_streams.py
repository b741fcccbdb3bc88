"""Hit rate and cost of a row cache on streams as they come, refreshed as in training."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.streams import streams
from benchmarks.timing import Timing
from benchmarks.work import LEARNING_RATE

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
        plain, _ = _train(batches, rows, None)
        report.timings({(name, "fused step without a cache"): plain})
        popular = np.sort(np.bincount(batches.reshape(-1), minlength=rows))[::-1]
        for share in SHARES:
            capacity = max(1, round(share * rows))
            cache = jax_tt.RowCache(capacity, counters=rows, refresh_every=REFRESH_EVERY)
            cached, hit_rate = _train(batches, rows, cache)
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


def _train(batches: np.ndarray, rows: int, cache: jax_tt.RowCache | None) -> tuple[Timing, float]:
    """Time of a step, on average over the ten between two refreshes, and the hit rate."""
    optimizer = jax_tt.optimizers.SGD(LEARNING_RATE)
    options = {"num_embeddings": rows}
    shape = jax_tt.TTShape.suggest(rows, FEATURES, ranks=RANK)
    cores = jax_tt.init_cores(jax.random.key(0), shape)
    table = jax_tt.init_fused_table(cores, optimizer)
    if cache is not None:
        table = jax_tt.init_cached_table(table, cache, optimizer=optimizer, **options)

    def plain(table, ids):
        return jax.grad(lambda t: jnp.sum(jax_tt.fused_tt_lookup(t, ids, optimizer, **options)))(
            table
        )

    def cached(table, ids):
        def loss(trained):
            own = table._replace(table=trained[0], rows=trained[1])
            out, directory = jax_tt.cached_tt_lookup(
                own, ids, cache, optimizer=optimizer, **options
            )
            return jnp.sum(out), directory

        (_, directory), new = jax.value_and_grad(loss, has_aux=True)((table.table, table.rows))
        table = jax_tt.CachedTable(*new, directory)
        return jax_tt.refresh_if_due(table, cache, optimizer=optimizer, **options)

    step = jax.jit(plain if cache is None else cached, donate_argnums=0)
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        table = jax.block_until_ready(step(table, batch))
        seconds.append(time.perf_counter() - start)
    whole = len(seconds) // REFRESH_EVERY * REFRESH_EVERY
    rounds = np.reshape(seconds[:whole] or seconds, (-1, REFRESH_EVERY if whole else len(seconds)))
    timing = Timing.of([float(mean) for mean in rounds.mean(axis=1)][1:] or [float(rounds.mean())])
    if cache is None:
        return timing, 0.0
    return timing, jax_tt.cache_statistics(table.directory)["hit_rate"]
