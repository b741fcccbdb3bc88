"""The long run of random operations on hash tables over several devices, cut short."""

from functools import partial

import pytest
from jax.sharding import AxisType

from jax_tt._base.progress import Progress
from tests.kinds.hashed import hash_soak
from tests.processes import launch

OPERATIONS = 4000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "policy", "axis_type"),
    [(2, "lfu", AxisType.Explicit), (4, "epoch_lru", AxisType.Auto)],
)
def test_tables_over_devices_equal_dicts(devices, policy, axis_type):
    options = {"devices": devices, "others": (1, 3), "axis_type": axis_type}
    make = partial(hash_soak.HashRun, policy, "auto", **options)
    assert hash_soak.run(make, OPERATIONS, Progress(shown=False)) >= OPERATIONS


@pytest.mark.slow
def test_tables_over_eight_devices_of_two_processes_equal_dicts(tmp_path):
    given = "8", "auto", str(OPERATIONS), "0", "lfu"
    for counts in launch(tmp_path, 2, "kinds.sharded.model_run", *given):
        assert counts["lfu"] >= OPERATIONS
