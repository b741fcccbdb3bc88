"""A whole training step of DLRM: the cost of compressing its large tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_tt
from benchmarks.ids import zipf_ids
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from examples.dlrm import create
from examples.dlrm.batch import NUM_DENSE, Batch
from examples.dlrm.config import Config

DENSE, TT, TT_OPTAX = "dense tables, fused", "TT tables, fused", "TT tables, optax"
VARIANTS = {DENSE: "dense_fused", TT: "tt_fused", TT_OPTAX: "tt_optax"}

# DLRM's published settings for Criteo Kaggle, its 26 tables at full size; the seven above 100,000 rows
# are the ones TT-Rec compresses.
CONFIG = Config(
    tables="kaggle",
    data="criteo",
    features=16,
    tt_ranks=32,
    tt_min_rows=100_000,
    bottom=(512, 256, 64),
    top=(512, 256),
    batch_size=2048,
    separate=True,
    cache=0.0,
    table_rule="sgd",
)
QUICK = Config(tables="5000,200,10", tt_min_rows=1000, tt_ranks=4, cache=0.0, batch_size=32)


@case("dlrm_step", "DLRM on Criteo Kaggle's 26 tables, 2,048 examples, Zipf ids: whole step")
def measure(settings: Settings, report: Report) -> None:
    config = QUICK if settings.quick else CONFIG
    work = f"batch {config.batch_size:,}"
    batches = [_batch(config, seed) for seed in range(5)]
    calls = {
        (work, name): _training(config, variant, batches) for name, variant in VARIANTS.items()
    }
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    overhead = timings[work, TT].median / timings[work, DENSE].median - 1
    report.figure(
        "overhead_percent", 100 * overhead, "%",
        "step with TT tables longer than with dense fused tables", at_most=13.9,
    )  # fmt: skip


def _batch(config: Config, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    size = config.batch_size
    ids = np.stack([zipf_ids(rng, rows, size) for rows in config.table_sizes], axis=1)
    dense = rng.standard_normal((size, NUM_DENSE), np.float32)
    return Batch(dense, ids.astype(np.int32), (rng.random(size) < 0.25).astype(np.float32))


def _training(config: Config, variant: str, batches: list[Batch]) -> Call:
    graph, state = nnx.split(create.create(config, variant, config.table_sizes))
    on_device = jax.device_put(batches)

    def step(state: nnx.State, batch: Batch) -> tuple[jax.Array, nnx.State]:
        dlrm, optimizer = nnx.merge(graph, state)

        def loss_of(dlrm: create.ClickModel) -> jax.Array:
            logits = dlrm(jnp.asarray(batch.dense), jnp.asarray(batch.ids))
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch.label))

        loss, gradients = jax_tt.value_and_grad(loss_of)(dlrm)
        optimizer.update(dlrm, gradients)
        return loss, nnx.state((dlrm, optimizer))

    jitted = jax.jit(step, donate_argnums=0)

    def call(i: int) -> object:
        nonlocal state
        loss, state = jitted(state, on_device[i % len(on_device)])
        return jax.block_until_ready((loss, state))

    return call
