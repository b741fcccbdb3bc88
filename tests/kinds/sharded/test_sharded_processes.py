"""Sharded tables on the devices of two processes equal those of one process with as many devices."""

import numpy as np
import pytest

from tests.kinds.sharded import collection_run, group_run, keys_run
from tests.processes import launch


@pytest.mark.slow
@pytest.mark.dear("two processes trace and compile what several kinds of sharded tables do")
@pytest.mark.usefixtures("promotion_of_a_user")
def test_two_processes_equal_one(tmp_path):
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    runs = launch(tmp_path, 2, "kinds.sharded.group_run", str(folders[1]))
    _check_collections(collection_run.results(0, 1), _named("collection", runs))
    _check_keys(keys_run.results(0, folders[0]), _named("keys", runs))
    _check_dump(folders[1] / "0")
    assert all(own["operations"] >= group_run.OPERATIONS for own in runs)


def _named(what, runs):
    """The results of one of the things that the processes have done."""
    start = f"{what}: "
    return [
        {name.removeprefix(start): x for name, x in own.items() if name.startswith(start)}
        for own in runs
    ]


def _check_collections(alone, runs):
    for own in runs:
        assert own.keys() == alone.keys()
        for name, array in own.items():
            # The gradients of cores are sums over devices.
            exact = name.startswith(("item", "user"))
            tolerance = {} if exact else {"rtol": 1e-5, "atol": 1e-6}
            np.testing.assert_allclose(
                array, alone[name], **({"rtol": 0} | tolerance), err_msg=name
            )


def _check_keys(alone, runs):
    assert alone["evicted"] > 20 and 0 < alone["written"][1] < alone["keys"]
    for own in runs:
        assert own.keys() == alone.keys()
        for name, array in alone.items():
            if name != "errors":
                np.testing.assert_array_equal(own[name], array, err_msg=name)
    assert len(alone["restored key"]) > 0.9 * alone["written"][0]
    assert 48 < len(alone["tiny key"]) <= 64 < alone["written"][0]
    # A table without room may be refused by all; what one process cannot read, no process loads.
    (refused,) = alone["errors"]
    assert "keys find no room in 64 rows with ways=8 on 4 devices" in refused
    for process, own in enumerate(runs):
        assert own["errors"][0] == refused
        told = "no complete dump" if process else "process 1 failed, and this one stopped as well"
        assert told in own["errors"][1]


def _check_dump(path):
    """Each process has written its rows."""
    names = {file.name for file in path.iterdir()}
    assert "dump.safetensors" in names
    assert len(names) == 1 + 4 * 2  # at most 16 of the 64 keys of a process
