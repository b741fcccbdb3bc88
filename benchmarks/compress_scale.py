"""Compresses a synthetic table on disk and prints errors, passes' time and peak memory.

    python -m benchmarks.compress_scale --rows 10000000 --features 64 --ranks 32

The table is a tensor train of rank 24 and noise a tenth as large: the least possible relative error is just below 0.1.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jax_tt

_RANK = 24
_NOISE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--max-bytes", type=int)
    parser.add_argument("--d", type=int, default=3)
    parser.add_argument(
        "--weighted", action="store_true", help="Zipf weights and two sweeps of ALS"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = jax_tt.TTShape.suggest(args.rows, args.features, _RANK, args.d)
        table = write_table(Path(folder) / "table.f32", shape)
        print(f"table: {table.nbytes / 2**30:.2f} GiB on disk, {peak_gib():.2f} GiB used so far")
        weights = 1 / np.arange(1.0, args.rows + 1) if args.weighted else None
        start = time.perf_counter()
        found = jax_tt.tt.from_dense(
            table,
            args.ranks,
            tolerance=args.tolerance,
            max_bytes=args.max_bytes,
            row_factors=shape.row_factors,
            col_factors=shape.col_factors,
            weights=weights,
            progress=True,
        )
        print(found)
        print(f"{time.perf_counter() - start:.1f} s, peak {peak_gib():.2f} GiB with mapped pages")


def write_table(path: Path, shape: jax_tt.TTShape) -> np.memmap:
    """A tensor train and noise, float32 ``[N, D]``, in a file."""
    n, width = shape.num_embeddings, shape.features
    table = np.memmap(path, np.float32, "w+", shape=(n, width))
    first, *others = jax_tt.tt.init(jax.random.key(0), shape)
    rng = np.random.default_rng(0)
    scale = np.float32(_NOISE / np.sqrt(3 * n))
    per_slab = shape.num_rows // shape.row_factors[0]
    for i in range(-(-n // per_slab)):
        part = table[i * per_slab : (i + 1) * per_slab]
        part[:] = np.asarray(jax_tt.tt.to_dense((first[i : i + 1], *others)))[: len(part)]
        part += scale * rng.standard_normal(part.shape, np.float32)
    table.flush()
    return np.memmap(path, np.float32, "r", shape=(n, width))


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
