"""`order.from_interactions` on many ids: time, memory, and how much of a planted hierarchy it finds.

    python -m benchmarks.order_scale --ids 1000000 --interactions 20000000

Users of a block take 90 % of their items there, most of them in their own part of the block; ids are scattered. Found
is the share of pairs of a block's ids that have the same first digit.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

import jax_tt


def planted(
    shape: jax_tt.TTShape, users: int, interactions: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users and ids, int32 [n], and the block of every id."""
    rng = np.random.default_rng(seed)
    ids, (blocks, parts) = shape.num_embeddings, shape.row_factors[:2]
    size, part_size = ids // blocks, ids // blocks // parts
    user = rng.integers(0, users, interactions, np.int32)
    first = user % blocks * size
    item = rng.integers(0, ids, interactions, np.int32)  # of 10 %: anywhere
    where = rng.random(interactions, np.float32)
    near = where < 0.9
    item[near] = first[near] + rng.integers(0, size, int(near.sum()), np.int32)
    near = where < 0.5
    part = first[near] + user[near] // blocks % parts * part_size
    item[near] = part + rng.integers(0, part_size, len(part), np.int32)
    scattered = rng.permutation(ids).astype(np.int32)
    block = np.empty(ids, np.int32)
    block[scattered] = np.arange(ids) // size
    return user, scattered[item], block


def found(order: jax_tt.order.IdOrder, block: np.ndarray, shape: jax_tt.TTShape) -> float:
    """Share of pairs of ids of a block whose first digit is the same."""
    digit = order.rows // (shape.num_rows // shape.row_factors[0])
    together = np.unique(digit.astype(np.int64) * len(block) + block, return_counts=True)[1]
    whole = np.bincount(block)
    return float((together * (together - 1)).sum() / (whole * (whole - 1)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in (("ids", 10**6), ("users", 500_000), ("interactions", 2 * 10**7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    blocks = options.blocks
    shape = jax_tt.TTShape(
        options.ids, 64, 16, (blocks, 100, options.ids // blocks // 100), (4,) * 3
    )
    *pairs, block = planted(shape, options.users, options.interactions, options.seed)
    wall, cpu = time.perf_counter(), time.process_time()
    order = jax_tt.order.from_interactions(tuple(pairs), shape)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{options.ids:,} ids, {options.interactions:,} interactions: {wall:.0f} s ({cpu:.0f} s of processor time), "
        f"peak memory {peak:.2f} GiB, {100 * found(order, block, shape):.2f} % of pairs found"
    )


if __name__ == "__main__":
    main()
