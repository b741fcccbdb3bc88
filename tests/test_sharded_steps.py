"""Fifty steps of divided tables equal those of one device, in one process and in two."""

import numpy as np
import pytest

from tests.processes import launch

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The tables on one device."""
    (found,) = launch(tmp_path_factory.mktemp("alone"), 1, "sharded_modes_run", "0")
    return found


@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (1, 8), (2, 2)])
def test_fifty_steps_of_every_mode_equal_those_of_one_device(processes, devices, alone, tmp_path):
    for found in launch(tmp_path, processes, "sharded_modes_run", str(devices)):
        assert found.keys() == alone.keys()
        for name, array in found.items():
            tolerance = {"rtol": 1e-5, "atol": 1e-6}
            if name.startswith("narrow") or array.dtype.kind != "f":
                tolerance = {"rtol": 0, "atol": 0}
            if name.startswith("quantized") and name.endswith("rows"):
                # A value between two codes may be rounded to either.
                tolerance = {"rtol": 0, "atol": 2.1 / 255 * np.ptp(array)}
            np.testing.assert_allclose(array, alone[name], **tolerance, err_msg=name)
