"""Hash tables on the devices of two processes: each dumps its rows, and both load what both have dumped."""

import numpy as np
import pytest

from tests.processes import launch


@pytest.mark.slow
def test_two_processes_evict_remove_grow_dump_and_load_as_one(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    program = "kinds.sharded.keys_run"
    (alone,) = launch(tmp_path, 1, program, "Explicit", str(tmp_path / "one"))
    runs = launch(tmp_path, 2, program, "Explicit", str(tmp_path / "two"))
    assert alone["evicted"] > 20 and 0 < alone["written"][1] < alone["keys"]
    for own in runs:
        assert own.keys() == alone.keys()
        for name, array in alone.items():
            if name != "errors":
                np.testing.assert_array_equal(own[name], array, err_msg=name)
    # A table without room is refused by all; what one process cannot read, no process loads.
    (refused,) = alone["errors"]
    assert "keys find no room in 64 rows with ways=8 on 4 devices" in refused
    for process, own in enumerate(runs):
        assert own["errors"][0] == refused
        told = "no complete dump" if process else "process 1 failed, and this one stopped as well"
        assert told in own["errors"][1]
    names = {path.name for path in (tmp_path / "two" / "0").iterdir()}
    assert {"about.json", "rest.safetensors"} < names
    assert len(names) == 2 + 4 * 2  # at most 16 of the 64 keys of a process
