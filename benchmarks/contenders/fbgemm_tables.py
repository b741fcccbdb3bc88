"""FBGEMM: many tables in one table-batched embedding on CPU with its exact row-wise Adagrad."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

from collections.abc import Sequence

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.contenders.collections import Tables
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE


def layer(sizes: Sequence[int], features: int) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Tables of these sizes."""
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, features, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in sizes],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
    )
    for weights in tables.split_embedding_weights():
        weights.fill_(0.01)
    return tables


def together(work: Tables) -> tuple[Call, Call]:
    """Forward alone, and forward and backward with the update fused."""
    tables = layer(work.sizes, work.features)
    ids_in_bags = np.repeat(work.hot, work.samples)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(ids_in_bags)]))
    # It converts 32-bit ids in every call.
    ids = [
        torch.from_numpy(np.concatenate([own.reshape(-1) for own in batch]).astype(np.int64))
        for batch in work.batches
    ]
    gradient = torch.from_numpy(work.gradient)

    def forward(i: int) -> object:
        with torch.no_grad():
            return tables(ids[i % len(ids)], offsets)

    def step(i: int) -> None:
        tables(ids[i % len(ids)], offsets).backward(gradient)

    return forward, step
