"""Fifty steps of divided tables equal those of one device, on several devices and in several processes."""

import numpy as np
import pytest

from tests.processes import launch

pytestmark = pytest.mark.slow

# Their gradients are sums that are exact in any order, and native operations step them.
EXACT = ("rows", "hash")
# What is looked up in the first step does not depend on the order of sums.
ROWS_TRAVEL = (*EXACT, "expected", "train", "cached")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The tables on one device."""
    (found,) = launch(tmp_path_factory.mktemp("alone"), 1, "kinds.sharded.sharded_modes_run", "0")
    return found


@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (1, 8), (2, 4), (4, 4)])
def test_fifty_steps_of_every_mode_equal_those_of_one_device(processes, devices, alone, tmp_path):
    for found in launch(tmp_path, processes, "kinds.sharded.sharded_modes_run", str(devices)):
        assert found.keys() == alone.keys()
        for name, array in found.items():
            tolerance = _tolerance(name, alone[name])
            np.testing.assert_allclose(
                array, alone[name], rtol=0, atol=tolerance, err_msg=name, equal_nan=False
            )
            if name.endswith("looked up") and name.startswith(ROWS_TRAVEL):
                np.testing.assert_array_equal(array[0], alone[name][0], err_msg=name)


def _tolerance(name: str, expected: np.ndarray) -> float:
    mode, looked_up = name.split()[0], name.endswith("looked up")
    if mode in EXACT or expected.dtype.kind != "f" or (mode == "narrow" and not looked_up):
        return 0
    largest = float(np.max(np.abs(expected)))
    if mode == "narrow":  # rows are rounded before they travel
        return 2**-8 * largest
    if mode == "quantized" and (looked_up or name.endswith("rows")):
        # A value between two codes may be rounded to either.
        return 2 * 2.1 / 255 * largest
    return 1e-6 * max(1, largest)
