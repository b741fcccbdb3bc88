"""Rows beyond the device: training through tiers equals training one table."""

import random
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jax_tt
from tests import row_tiers_run

RULE = jax_tt.optimizers.Adagrad(0.1)


def collection_of(rows, rule=RULE, features=("seen", "cart")):
    tables = {
        "item": jax_tt.dense_table(rows, 8, optimizer=rule),
        "user": jax_tt.dense_table(10, 8, optimizer=rule),
    }
    specs = {"seen": jax_tt.Feature("item", combiner="mean"), "cart": jax_tt.Feature("item")}
    return jax_tt.Collection(tables, {**specs, "user": jax_tt.Feature("user")})


def stream(count, seed, pool=200):
    """Batches whose popular ids drift: pairs of one for tiers, and one with numbers from 0 for a large table."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 2**64, pool, dtype=np.uint64)
    ids[:4] = 0, 2**64 - 1, 2**63, 1
    for k in range(count):
        ranks = (draw.zipf(1.3, size=14) + k) % pool
        offsets = np.array([0, 3, 3, 8, 10], np.int32)
        pair = []
        for items in (ids[ranks], ranks):
            pair.append(
                {
                    "seen": jax_tt.Bags(items[:10], offsets),
                    "cart": items[10:].reshape(4, 1),
                    "user": np.arange(4)[:, None],
                }
            )
        yield ids, *pair


@pytest.mark.parametrize(
    ("rows", "host", "depth", "disk"),
    [(32, 512, 0, False), (32, 64, 3, True), (64, 16, 1, True)],
)
def test_equals_one_table(tmp_path, rows, host, depth, disk):
    small, large = collection_of(rows), collection_of(200)
    tier = jax_tt.Tier(host_rows=host, ways=8, seed=7)
    path = tmp_path / "rows" if disk else None
    steps = row_tiers_run.step_of(small), row_tiers_run.step_of(large)
    state = small.init(jax.random.key(0))
    batches = list(stream(60, 1))
    (ids, *_) = batches[0]
    whole = row_tiers_run.large_state(large, ids, 7)
    with jax_tt.Tiers(small, {"item": tier}, path=path, depth=depth) as tiers:
        for (_, _, numbered), staged in zip(
            batches, tiers.prefetch(b for _, b, _ in batches), strict=True
        ):
            state = tiers.load(state, staged)
            state, got = steps[0](state, staged.batch)
            whole, expected = steps[1](whole, numbered)
            assert got == expected
        assert (tiers.read(state, "item", ids) == whole["item"]["embedding"]).all()
        counts = tiers.statistics()["item"]
        assert counts.loaded == counts.created + counts.host_hits + counts.disk_hits
        assert counts.evicted > 0
        assert (counts.disk_hits > 0) == disk


@pytest.mark.full
def test_killed_training_goes_on(tmp_path):
    steps, draw = 400, random.Random(5)
    command = [sys.executable, "-m", "tests.row_tiers_run", "--steps", str(steps)]
    command.append(str(tmp_path))
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, 4)):
                assert process.stdout.readline().strip().isdigit()
            time.sleep(draw.random() / 20)
            process.kill()
    last, whole = (
        subprocess.run(own, capture_output=True, text=True, check=True).stdout.split()
        for own in (command, command[:-1])
    )
    assert len(last) < steps // row_tiers_run.EVERY  # it did not begin again
    assert last[-1] == whole[-1]
