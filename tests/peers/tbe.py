"""FBGEMM's table-batched embedding (TBE) with the tables of `tests.peers.tables`."""

# pyright: reportMissingImports=false

import warnings
from typing import Any

import numpy as np
import pytest

from tests.peers.tables import Batch, Tables, goal

_REASON = "FBGEMM is not installed; make test-peers installs it"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of operators that the release was built without
    torch = pytest.importorskip("torch", reason=_REASON)
    pytest.importorskip("fbgemm_gpu", reason=_REASON)
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        CounterBasedRegularizationDefinition,
        CounterWeightDecayMode,
        CowClipDefinition,
        EmainplaceModeDefinition,
        LearningRateMode,
        SplitTableBatchedEmbeddingBagsCodegen,
        WeightDecayMode,
    )

__all__ = [
    "TBE",
    "BoundsCheckMode",
    "CounterBasedRegularizationDefinition",
    "CounterWeightDecayMode",
    "CowClipDefinition",
    "EmainplaceModeDefinition",
    "EmbOptimType",
    "LearningRateMode",
    "SparseType",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "WeightDecayMode",
]

# Its threads wait for each other much longer than these batches take.
torch.set_num_threads(1)

POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN, None: PoolingMode.NONE}


class TBE:
    """The operator with some values of its tables; options are those of its constructor."""

    def __init__(self, tables: Tables, values: list[np.ndarray], **options: Any) -> None:
        self.tables = tables
        self.op = SplitTableBatchedEmbeddingBagsCodegen(
            [(*size, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in tables.sizes],
            feature_table_map=list(tables.of_features),
            pooling_mode=POOLING[tables.combiner],
            stochastic_rounding=False,
            **options,
        )
        for own, value in zip(self.op.split_embedding_weights(), values, strict=True):
            own.copy_(torch.from_numpy(value))

    def rows(self, batch: Batch) -> list[np.ndarray]:
        """The results of all features."""
        return [part.detach().numpy() for part in self._forward(batch, _weights(batch))]

    def step(self, batch: Batch) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Updates the tables; the results of all features and the gradient of the weights."""
        weights = _weights(batch)
        parts = self._forward(batch, weights)
        sum(((part.float() - goal(k)) ** 2).sum() / 2 for k, part in enumerate(parts)).backward()
        gradient = None if weights is None else weights.grad.numpy()
        return [part.detach().numpy() for part in parts], gradient

    def values(self) -> list[np.ndarray]:
        """The values of all tables."""
        return [own.detach().numpy() for own in self.op.split_embedding_weights()]

    def states(self, name: str) -> list[np.ndarray]:
        """The state of the optimizer with this name of every table."""
        return [own[name].numpy() for own in self.op.get_optimizer_state()]

    def _forward(self, batch: Batch, weights: Any) -> list[Any]:
        """By feature. The operator changes ids out of range in its input, which is therefore copied."""
        ids, offsets = torch.tensor(batch.ids), torch.tensor(batch.offsets)
        columns = self.tables.columns
        if self.tables.combiner is None:
            return torch.split(self.op(ids, offsets, weights), batch.lengths_of_features)
        if len(set(batch.sizes)) == 1:
            return torch.split(self.op(ids, offsets, weights), columns, dim=1)
        ranks = [[size] for size in batch.sizes]
        flat = self.op(ids, offsets, weights, batch_size_per_feature_per_rank=ranks)
        shapes = list(zip(batch.sizes, columns, strict=True))
        parts = torch.split(flat, [size * width for size, width in shapes])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _weights(batch: Batch) -> Any:
    return None if batch.weights is None else torch.tensor(batch.weights, requires_grad=True)
