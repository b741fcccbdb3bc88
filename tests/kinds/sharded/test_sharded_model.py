"""The long run of random operations on hash tables over several devices, cut short."""

from functools import partial

import pytest
from jax.sharding import AxisType

from jax_tt._base.progress import Progress
from tests.kinds.hashed import hash_soak

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
