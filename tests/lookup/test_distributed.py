"""Data parallelism over processes: two of them on loopback, each with half of the batch, equal one with all of it."""

import numpy as np
import pytest

from tests.processes import launch

KINDS = ("tt", "tt fused", "dense fused", "tt fused shard_map")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """What one process computes, then each of two."""
    folder = tmp_path_factory.mktemp("distributed")
    return [
        *launch(folder, 1, "lookup.distributed_run"),
        *launch(folder, 2, "lookup.distributed_run"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(kind, runs):
    alone, first, second = runs
    names = [name for name in alone if name.rsplit(" ", 1)[0] == kind]
    assert names
    for name in names:
        np.testing.assert_array_equal(
            first[name], second[name], err_msg=f"{name} differs between processes"
        )
        np.testing.assert_allclose(first[name], alone[name], rtol=2e-5, atol=2e-5, err_msg=name)
    losses = alone[f"{kind} losses"]
    assert len(set(losses.tolist())) == len(losses)  # the steps did something


@pytest.fixture(scope="module")
def sharded_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one process computes with sharded tables."""
    (found,) = launch(tmp_path_factory.mktemp("sharded"), 1, "kinds.sharded.sharded_run")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_with_sharded_tables_equal_one(count, sharded_alone, tmp_path):
    for own in launch(tmp_path, count, "kinds.sharded.sharded_run"):
        assert own.keys() == sharded_alone.keys()
        for name, array in own.items():
            # The gradients of cores are sums over devices.
            exact = name.startswith(("item", "user"))
            tolerance = {} if exact else {"rtol": 1e-5, "atol": 1e-6}
            np.testing.assert_allclose(
                array, sharded_alone[name], **({"rtol": 0} | tolerance), err_msg=name
            )
