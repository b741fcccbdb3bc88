"""A process that is killed stops the others; what was complete before that is read."""

import random
import shutil
import time

import jax
import numpy as np
import pytest

import jax_tt
from tests.kinds.sharded.failure_run import EVERY, STEPS, final_rows
from tests.processes import free_port, outputs_of, started

PROGRAM = "kinds.sharded.failure_run"
COUNT, MOST_SECONDS = 3, 60


@pytest.mark.slow
@pytest.mark.dear("starts five processes, some of which train together")
@pytest.mark.usefixtures("promotion_of_a_user")
def test_training_goes_on_after_a_process_was_killed(tmp_path):
    folder, copy = tmp_path / "checkpoints", tmp_path / "copy"
    folder.mkdir()
    death = _check_one_of_three_is_killed(folder, str(tmp_path / "none.npz"))
    assert not (tmp_path / "none.npz").exists()
    shutil.copytree(folder, copy)
    runs = _two_of_which_one_is_killed_at_the_end(tmp_path, folder)
    alone, whole = final_rows(0, 1, copy), final_rows(0, 1, tmp_path / "nothing")
    for name, array in alone.items():
        for run in runs:
            np.testing.assert_array_equal(run[name], array, err_msg=f"{name}, {death}")
        np.testing.assert_allclose(array, whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
    _check_damaged_dumps(folder, runs)


def _check_one_of_three_is_killed(folder, out):
    """The others stop, and say why; returns which one, and at which step."""
    rng = random.Random()
    death = f"{rng.randrange(COUNT)}:{rng.randrange(EVERY, STEPS)}"
    port = free_port()
    workers = [
        started(PROGRAM, str(process), str(COUNT), port, str(folder), death, out)
        for process in range(COUNT)
    ]
    killed = workers[int(death[0])]
    assert killed.wait(timeout=300) == -9, death
    begun = time.monotonic()
    outputs = outputs_of(workers, timeout=MOST_SECONDS)
    assert time.monotonic() - begun < MOST_SECONDS
    # The first process is host to the service that the others report to.
    message = "oordination service" if death[0] == "0" else f"Task {death[0]} heartbeat timeout"
    for worker, output in zip(workers, outputs, strict=True):
        if worker is not killed:
            assert worker.returncode not in (0, -9), f"{death}\n{output[-4000:]}"
            assert message in output, f"{death}\n{output[-4000:]}"
    return death


def _two_of_which_one_is_killed_at_the_end(tmp_path, folder):
    port, paths = free_port(), [tmp_path / f"{process}.npz" for process in (0, 1)]
    workers = [
        started(PROGRAM, str(process), "2", port, str(folder), "none", str(path))
        for process, path in enumerate(paths)
    ]
    outputs = outputs_of(workers, timeout=4 * MOST_SECONDS)
    assert workers[1].returncode == -9, "\n".join(output[-4000:] for output in outputs)
    assert workers[0].returncode not in (0, -9), outputs[0][-4000:]
    return [dict(np.load(path)) for path in paths]


def _check_damaged_dumps(folder, runs):
    files = runs[0]["files"].tolist()
    assert len(files) >= 5 and "dump.safetensors" in files
    for process, run in enumerate(runs):
        full, other, *changed = run["messages"].tolist()
        told = [full, other] if process == 0 else [other, full]
        assert "cannot be written" in told[0] and "File too large" in told[0]
        assert f"process {1 - process} failed, and this one stopped as well" in told[1]
        assert len(changed) == len(files)
        for name, message in zip(files, changed, strict=True):
            assert "damaged" in message or "not a complete safetensors file" in message, (
                name,
                message,
            )
    table = jax_tt.hash_table(64, 4, optimizer=jax_tt.optimizers.Adagrad(0.1))
    state = table.init(jax.random.key(0))
    # What the killed dump has left does not matter, to readers and to the next one.
    assert (folder / ".jax_tt_dump.unfinished").is_dir()
    for _ in range(2):
        _, found = jax_tt.files.load_dump(table, state, folder / "dump")
        keys = jax_tt.dynamic.keys_of(table, found)["key"]
        np.testing.assert_array_equal(np.sort(keys), runs[0]["keys"])
        jax_tt.files.dump(table, found, folder / "dump", overwrite=True)
    assert not (folder / ".jax_tt_dump.unfinished").exists()
