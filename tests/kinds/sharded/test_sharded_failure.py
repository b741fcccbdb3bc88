"""A process that is killed stops the others, and fewer processes go on from the last checkpoint."""

import random
import shutil
import time

import numpy as np
import pytest

from tests.kinds.sharded.failure_run import EVERY, STEPS
from tests.processes import free_port, launch, outputs_of, started

pytestmark = pytest.mark.full
COUNT, MOST_SECONDS = 4, 60


def test_training_goes_on_with_two_processes_after_one_of_four_was_killed(tmp_path):
    folder, copy = tmp_path / "checkpoints", tmp_path / "copy"
    folder.mkdir()
    rng = random.Random()
    death = f"{rng.randrange(COUNT)}:{rng.randrange(EVERY, STEPS)}"
    port = free_port()
    workers = [
        started(
            "kinds.sharded.failure_run",
            str(k),
            str(COUNT),
            port,
            str(folder),
            death,
            str(tmp_path / "none.npz"),
        )
        for k in range(COUNT)
    ]
    killed = workers[int(death[0])]
    assert killed.wait(timeout=300) == -9, death
    begun = time.monotonic()
    outputs = outputs_of(workers, timeout=MOST_SECONDS)
    assert time.monotonic() - begun < MOST_SECONDS
    for worker, output in zip(workers, outputs, strict=True):
        if worker is not killed:
            assert worker.returncode not in (0, -9), f"{death}\n{output[-4000:]}"
            # The first process is host to the service that the others report to.
            message = (
                "oordination service"
                if killed is workers[0]
                else f"Task {death[0]} heartbeat timeout"
            )
            assert message in output, f"{death}\n{output[-4000:]}"
    assert not (tmp_path / "none.npz").exists()
    shutil.copytree(folder, copy)

    first, second = launch(tmp_path, 2, "kinds.sharded.failure_run", str(folder), "none")
    (alone,) = launch(tmp_path, 1, "kinds.sharded.failure_run", str(copy), "none")
    for found in first, second:
        assert found.keys() == alone.keys()
        for name, array in found.items():
            np.testing.assert_array_equal(array, alone[name], err_msg=f"{name}, {death}")
