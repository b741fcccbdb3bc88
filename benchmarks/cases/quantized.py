"""Bags of quantized tables, beside FBGEMM's inference operator and the dense float32 table."""

import gc
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.contenders import ours
from benchmarks.ids import STREAMS
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from benchmarks.work import Work

OURS, DENSE, FBGEMM = "jax_tt", "jax_tt, dense float32", "fbgemm IntNBit"
WIDTHS = (16, 32, 64, 128)


@case("quantized", "Quantized tables of 1,000,000 rows, 512 bags of 20 ids: forward")
def measure(settings: Settings, report: Report) -> None:
    rows, bags = (1000, 8) if settings.quick else (1_000_000, 512)
    rival = peer("fbgemm_quantized", report)
    for features in WIDTHS[:1] if settings.quick else WIDTHS:
        for stream in STREAMS:
            shape = jax_tt.TTShape.suggest(rows, features, ranks=2)
            work = Work.make(shape, bags, 20, stream)
            calls = {(f"{stream}, D {features}", DENSE): ours.dense_forward(work)}
            for bits in (8, 4):
                label = f"{stream}, D {features}, int{bits}"
                table, state = _random_table(rows, features, bits)
                calls[label, OURS] = ours.table_forward(work, table, state)
                if rival is not None:
                    calls[label, FBGEMM] = rival.bags(
                        work, [jax_tt.compression.to_fbgemm(table, state)], bits
                    )
                    found, theirs = calls[label, OURS](0), calls[label, FBGEMM](0)
                    np.testing.assert_allclose(np.asarray(found), np.asarray(theirs), 1e-5, 1e-5)
            _compare(calls, settings, report)


@case(
    "quantized_tables", "26 quantized tables of 100,000 rows in one call, bags of 20 ids: forward"
)
def measure_tables(settings: Settings, report: Report) -> None:
    rows, bags, count = (1000, 8, 3) if settings.quick else (100_000, 128, 26)
    rival = peer("fbgemm_quantized", report)
    for features in WIDTHS[:1] if settings.quick else WIDTHS:
        for stream in STREAMS:
            work = Work.make(jax_tt.TTShape.suggest(rows, features, ranks=2), bags, 20, stream)
            calls = {}
            for bits in (8, 4):
                label = f"{stream}, D {features}, int{bits}"
                table, state = _random_table(rows, features, bits)
                calls[label, OURS] = _together(work, [table] * count, [state] * count)
                if rival is not None:
                    tables = [jax_tt.compression.to_fbgemm(table, state)] * count
                    calls[label, FBGEMM] = rival.bags(work, tables, bits)
                    found, theirs = calls[label, OURS](0), calls[label, FBGEMM](0)
                    np.testing.assert_allclose(np.asarray(found), np.asarray(theirs), 1e-5, 1e-5)
            _compare(calls, settings, report)


def _compare(calls: dict[tuple[str, str], Call], settings: Settings, report: Report) -> None:
    """Times contenders turn by turn; frees their tables, and reports how much faster ours are."""
    timings = interleave(calls, settings.budget)
    calls.clear()
    gc.collect()
    report.timings(timings)
    for label, contender in timings:
        if contender == FBGEMM:
            ratio = timings[label, FBGEMM].median / timings[label, OURS].median
            meaning = f"{label}: faster than fbgemm"
            report.figure(f"speedup {label}", ratio, "x", meaning, at_least=1)


def _together(work: Work, tables: Sequence[jax_tt.Table], states: Sequence[dict]) -> Call:
    """Sums of all tables in one array, each with rows in its part of the memory."""
    names = [f"t{k}" for k in range(len(tables))]
    collection = jax_tt.Collection(
        dict(zip(names, tables, strict=True)), {name: jax_tt.Feature(name) for name in names}
    )
    state = jax.tree.map(jnp.copy, dict(zip(names, states, strict=True)))
    shape = (work.bags, work.bag_size)
    batches = [jnp.asarray(ids.astype(np.int32).reshape(shape)) for ids in work.batches]

    @jax.jit
    def forward(state, ids):
        batch = dict.fromkeys(names, ids)
        return jax_tt.lookup_features(collection, state, batch, layout="concatenated")[0]

    return lambda i: forward(state, batches[i % len(batches)]).block_until_ready()


def _random_table(rows: int, features: int, bits: int) -> tuple[jax_tt.tables.QuantizedTable, dict]:
    """Random numbers with one scale and offset."""
    table = jax_tt.tables.QuantizedTable(rows, features, bits)
    packed = np.random.default_rng(0).integers(0, 256, (rows, table.row_bytes), np.uint8)
    packed[:, :4] = np.array([0.01, -0.5], np.float16).view(np.uint8)
    return table, {"packed": jnp.asarray(packed)}
