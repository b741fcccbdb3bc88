"""Timing of steps on a device, such that only steps count.

A program makes many steps, each with ids of its own, and is called several times in a row on the state that the call
before has left. A round has a warm-up, a window of few calls and one of many. The time of a step is the slope between
the two windows, from which the start of a program, the first capture of its commands and the last wait drop out.

No step may be left out or overlap with the next one: contenders without a state that grows have `accumulated`, and
`compiled` compares the native calls of the compiled program with those that were traced. Ahead of each round, memory
that the program is about to be given is filled with NaN, so that results which nothing wrote cannot pass for results.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Timing

# One step with its carry: ``step(state, ids) -> state``.
Step = Callable[[Any, jax.Array], Any]
# Steps in the body of a program's loop, so that XLA captures a graph of several operations.
UNROLL = 4
_POISON_BYTES = 64 << 20
# Where other work disturbs a round so much that many calls take less time than few, it is repeated.
_MOST_REPEATED = 20


class Batches(Protocol):
    """What the steps of a program get."""

    @property
    def steps(self) -> int: ...

    def ids(self, rng: np.random.Generator, stream: str) -> jax.Array:
        """``[steps, ...]``"""
        ...


@dataclasses.dataclass(frozen=True)
class Windows:
    """How long to measure.

    Attributes:
        steps: of the short window at least; the long one has three times as many.
        rounds: at most.
        seconds: after which no further round begins.
    """

    steps: int = 256
    rounds: int = 5
    seconds: float = 2.0

    @classmethod
    def quick(cls) -> "Windows":
        """Enough to see that everything runs."""
        return cls(steps=2, rounds=2, seconds=1.0)


class Contender(Protocol):
    """Something that is timed."""

    def prepare(self, ids: jax.Array) -> None:
        """Compiles for ids of this shape, ``[steps, ...]``."""
        ...

    def restart(self) -> None:
        """Begins with the first state again: thousands of steps with the same gradient would diverge to infinity."""
        ...

    def run(self, ids: jax.Array, calls: int) -> float:
        """Seconds of so many times all steps."""
        ...

    def check(self, name: str) -> None:
        """Raises if a result cannot be right."""
        ...


def traced_calls(lowered: jax.stages.Lowered) -> int:
    """The native calls of a traced program; the body of a loop counts once."""
    parts = re.split(r"func\.func (?:public|private) @\"?([\w.<>-]+)\"?\(", lowered.as_text())
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))

    @functools.cache
    def count(name: str) -> int:
        called = re.findall(r"\bcall @\"?([\w.<>-]+)\"?\(", bodies[name])
        own = len(re.findall(r"stablehlo\.custom_call @\"?jax_tt_", bodies[name]))
        return own + sum(map(count, called))

    return count("main")


def compiled(
    function: Callable[..., Any], *arguments: Any, options: Mapping[str, Any] | None = None
) -> Any:
    """A compiled program whose first argument is donated.

    Args:
        function: the program.
        arguments: arrays, or shapes of arrays.
        options: of the compiler.

    Raises:
        AssertionError: the compiled program has not as many native calls as were traced.
    """
    compiler_options = None if options is None else dict(options)
    lowered = jax.jit(function, donate_argnums=0, compiler_options=compiler_options).lower(
        *arguments
    )
    program = lowered.compile()
    text = program.as_text() or ""
    traced, kept = traced_calls(lowered), len(re.findall(r'custom_call_target="jax_tt_', text))
    if kept != traced:
        raise AssertionError(
            f"the compiled program has {kept} native calls, but {traced} were traced; each step must use the result "
            "of the step before"
        )
    return program


class Replayed:
    """A contender: all steps of a call in one program.

    Args:
        step: one step; its state may not be larger than half of the memory.
        state: the first one.
        precision: of products in float32, as `jax.default_matmul_precision`; None leaves it unset.
        options: of the compiler.
    """

    def __init__(
        self,
        step: Step,
        state: Any,
        *,
        precision: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._step, self._first, self._state = step, state, state
        self._precision, self._options = precision, options
        self._program: Any = None

    def prepare(self, ids: jax.Array) -> None:
        def run(state: Any, ids: jax.Array) -> Any:
            return jax.lax.scan(lambda s, i: (self._step(s, i), None), state, ids, unroll=UNROLL)[0]

        self._compile(run, ids)

    def _compile(self, run: Step, ids: jax.Array) -> None:
        if self._program is not None:
            return
        with jax.default_matmul_precision(self._precision):
            self._program = compiled(run, self._first, ids, options=self._options)

    def restart(self) -> None:
        self._state = None  # its memory is needed for the next
        self._state = jax.block_until_ready(jax.tree.map(jnp.copy, self._first))

    def run(self, ids: jax.Array, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self._state = self._program(self._state, ids)
        jax.block_until_ready(self._state)
        return time.perf_counter() - start

    def check(self, name: str) -> None:
        for leaf in jax.tree.leaves(self._state):
            if not bool(jnp.isfinite(leaf).all()):
                raise FloatingPointError(f"{name}: a result holds NaN or infinity")


class Called(Replayed):
    """The same steps as calls in a row, each with arrays of its own: what a training loop in Python sees."""

    _parts: tuple[jax.Array, list[jax.Array]] | None = None

    def prepare(self, ids: jax.Array) -> None:
        self._parts = ids, jax.block_until_ready([ids[k] for k in range(ids.shape[0])])
        self._compile(self._step, self._parts[1][0])

    def run(self, ids: jax.Array, calls: int) -> float:
        if self._parts is None or self._parts[0] is not ids:
            raise ValueError("run: got other ids than prepare")
        start = time.perf_counter()
        for _ in range(calls):
            for part in self._parts[1]:
                self._state = self._program(self._state, part)
        jax.block_until_ready(self._state)
        return time.perf_counter() - start


def accumulated(
    call: Callable[[Any, jax.Array], Any], given: Any, example: jax.Array
) -> tuple[Step, Any]:
    """Steps that add what ``call(given, ids)`` returns to a sum, for calls that leave `given` as it is.

    The ids of a step wait for the sum, so that steps cannot overlap.

    Args:
        call: returns arrays, which are added in float32.
        given: the same for all steps.
        example: ids of a step.
    """

    def total(given: Any, ids: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), call(given, ids))

    def step(state: Any, ids: jax.Array) -> Any:
        given, sums = state
        waited = jnp.isnan(jax.tree.leaves(sums)[0].reshape(-1)[0])
        own = total(given, ids + waited.astype(ids.dtype))
        return given, jax.tree.map(jnp.add, sums, own)

    shapes = jax.eval_shape(total, given, example)
    return step, (given, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))


def poison() -> None:
    """Leaves NaN in the memory that the next program will be given."""
    jax.block_until_ready(jnp.full((_POISON_BYTES // 4,), jnp.nan, jnp.float32))


def timed(
    make: Callable[[], Contender],
    name: str,
    streams: Mapping[str, jax.Array],
    windows: Windows,
) -> Iterator[tuple[str, Timing]]:
    """The time of a step of one contender with the ids of each stream, by the name of the stream.

    Args:
        make: the contender, which lives until the last stream is done.
        name: for errors.
        streams: ids of all steps of a program, ``[steps, ...]``, the same for all contenders.
        windows: how long to measure.
    """
    contender = make()
    for stream, ids in streams.items():
        contender.prepare(ids)
        yield stream, Timing.of(_slopes(contender, ids, windows))
        contender.check(f"{name}, {stream}")


def _slopes(contender: Contender, ids: jax.Array, windows: Windows) -> list[float]:
    few = -(-windows.steps // ids.shape[0])
    end = time.monotonic() + windows.seconds
    slopes: list[float] = []
    for _ in range(windows.rounds + _MOST_REPEATED):
        if len(slopes) == windows.rounds or (slopes and time.monotonic() > end):
            break
        contender.restart()
        poison()
        contender.run(ids, few)  # to the clocks and the buffers of the next
        short = contender.run(ids, few)
        long = contender.run(ids, 3 * few)
        if long > short:
            slopes.append((long - short) / (2 * few * ids.shape[0]))
    if not slopes:
        raise RuntimeError("many steps never took longer than few: the machine has other work")
    return slopes
