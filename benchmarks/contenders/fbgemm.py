"""FBGEMM: the table-batched embedding on CPU with its exact SGD."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work


def dense(work: Work) -> tuple[Call, Call]:
    """Forward alone, and forward and backward with the update fused, over one table."""
    table = (
        work.shape.num_embeddings,
        work.shape.features,
        EmbeddingLocation.HOST,
        ComputeDevice.CPU,
    )
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [table], optimizer=EmbOptimType.EXACT_SGD, learning_rate=LEARNING_RATE
    )
    for weights in layer.split_embedding_weights():
        weights.fill_(0.01)
    offsets, gradient = torch.from_numpy(work.offsets), torch.from_numpy(work.gradient)
    ids = [torch.from_numpy(batch) for batch in work.batches]

    def forward(i: int) -> object:
        with torch.no_grad():
            return layer(ids[i % len(ids)], offsets)

    def step(i: int) -> None:
        layer(ids[i % len(ids)], offsets).backward(gradient)

    return forward, step
