"""Hash tables move over other numbers of devices and back: all keys, or an error before anything changes."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_tt

CAPACITY = 1536  # a multiple of the ways times 8 and times 3


def _keys(load):
    return np.random.default_rng(0).integers(0, 2**64, int(load * CAPACITY), dtype=np.uint64)


def _table(devices, capacity):
    plain = jax_tt.hash_table(capacity, 2)
    if devices == 1:
        return plain
    mesh = jax.make_mesh(
        (devices,),
        ("model",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    return jax_tt.shard_tables({"item": plain}, mesh, "model")["item"]


def _advised(error):
    return int(re.search(r"expected a capacity of (\d+)", str(error)).group(1))


@pytest.mark.parametrize("load", [0.75, 0.98])
def test_dumps_come_to_other_devices_and_back(load, tmp_path):
    keys = _keys(load)
    dense = jax_tt.dense_table(len(keys), 2)
    rows = dense.init(jax.random.key(0))
    jax_tt.files.dump(dense, rows, tmp_path / "0", keys=keys, progress=False)
    refused = 0
    for step, devices in enumerate((1, 2, 4, 3, 1)):
        table = _table(devices, CAPACITY)
        start = table.init(jax.random.key(1))
        before = jax.device_get(start)
        options = {"progress": False, "overflow": "error"}
        path = tmp_path / str(step)
        try:
            counts, state = jax_tt.files.load_dump(table, start, path, **options)
        except ValueError as error:
            refused += 1
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(start), before)
            table = _table(devices, _advised(error))
            start = table.init(jax.random.key(1))
            counts, state = jax_tt.files.load_dump(table, start, path, **options)
        assert counts == (len(keys), 0, 0, 0)
        jax_tt.files.dump(table, state, tmp_path / str(step + 1), progress=False)
        found = np.sort(jax_tt.dynamic.keys_of(table, state), order="key")
        np.testing.assert_array_equal(found["key"], np.sort(keys))
        np.testing.assert_array_equal(
            np.asarray(state["embedding"])[found["slot"]],
            np.asarray(rows["embedding"])[np.argsort(keys)],
        )
    assert refused == 0 or load > 0.9
    _, back = jax_tt.files.load_dump(
        dense, dense.init(jax.random.key(2)), tmp_path / "5", keys=keys, progress=False
    )
    np.testing.assert_array_equal(back["embedding"], rows["embedding"])
