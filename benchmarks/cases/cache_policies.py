"""Hit rates of the policies of the row cache, on streams whose popular rows stay or change, and on real ones."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.streams import drifting, streams

State = Mapping[str, jax.Array]
BATCH, REFRESH_EVERY = 4096, 10
DRIFTS = {"no drift": 0.0, "1 % drift": 0.01, "10 % drift": 0.1}
POLICIES = {
    "LFU that never ages": {"half_life": None},
    "LFU": {},
    "LRU with ties broken by id": {"policy": "lru"},
    "LRU": {"policy": "lru"},
}


@case(
    "cache_policies",
    "Hit rates of a row cache of 1 % of the rows, refreshed every 10 batches, by policy",
)
def measure(settings: Settings, report: Report) -> None:
    work = {name: drifting(share, settings.quick) for name, share in DRIFTS.items()}
    size = 256 if settings.quick else BATCH
    for name, (ids, rows) in streams(settings.quick).items():
        work[name] = ids[: len(ids) // size * size].reshape(-1, size), rows
    for name, (batches, rows) in work.items():
        for policy, options in POLICIES.items():
            cache = jax_tt.RowCache(
                max(1, rows // 100), refresh_every=REFRESH_EVERY, gradients="cores", **options
            )
            rate = hit_rate(batches, rows, cache, ties="ties" not in policy)
            label = f"{policy} {name}".lower().replace(" ", "_").replace("%", "percent")
            report.figure(label, 100 * rate, "%", f"{name}: hit rate of {policy}")


def hit_rate(batches: np.ndarray, rows: int, cache: jax_tt.RowCache, *, ties: bool) -> float:
    """Share of hits from the first batch to the last, in front of the smallest possible table.

    Without ``ties`` the requests in the low bits of LRU's scores are cleared after every batch.
    """
    table = jax_tt.tt_table(rows, 2, tt_ranks=1, cache=cache)

    def step(state: State, ids: jax.Array) -> tuple[State, None]:
        _, state = jax_tt.lookup(table, state, ids)
        if not ties:
            scores = {name: state[name] & -1024 for name in ("cache_scores", "cache_ghost_scores")}
            state = {**state, **scores}
        return jax_tt.cache.refresh(table, state), None

    run = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches)[0])
    state = run(table.init(jax.random.key(0)), jnp.asarray(batches))
    return jax_tt.cache.statistics(table, state)["hit_rate"]
