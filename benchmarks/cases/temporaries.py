"""Memory of the fused step at a batch where naive TT kernels need gigabytes."""

import jax
import numpy as np

from benchmarks import memory
from benchmarks.contenders import ours
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.work import LEARNING_RATE, Work
from jax_tt import TTShape, optimizers

ROWS, COLUMNS, RANK = 100_000_000, 32, 32
BAGS, BAG_SIZE = 77_369, 6  # 464,214 ids


@case("temporaries", "TT table, 100,000,000 x 32, rank 32, 464,214 ids: memory of the fused step")
def measure(settings: Settings, report: Report) -> None:
    bags, size = (18, 3) if settings.quick else (BAGS, BAG_SIZE)
    shape = TTShape.suggest(ROWS, COLUMNS, ranks=RANK)
    ids = [np.random.default_rng(0).integers(0, ROWS, bags * size)]
    work = Work(shape, bags, size, ids)
    step, state = ours.tt_fused_program(work, optimizers.SGD(LEARNING_RATE))
    batch = ours.bags_of(work)[0]
    compiled = step.lower(state, batch).compile()
    planned = compiled.memory_analysis()
    if planned is not None:
        report.figure(
            "planned_mib", planned.temp_size_in_bytes / 2**20, "MiB",
            "temporaries of the fused step as XLA plans them", at_most=256,
        )  # fmt: skip
    with memory.Growth() as growth:
        jax.block_until_ready(compiled(state, batch))
    report.figure(
        "measured_mib", growth.bytes / 2**20, "MiB",
        "memory the fused step adds at its peak, as the system counts it", at_most=256,
    )  # fmt: skip
