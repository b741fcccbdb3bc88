"""A stream of ids that come once: with expiry, memory and files stay as large as what is there."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_tt

IDS, BATCH, WINDOW = 240_000, 4000, 5


def resident():
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.slow
def test_ids_that_come_once(tmp_path):
    rule = jax_tt.optimizers.Adagrad(0.1)
    table = jax_tt.dense_table(2 * BATCH, 16, optimizer=rule, takes_slots=True)
    collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    tier = jax_tt.Tier(host_rows=2 * BATCH, ages=True)
    draw, sizes = np.random.default_rng(0), []
    with jax_tt.Tiers(collection, {"item": tier}, path=tmp_path) as tiers:
        state = collection.init(jax.random.key(0))
        for _ in range(IDS // BATCH // WINDOW):
            batches = draw.integers(0, 2**64, (WINDOW, BATCH, 1), dtype=np.uint64)
            for staged in tiers.prefetch({"item": batch} for batch in batches):
                state = tiers.load(state, staged)
            removed = tiers.remove("item", where=lambda view: view.age >= WINDOW)
            assert len(removed) == (BATCH * WINDOW if sizes else 0)
            tiers.save(state)
            files = sum(path.stat().st_size for path in tmp_path.iterdir())
            sizes.append((files, resident()))
        rows = 2 * WINDOW * BATCH  # at most, before those of an earlier window are removed
        record = tiers.statistics()["item"].record_bytes
    warm, last = sizes[len(sizes) // 2], sizes[-1]
    assert last[0] < 4 * rows * record
    assert last[0] < 1.3 * warm[0]
    # Indices of keys that change all the time spread a little; the rows and their entries would take three times as
    # much.
    assert last[1] - warm[1] < max(16 << 20, IDS // 2 * (record + 56) // 3)
