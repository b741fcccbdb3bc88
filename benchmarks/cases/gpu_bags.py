"""Bags of quantized and of coded tables on a GPU, beside those of the dense table."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.gpu import contenders, work
from benchmarks.gpu.measure import measure
from benchmarks.gpu.timing import Replayed
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("gpu_bags", "GPU: 1,000,000 rows of 64 columns, 512 bags of 20 ids: forward", gpu=True)
def run(settings: Settings, report: Report) -> None:
    own = work.rows(settings.quick)
    size = own.shape.num_embeddings, own.shape.features
    quantized = {bits: jax_tt.tables.QuantizedTable(*size, bits) for bits in (8, 4)}
    coded = jax_tt.coded_table(*size, num_codes=8, bits=6)

    def packed(table: jax_tt.tables.QuantizedTable) -> dict[str, jax.Array]:
        """Random numbers with one scale and offset."""
        rows = np.random.default_rng(0).integers(0, 256, (size[0], table.row_bytes), np.uint8)
        rows[:, :4] = np.array([0.01, -0.5], np.float16).view(np.uint8)
        return {"packed": jnp.asarray(rows)}

    def state(table: jax_tt.Table) -> dict[str, jax.Array]:
        return jax.jit(table.init)(jax.random.key(0))

    dense = jax_tt.dense_table(*size)
    makers = {
        "jax_tt, dense float32": lambda: Replayed(*contenders.pooled(own, dense, state(dense))),
        "jax_tt, 8 codes of 6 bits": lambda: Replayed(*contenders.pooled(own, coded, state(coded))),
    }
    for bits, table in quantized.items():
        makers[f"jax_tt, int{bits}"] = lambda table=table: Replayed(
            *contenders.pooled(own, table, packed(table))
        )
    measure("", own, makers, settings, report)
