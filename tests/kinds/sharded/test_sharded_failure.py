"""A process that is killed stops the others; what was complete before that is read."""

import random
import shutil
import time

import jax
import numpy as np
import pytest

import jax_tt
from tests.kinds.sharded.failure_run import EVERY, STEPS
from tests.processes import free_port, launch, outputs_of, started

pytestmark = pytest.mark.slow
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


def test_dumps_of_two_processes_after_full_disks_changed_bytes_and_a_process_that_was_killed(
    tmp_path,
):
    port, paths = free_port(), [tmp_path / f"{process}.npz" for process in (0, 1)]
    workers = [
        started("kinds.sharded.damaged_dump_run", str(process), "2", port, str(tmp_path), str(path))
        for process, path in enumerate(paths)
    ]
    outputs = outputs_of(workers, timeout=4 * MOST_SECONDS)
    assert workers[1].returncode == -9, "\n".join(output[-4000:] for output in outputs)
    assert workers[0].returncode not in (0, -9), outputs[0][-4000:]
    runs = [dict(np.load(path)) for path in paths]
    files = runs[0]["files"].tolist()
    assert len(files) >= 5 and {"about.json", "rest.safetensors"} < set(files)
    for process, run in enumerate(runs):
        full, other, *changed = run["messages"].tolist()
        told = [full, other] if process == 0 else [other, full]
        assert "cannot be written" in told[0] and "File too large" in told[0]
        assert f"process {1 - process} failed, and this one stopped as well" in told[1]
        assert len(changed) == len(files)
        for name, message in zip(files, changed, strict=True):
            assert "damaged" in message or "no whole safetensors file" in message, (name, message)
    table = jax_tt.hash_table(64, 4, optimizer=jax_tt.optimizers.Adagrad(0.1))
    state = table.init(jax.random.key(0))
    # What the killed dump has left does not matter, to readers and to the next one.
    assert (tmp_path / ".jax_tt_dump.unfinished").is_dir()
    for _ in range(2):
        _, found = jax_tt.files.load_dump(table, state, tmp_path / "dump")
        keys = jax_tt.dynamic.keys_of(table, found)["key"]
        np.testing.assert_array_equal(np.sort(keys), runs[0]["keys"])
        jax_tt.files.dump(table, found, tmp_path / "dump", overwrite=True)
    assert not (tmp_path / ".jax_tt_dump.unfinished").exists()
