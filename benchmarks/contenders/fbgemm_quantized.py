"""FBGEMM: bags of one quantized table with its inference operator on CPU."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.timing import Call
from benchmarks.work import Work

TYPES = {8: SparseType.INT8, 4: SparseType.INT4, 2: SparseType.INT2}


def bags(work: Work, rows: np.ndarray, bits: int) -> Call:
    """Sums of these rows, in the layout of the operator, in float32."""
    sizes = ("t", len(rows), work.shape.features, TYPES[bits], EmbeddingLocation.HOST)
    layer = IntNBitTableBatchedEmbeddingBagsCodegen(
        [sizes], device="cpu", output_dtype=SparseType.FP32
    )
    layer.fill_random_weights()
    layer.split_embedding_weights(split_scale_shifts=False)[0][0].copy_(torch.from_numpy(rows))
    # It takes 32-bit ids as they are.
    offsets = torch.from_numpy(work.offsets.astype(np.int32))
    ids = [torch.from_numpy(batch.astype(np.int32)) for batch in work.batches]
    return lambda i: layer(ids[i % len(ids)], offsets)
