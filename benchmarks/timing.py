"""Fair timing on a machine with some background load: contenders take turns, and medians are used.

Each round gives every contender a turn of a few calls. Between turns the process rests, so that one
contender's worker threads, which spin for a while after their work, do not slow the next one; the
first call of a turn is not counted, so that each measures warm.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

# OpenBLAS workers spin about 25 ms after their last work, OpenMP's and XLA's less.
REST_SECONDS = 0.05

Name = TypeVar("Name", bound=Hashable)
Call = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long to measure: rounds, and the seconds and calls of one contender's turn at most."""

    rounds: int = 7
    turn_seconds: float = 0.5
    turn_calls: int = 20

    @classmethod
    def quick(cls) -> "Budget":
        """Enough to see that everything runs."""
        return cls(rounds=2, turn_seconds=0.05, turn_calls=2)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: median, quartiles, the fastest, and the number of calls."""

    median: float
    lower: float
    upper: float
    fastest: float
    calls: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        if len(seconds) == 1:
            lower = upper = seconds[0]
        else:
            lower, _, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(statistics.median(seconds), lower, upper, min(seconds), len(seconds))


def interleave(calls: Mapping[Name, Call], budget: Budget) -> dict[Name, Timing]:
    """Times several functions turn by turn.

    Args:
        calls: functions by name. Each takes the number of the call, to choose its input by, and
            returns only when the work is finished.
        budget: how long to measure.

    Returns:
        A `Timing` for each name.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    per_turn = {name: _calls_per_turn(call, budget) for name, call in calls.items()}
    done = dict.fromkeys(calls, 0)
    for _ in range(budget.rounds):
        for name, call in calls.items():
            time.sleep(REST_SECONDS)
            call(done[name])
            for _ in range(per_turn[name]):
                done[name] += 1
                start = time.perf_counter()
                call(done[name])
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing.of(values) for name, values in seconds.items()}


def _calls_per_turn(call: Call, budget: Budget) -> int:
    call(0)  # compiles and allocates
    start = time.perf_counter()
    call(1)
    once = time.perf_counter() - start
    return max(1, min(budget.turn_calls, int(budget.turn_seconds / max(once, 1e-9))))
