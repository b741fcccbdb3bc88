"""FBGEMM: bags of quantized tables with its inference operator on CPU."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

from collections.abc import Sequence

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


def bags(work: Work, tables: Sequence[np.ndarray], bits: int) -> Call:
    """Sums of the rows of tables, in the layout of the operator, in float32; all are given the same ids."""
    sizes = [
        ("t", len(rows), work.shape.features, TYPES[bits], EmbeddingLocation.HOST)
        for rows in tables
    ]
    layer = IntNBitTableBatchedEmbeddingBagsCodegen(
        sizes, device="cpu", output_dtype=SparseType.FP32
    )
    layer.fill_random_weights()
    stored = layer.split_embedding_weights(split_scale_shifts=False)
    for (own, *_), rows in zip(stored, tables, strict=True):
        own.copy_(torch.from_numpy(rows))
    # It takes 32-bit ids as they are, those of all tables one after the other.
    starts = np.arange(len(tables) * work.bags + 1) * work.bag_size
    offsets = torch.from_numpy(starts.astype(np.int32))
    ids = [torch.from_numpy(np.tile(batch.astype(np.int32), len(tables))) for batch in work.batches]
    return lambda i: layer(ids[i % len(ids)], offsets)
