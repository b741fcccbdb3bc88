"""Bags of coded tables, beside the dense float32 table."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.contenders import ours
from benchmarks.ids import STREAMS
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import interleave
from benchmarks.work import Work

DENSE = "jax_tt, dense float32"
# Of 64 columns, as `compress` chooses them at 8, 15, 30, 50 and 100 times smaller.
TABLES = {
    "product, 32 codes of 8 bits": {"num_codes": 32},
    "product, 32 codes of 7 bits, sums of 2": {"num_codes": 32, "bits": 7, "terms": 2},
    "product, 8 codes of 6 bits, 5 more of hot rows": {"num_codes": 8, "bits": 6, "hot_terms": 5},
    "product, 12 codes of 4 bits, sums of 3, 8 more of hot rows": {
        "num_codes": 12,
        "bits": 4,
        "terms": 3,
        "hot_terms": 8,
    },
    "additive, 8 codes of 6 bits": {"num_codes": 8, "bits": 6, "kind": "additive"},
    "additive, 3 codes of 5 bits": {"num_codes": 3, "bits": 5, "kind": "additive"},
}


@case("coded", "Coded tables of 1,000,000 rows of 64 columns, 512 bags of 20 ids: forward")
def measure(settings: Settings, report: Report) -> None:
    rows, bags = (1000, 8) if settings.quick else (1_000_000, 512)
    for stream in STREAMS:
        work = Work.make(jax_tt.TTShape.suggest(rows, 64, ranks=2), bags, 20, stream)
        calls = {(stream, DENSE): ours.dense_forward(work)}
        for detail, options in TABLES.items():
            hot = rows // 4 if "hot_terms" in options else 0
            table = jax_tt.coded_table(rows, 64, hot=hot, **options)
            calls[stream, detail] = ours.table_forward(work, table, _random_state(table))
        timings = interleave(calls, settings.budget)
        report.timings(timings)
        for detail in TABLES:
            ratio = timings[stream, detail].median / timings[stream, DENSE].median
            meaning = f"{stream}, {detail}: over the float32 table"
            report.figure(f"ratio {stream} {detail}", ratio, "x", meaning, at_most=2)


def _random_state(table: jax_tt.tables.CodedTable) -> dict[str, jax.Array]:
    """Random codes and codebooks; hot rows are anywhere in the table."""
    rng = np.random.default_rng(0)
    state = jax.jit(table.init)(jax.random.key(0))
    if not table.hot:
        return state
    codes = rng.integers(0, 1 << table.bits, (table.num_embeddings, table.all_codes))
    hot = rng.permutation(table.num_embeddings) < table.hot
    of_hot = np.arange(table.all_codes) % table.part_terms >= table.part_terms - table.hot_terms
    codes[np.ix_(~hot, of_hot)] = -1
    return table.with_codes(state, jnp.asarray(codes.astype(np.int32)))
