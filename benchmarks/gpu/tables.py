"""Steps of many tables on a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders import collections
from benchmarks.contenders.collections import CRITEO, Tables
from benchmarks.gpu.timing import Step
from benchmarks.gpu.work import STEPS
from benchmarks.ids import STREAMS


@dataclasses.dataclass(frozen=True)
class GpuTables:
    """One id of every table for each sample."""

    tables: Tables
    steps: int = STEPS

    def ids(self, rng: np.random.Generator, stream: str) -> jax.Array:
        """Ids of all steps of one call, ``[steps, tables, samples]``."""
        count = self.steps * self.tables.samples
        ids = [STREAMS[stream](rng, rows, count) for rows in self.tables.sizes]
        shape = (len(ids), self.steps, self.tables.samples)
        return jnp.asarray(np.stack(ids).reshape(shape).swapaxes(0, 1), jnp.int32)

    def together(self) -> tuple[Step, Any]:
        """A step of one collection, and its state."""
        return self._stepped(collections.program(self.tables))

    def one_by_one(self) -> tuple[Step, Any]:
        """A step with an op for each table, and its state."""
        parts = [[k] for k in range(len(self.tables.sizes))]
        return self._stepped(collections.program(self.tables, parts))

    def _stepped(self, program: collections.Program) -> tuple[Step, Any]:
        def step(state: Any, ids: jax.Array) -> Any:
            states, gradient = state
            return program.step(states, list(ids[..., None]), gradient), gradient

        return step, (program.states, jnp.asarray(self.tables.gradient))


def works(quick: bool) -> dict[str, GpuTables]:
    """By name: dense tables, and the seven largest as tensor trains."""
    sizes, samples, steps = (CRITEO[4:8], 16, 2) if quick else (CRITEO, 2048, STEPS)
    compressed = 600 if quick else 100_000
    hot = (1,) * len(sizes)
    return {
        "dense tables": GpuTables(Tables(sizes, 16, samples, hot), steps),
        "with tensor trains": GpuTables(Tables(sizes, 16, samples, hot, compressed), steps),
    }
