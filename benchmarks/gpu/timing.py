"""Timing of work on a device: many steps in one program, so that neither Python nor the launch of a program counts.

Every call gets ids that no call had before. Ahead of it, memory that the program is about to be given is filled with
NaN, so that results which nothing wrote cannot pass for results.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Name, Timing

# One step with its carry: ``step(state, ids) -> state``.
Step = Callable[[Any, jax.Array], Any]
_POISON_BYTES = 64 << 20


class Batches(Protocol):
    """What the steps of a call get."""

    @property
    def steps(self) -> int: ...

    def ids(self, rng: np.random.Generator, stream: str) -> jax.Array:
        """``[steps, ...]``"""
        ...


class Replayed:
    """A contender: all steps of a call in one program, whose state stays on the device.

    Every call begins with the first state again: a few hundred steps with the same gradient would diverge to infinity.
    """

    def __init__(self, step: Step, state: Any) -> None:
        def run(state: Any, ids: jax.Array) -> Any:
            return jax.lax.scan(lambda s, i: (step(s, i), None), state, ids, unroll=4)[0]

        self._run = jax.jit(run, donate_argnums=0)
        self._first = self._state = state

    def _fresh(self) -> Any:
        self._state = None  # its memory is needed for the next
        return jax.block_until_ready(jax.tree.map(jnp.copy, self._first))

    def __call__(self, ids: jax.Array) -> float:
        """Seconds of one call."""
        state = self._fresh()
        start = time.perf_counter()
        self._state = jax.block_until_ready(self._run(state, ids))
        return time.perf_counter() - start

    def check(self, name: str) -> None:
        """Raises if the state contains values that no computation wrote."""
        for leaf in jax.tree.leaves(self._state):
            if not bool(jnp.isfinite(leaf).all()):
                raise FloatingPointError(f"{name}: a result holds NaN or infinity")


class Called(Replayed):
    """The same steps as calls in a row: what a training loop in Python sees."""

    def __init__(self, step: Step, state: Any) -> None:
        self._run = jax.jit(step, donate_argnums=0)
        self._first = self._state = state

    def __call__(self, ids: jax.Array) -> float:
        parts = jax.block_until_ready([ids[k] for k in range(ids.shape[0])])
        state = self._fresh()
        start = time.perf_counter()
        for part in parts:
            state = self._run(state, part)
        self._state = jax.block_until_ready(state)
        return time.perf_counter() - start


def poison() -> None:
    """Leaves NaN in the memory that the next program will be given."""
    jax.block_until_ready(jnp.full((_POISON_BYTES // 4,), jnp.nan, jnp.float32))


def interleave(
    calls: Mapping[Name, Callable[[jax.Array], float]], work: Batches, stream: str, rounds: int
) -> dict[Name, Timing]:
    """Seconds of one step for each contender; contenders take turns."""
    rng = np.random.default_rng(0)
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for round_ in range(1 + rounds):  # the first compiles and is not counted
        for name, call in calls.items():
            ids = jax.block_until_ready(work.ids(rng, stream))
            poison()
            spent = call(ids)
            if round_:
                seconds[name].append(spent / work.steps)
    for name, call in calls.items():
        if isinstance(call, Replayed):
            call.check(str(name))
    return {name: Timing.of(values) for name, values in seconds.items()}
