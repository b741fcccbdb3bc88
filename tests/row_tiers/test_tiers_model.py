"""Random operations on tiers against one table with a row for every id."""

import jax
import numpy as np
import pytest

import jax_tt
from tests.row_tiers import row_tiers_run
from tests.row_tiers.test_row_tiers import RULE

POOL, SEED = 120, 3


def collection_of(rows):
    table = jax_tt.dense_table(rows, 8, optimizer=RULE, takes_slots=rows < POOL)
    return jax_tt.Collection({"item": table}, {"seen": jax_tt.Feature("item")})


LARGE = collection_of(POOL)
STEPS = {rows: row_tiers_run.step_of(collection_of(rows)) for rows in (16, 24, 48, POOL)}


class Model:
    """Tiers of random sizes, and a large table which is trained on the same batches."""

    def __init__(self, path, seed):
        self.draw, self.path = np.random.default_rng(seed), path
        self.ids = self.draw.integers(0, 2**64, POOL, dtype=np.uint64)
        self.ids[:4] = 0, 2**64 - 1, 2**63, 1
        self.whole = row_tiers_run.large_state(LARGE, self.ids, SEED)
        self.dumps = 0
        self.directory = None
        self.open(saved=None)

    def open(self, saved):
        """New tiers, in a new directory unless there is one with a saved state."""
        self.rows = int(self.draw.choice([16, 24, 48]))
        disk = saved is not None or self.draw.random() < 0.7
        if saved is None:
            self.dumps += 1
            self.directory = self.path / f"rows-{self.dumps}" if disk else None
        host = 8 * int(self.draw.integers(1, 8)) if disk else POOL
        tier = jax_tt.Tier(
            host_rows=host, ways=8, seed=SEED, policy=str(self.draw.choice(["lru", "lfu"]))
        )
        depth = int(self.draw.integers(0, 4))
        collection = collection_of(self.rows)
        self.tiers = jax_tt.Tiers(collection, {"item": tier}, path=self.directory, depth=depth)
        self.state, self.saved = collection.init(jax.random.key(0)), saved
        if saved is not None:
            other, self.state = self.tiers.restore(self.state)
            assert other == b"saved"
            self.whole = saved

    def batch(self):
        return (self.draw.zipf(1.1, (12, 1)) + self.draw.integers(POOL)) % POOL

    def train(self):
        """Some of the batches that are prefetched."""
        batches = [self.batch() for _ in range(self.draw.integers(1, 8))]
        last = self.draw.integers(1, len(batches) + 1)
        iteration = self.tiers.prefetch({"seen": self.ids[ranks]} for ranks in batches)
        for ranks in batches[:last]:
            staged = next(iteration)
            self.state = self.tiers.load(self.state, staged)
            self.state, got = STEPS[self.rows](self.state, staged.batch)
            self.whole, expected = STEPS[POOL](self.whole, {"seen": ranks})
            assert got == expected
        iteration.close()

    def fail(self):
        """A batch with an id that is no integer ends an iteration."""
        with pytest.raises(TypeError, match="expected integers"):
            list(self.tiers.prefetch([{"seen": np.ones((8, 1))}]))

    def save(self):
        if self.directory is not None:
            self.tiers.save(self.state, b"saved")
            self.saved = jax.tree.map(np.array, self.whole)

    def reopen(self):
        """What was saved last, if anything was."""
        if self.saved is not None:
            self.tiers.close()
            self.open(self.saved)

    def move(self):
        """A dump of everything into other tiers."""
        path = self.path / f"dump-{self.dumps}"
        self.tiers.dump(self.state, "item", path, rows_per_file=31)
        self.tiers.close()
        step = self.state["updates"]["step"]
        self.open(None)
        self.state = self.tiers.load_dump(self.state, "item", path)
        self.state = {**self.state, "updates": {**self.state["updates"], "step": step}}

    def read(self):
        some = self.draw.integers(0, POOL, self.draw.integers(0, 40))
        found = self.tiers.read(self.state, "item", self.ids[some])
        assert (found == np.asarray(self.whole["item"]["embedding"])[some]).all()


def test_tiers_equal_one_table(tmp_path):
    model = Model(tmp_path, seed=1)
    operations = [model.train] * 6 + [model.save, model.reopen, model.move, model.fail, model.read]
    for k in model.draw.integers(0, len(operations), 100):
        operations[k]()
    model.read()
    model.tiers.close()
