"""Training through tiers in a process that may be killed at any time.

    python -m tests.row_tiers.row_tiers_run --steps 2000 DIRECTORY

It goes on from what was saved last, and prints the state after the last step as a digest, which does not depend on when
it was killed, how far batches are prefetched, or which rows were on the device: it is that of one table with all rows.
"""

import argparse
import hashlib
import random

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt._directories.initial import Normal, initial_rows
from jax_tt._directories.placing import words_of_keys

POOL, DEVICE_ROWS, HOST_ROWS, SEED, EVERY = 400, 48, 96, 7, 25


def collection_of(rows, takes_slots=False):
    rule = jax_tt.optimizers.Adam(0.05)
    table = jax_tt.dense_table(rows, 8, optimizer=rule, takes_slots=takes_slots)
    features = {"seen": jax_tt.Feature("item", combiner="mean"), "cart": jax_tt.Feature("item")}
    return jax_tt.Collection({"item": table}, features)


def step_of(collection):
    @jax.jit
    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return sum(jnp.sum((row - 0.1) ** 2) for row in rows.values())

        value, gradients = jax.value_and_grad(loss)(collection.trained(state))
        return collection.overwritten(state, gradients)[0], value

    return step


def ids_of_stream():
    ids = np.random.default_rng(3).integers(0, 2**64, POOL, dtype=np.uint64)
    ids[:4] = 0, 2**64 - 1, 2**63, 1
    return ids


def batch_of(step):
    """The ids of a step as ranks in the pool; the popular ones drift."""
    draw = np.random.default_rng([4, step])
    ranks = (draw.zipf(1.3, size=14) + step // 3) % POOL
    offsets = np.array([0, 3, 3, 8, 10], np.int32)
    return {"seen": jax_tt.Bags(ranks[:10], offsets), "cart": ranks[10:].reshape(4, 1)}


def with_ids(batch, ids):
    seen = jax_tt.Bags(ids[batch["seen"].ids], batch["seen"].offsets)
    return {"seen": seen, "cart": ids[batch["cart"]]}


def digest(rows, state):
    parts = rows, state["updates"]["step"]
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    ).hexdigest()


def large_state(collection, ids, seed):
    """The state of one table whose rows are those of the ids."""
    state = collection.init(jax.random.key(0))
    words = np.array([seed >> 32, seed], np.int64).astype(np.uint32)
    rows = initial_rows(Normal(8**-0.5), words, words_of_keys(ids), 8)
    return {**state, "item": {**state["item"], "embedding": rows}}


def digest_of_one_table(steps):
    collection = collection_of(POOL)
    state, step = large_state(collection, ids_of_stream(), SEED), step_of(collection)
    for k in range(steps):
        state, _ = step(state, batch_of(k))
    return digest(np.asarray(state["item"]["embedding"]), state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    collection, ids = collection_of(DEVICE_ROWS, takes_slots=True), ids_of_stream()
    step, first = step_of(collection), 0
    depth = random.randrange(4)
    tier = jax_tt.Tier(host_rows=HOST_ROWS, ways=8, seed=SEED)
    with jax_tt.Tiers(collection, {"item": tier}, path=options.directory, depth=depth) as tiers:
        state = collection.init(jax.random.key(0))
        if found := tiers.restore(state):
            saved, state = found
            first = int(saved)
        batches = (with_ids(batch_of(k), ids) for k in range(first, options.steps))
        for k, staged in enumerate(tiers.prefetch(batches), first + 1):
            state, _ = step(tiers.load(state, staged), staged.batch)
            if k % EVERY == 0:
                tiers.save(state, str(k).encode())
                print(k, flush=True)
        print(digest(tiers.read(state, "item", ids), state), flush=True)


if __name__ == "__main__":
    main()
