"""Tables that are divided over devices: their fused step beside the same step on one device."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from benchmarks.ids import batches
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from jax_tt import optimizers

DEVICES = (2, 8)
ONE = "one device"
ROWS_BACK = ", rows back in messages of the expected size"


@case(
    "sharding",
    "Table of 1,000,000 x 64 on CPU devices of one process, 2,048 bags of 20: fused step",
)
def measure(settings: Settings, report: Report) -> None:
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    rows, bags = (2000, 64) if settings.quick else (1_000_000, 2048)
    for stream in ("uniform", "zipf"):
        ids = [found.reshape(bags, 20) for found in batches(stream, rows, bags * 20)]
        table = jax_tt.dense_table(rows, 64, optimizer=optimizers.RowWiseAdagrad(0.05))
        calls: dict[tuple[str, str], Call] = {(stream, ONE): _step(table, jax.device_put(ids))}
        for count in DEVICES:
            mesh = jax.make_mesh(
                (count,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count]
            )
            placement = jax_tt.Placement.hashed()
            placed = jax.device_put(ids, NamedSharding(mesh, P("model")))
            parts = [part for own in ids for part in np.split(own, count)]
            share = max(len(np.unique(part)) / part.size for part in parts)
            for label, exchange in (
                ("", jax_tt.planning.Exchange()),
                (ROWS_BACK, jax_tt.planning.Exchange(expected_unique=share, pooled="rows")),
            ):
                sharded = jax_tt.tables.ShardedTable(table, mesh, "model", placement, exchange)
                calls[stream, f"{count} devices{label}"] = _step(sharded, placed)
        timings = interleave(calls, settings.budget)
        del calls
        report.timings(timings)
        for count in DEVICES:
            for label, name in (("", "over_one"), (ROWS_BACK, "rows_over_one")):
                own = timings[stream, f"{count} devices{label}"].median
                meaning = f"time of a step on {count} devices that share the cores{label}, over that on one, {stream}"
                report.figure(
                    f"{stream}_{count}_{name}",
                    own / timings[stream, ONE].median,
                    "x",
                    meaning,
                    at_most=2,
                )


def _step(table: jax_tt.Table, ids: list[jax.Array]) -> Call:
    state = jax.jit(table.init)(jax.random.key(0))
    gradient = jnp.asarray(
        1e-3 * np.random.default_rng(2).normal(size=(ids[0].shape[0], 64)), jnp.float32
    )

    def step(state: dict, ids: jax.Array) -> tuple[dict, jax.Array]:
        def loss(trained: dict) -> tuple[jax.Array, jax.Array]:
            lookup = jax_tt.Lookup(bounds="zero")
            pooled, _ = jax_tt.lookup_bags(table, {**state, **trained}, ids, lookup)
            return jnp.vdot(pooled, gradient), pooled

        trained = {name: state[name] for name in table.spec.trained_names}
        new, pooled = jax.grad(loss, has_aux=True)(trained)
        # Nothing of the forward pass is left out of the program, since its sums are results.
        return state | new, pooled

    run = jax.jit(step, donate_argnums=0)

    def call(i: int) -> object:
        nonlocal state
        state, pooled = run(state, ids[i % len(ids)])
        return jax.block_until_ready((state, pooled))

    return call
