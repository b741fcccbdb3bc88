"""Times the training steps of several variants turn by turn in one process, for ratios of their times.

The demo trains its variants one after the other; other work on the machine would shift such ratios.

python -m examples.dlrm.step_time --variants dense_fused tt_fused
"""

import itertools
import sys

import jax

from benchmarks.timing import Budget, Call, Timing, interleave
from examples.dlrm import devices
from examples.dlrm.config import VARIANTS, Config, parse
from examples.dlrm.learner import start
from examples.dlrm.train import open_data

BATCHES = 20
WARM_UP = 5  # steps of each variant before the first turn


def main(argv: list[str]) -> None:
    """Runs the command line, which is that of `main`."""
    plan = parse(argv)
    devices.use(plan.config)
    calls = {variant: _training(plan.config, variant) for variant in plan.variants}
    timings = interleave(calls, Budget(rounds=25, turn_seconds=0.5, turn_calls=20))
    base = timings[plan.variants[0]]
    for variant, timing in timings.items():
        print(f"{VARIANTS[variant]:13}  {_text(timing)}  {timing.median / base.median:.2f}x")


def _training(config: Config, variant: str) -> Call:
    """A function that makes one step and returns when it is finished."""
    data = open_data(config)
    learner, values = start(config, variant, data)
    first = itertools.islice(data.stream(data.start), BATCHES)
    batches = [jax.device_put(batch) for batch, _ in first]

    def call(i: int) -> object:
        nonlocal values
        values, loss = learner.step(values, batches[i % BATCHES])
        return jax.block_until_ready((values, loss))

    for i in range(WARM_UP):
        call(i)
    return call


def _text(timing: Timing) -> str:
    quartiles = f"{1e3 * timing.lower:.2f} - {1e3 * timing.upper:.2f}"
    return f"{1e3 * timing.median:.2f} ms (quartiles {quartiles}, {timing.calls} steps)"


if __name__ == "__main__":
    main(sys.argv[1:])
