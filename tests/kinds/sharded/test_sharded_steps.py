"""Steps of tables over eight devices of two processes equal those of one device."""

import numpy as np
import pytest

from tests.processes import launch

# Their gradients are sums that are exact in any order, and native operations step them.
EXACT = ("rows", "hash")
# What is looked up in the first step does not depend on the order of sums.
ROWS_TRAVEL = (*EXACT, "cached")


@pytest.mark.slow
@pytest.mark.dear("three processes compile a program of every mode")
def test_steps_of_every_mode_equal_those_of_one_device(tmp_path):
    program = "kinds.sharded.sharded_modes_run"
    (alone,) = launch(tmp_path, 1, program, "0")
    for found in launch(tmp_path, 2, program, "8"):
        assert found.keys() == alone.keys()
        for name, array in found.items():
            tolerance = _tolerance(name, alone[name])
            np.testing.assert_allclose(
                array, alone[name], rtol=0, atol=tolerance, err_msg=name, equal_nan=False
            )
            if name.endswith("looked up") and name.startswith(ROWS_TRAVEL):
                np.testing.assert_array_equal(array[0], alone[name][0], err_msg=name)


def _tolerance(name: str, expected: np.ndarray) -> float:
    if name.split()[0] in EXACT or expected.dtype.kind != "f":
        return 0
    return 1e-6 * max(1, float(np.max(np.abs(expected))))
