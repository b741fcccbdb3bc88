"""Sharded tables over processes: two of them on loopback equal one with all of the tables."""

import numpy as np
import pytest

from tests.processes import launch


@pytest.mark.slow
@pytest.mark.dear("three processes compile the steps of every kind of sharded table")
def test_processes_with_sharded_tables_equal_one(tmp_path):
    (alone,) = launch(tmp_path, 1, "kinds.sharded.sharded_run")
    for own in launch(tmp_path, 2, "kinds.sharded.sharded_run"):
        assert own.keys() == alone.keys()
        for name, array in own.items():
            # The gradients of cores are sums over devices.
            exact = name.startswith(("item", "user"))
            tolerance = {} if exact else {"rtol": 1e-5, "atol": 1e-6}
            np.testing.assert_allclose(
                array, alone[name], **({"rtol": 0} | tolerance), err_msg=name
            )
