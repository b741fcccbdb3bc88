"""Rows beyond the device: training through tiers equals training one table."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._hash.initial import Normal, initial_rows
from jax_tt._tiers.words import to_words

RULE = jax_tt.optimizers.Adagrad(0.1)


def collection_of(rows, rule=RULE, features=("seen", "cart")):
    tables = {
        "item": jax_tt.dense_table(rows, 8, optimizer=rule),
        "user": jax_tt.dense_table(10, 8, optimizer=rule),
    }
    specs = {"seen": jax_tt.Feature("item", combiner="mean"), "cart": jax_tt.Feature("item")}
    return jax_tt.Collection(tables, {**specs, "user": jax_tt.Feature("user")})


def step_of(collection):
    @jax.jit
    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.embed_collection(collection, arrays, batch)
            return sum(jnp.sum((row - 0.1) ** 2) for row in rows.values())

        value, gradients = jax.value_and_grad(loss)(collection.trained(state))
        return collection.overwritten(state, gradients)[0], value

    return step


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


def large_state(collection, ids, seed):
    state = collection.init(jax.random.key(0))
    words = np.array([seed >> 32, seed], np.int64).astype(np.uint32)
    rows = initial_rows(Normal(8**-0.5), words, to_words(ids), 8)
    return {**state, "item": {**state["item"], "embedding": rows}}


@pytest.mark.parametrize(
    ("rows", "host", "depth", "disk"),
    [(32, 512, 0, False), (32, 64, 3, True), (64, 16, 1, True)],
)
def test_equals_one_table(tmp_path, rows, host, depth, disk):
    small, large = collection_of(rows), collection_of(200)
    tier = jax_tt.Tier(host_rows=host, ways=8, seed=7)
    path = tmp_path / "rows" if disk else None
    steps = step_of(small), step_of(large)
    state = small.init(jax.random.key(0))
    batches = list(stream(60, 1))
    (ids, *_) = batches[0]
    whole = large_state(large, ids, 7)
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
