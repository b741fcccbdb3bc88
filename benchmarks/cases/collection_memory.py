"""Memory that a step of a collection needs in addition to its tables and its batch."""

import gc

import jax
import jax.numpy as jnp

from benchmarks import memory
from benchmarks.contenders import collections
from benchmarks.contenders.collections import CRITEO, Tables
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("collection_memory", "26 dense tables, 16,384 examples, row-wise Adagrad: memory of the step")
def measure(settings: Settings, report: Report) -> None:
    sizes, samples = (CRITEO[4:8], 64) if settings.quick else (CRITEO, 16384)
    for features in (16, 32):
        work = Tables(sizes, features, samples, (1,) * len(sizes))
        program = collections.program(work)
        ids, gradient = [jnp.asarray(own) for own in work.batches[0]], jnp.asarray(work.gradient)
        step = program.step.lower(program.states, ids, gradient).compile()
        jax.block_until_ready(program.states)
        gc.collect()
        with memory.Growth() as growth:
            jax.block_until_ready(step(program.states, ids, gradient))
        report.figure(
            f"measured_mib {features}", growth.bytes / 2**20, "MiB",
            f"D {features}: memory the step adds at its peak, the vectors of all bags included "
            f"({gradient.nbytes / 2**20:.0f} MiB)", at_most=64,
        )  # fmt: skip
