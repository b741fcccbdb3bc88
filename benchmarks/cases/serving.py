"""Latency of lookups in a serving process: an exported program on mapped arrays, at several batch sizes."""

import tempfile
import time
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.ids import zipf_ids
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave

BATCHES = (1, 8, 64, 256, 1024)
TABLES, IDS, FEATURES = 26, 10, 64


@case(
    "serving",
    "26 tables of 200,000 x 64, means of 10 ids: an exported program on mapped arrays",
)
def measure(settings: Settings, report: Report) -> None:
    rows, batches = (500, BATCHES[:2]) if settings.quick else (200_000, BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        calls: dict[tuple[str, str], Call] = {}
        for kind, table in _kinds(rows).items():
            collection = jax_tt.Collection(
                {f"t{k}": table for k in range(TABLES)},
                {f"t{k}": jax_tt.Feature(f"t{k}", combiner="mean") for k in range(TABLES)},
            )
            path = Path(folder) / f"{kind}.safetensors"
            jax_tt.files.save_arrays(path, jax.jit(collection.init)(jax.random.key(0)))
            start = time.perf_counter()
            arrays = jax_tt.files.map_arrays(path)
            opened = 1e3 * (time.perf_counter() - start)
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) / 1e6
            report.figure(f"open {kind}", opened, "ms", f"{kind}: opening {size:.0f} MB")
            for batch in batches:
                calls[f"batch {batch:,}", kind] = _served(collection, arrays, rows, batch)
        report.timings(interleave(calls, settings.budget))


def _kinds(rows: int) -> dict[str, jax_tt.Table]:
    return {
        "dense float32": jax_tt.dense_table(rows, FEATURES),
        "int8": jax_tt.tables.QuantizedTable(rows, FEATURES, 8),
        "int4": jax_tt.tables.QuantizedTable(rows, FEATURES, 4),
        "tensor train, rank 16": jax_tt.tt_table(rows, FEATURES, tt_ranks=16),
    }


def _served(collection: jax_tt.Collection, arrays: dict, rows: int, batch: int) -> Call:
    """The program for one batch size, as a serving process calls it."""
    rng = np.random.default_rng(0)
    batches = [
        {
            name: jnp.asarray(zipf_ids(rng, rows, batch * IDS).astype(np.int32).reshape(batch, IDS))
            for name in collection.tables
        }
        for _ in range(4)
    ]

    def serve(arrays, batch):
        lookup = jax_tt.Lookup(bounds="zero")
        return jax_tt.lookup_features(collection, arrays, batch, lookup, layout="concatenated")[0]

    checks = jax_tt.export.checks()
    exported = jax.export.export(jax.jit(serve), disabled_checks=checks)(arrays, batches[0])
    program = jax.jit(jax.export.deserialize(exported.serialize()).call)
    return lambda i: program(arrays, batches[i % len(batches)]).block_until_ready()
