"""DLRM in PyTorch with FBGEMM's table-batched embedding on the CPU."""

# pyright: reportMissingImports=false
# The packages are optional: benchmarks.peers asks for them before this module is imported.

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.contenders import fbgemm_tables
from benchmarks.contenders.clicks import MLP_LEARNING_RATE, Clicks
from benchmarks.timing import Call
from examples.dlrm.batch import NUM_DENSE


def eager(work: Clicks) -> Call:
    """As PyTorch runs by default."""
    return _training(work, _Layers(work))


def compiled(work: Clicks) -> Call:
    """With everything except the tables compiled by `torch.compile`."""
    return _training(work, torch.compile(_Layers(work)))


class _Layers(nn.Module):
    """All of the model except its tables, which ends with the loss."""

    pairs: torch.Tensor

    def __init__(self, work: Clicks):
        super().__init__()
        vectors = len(work.sizes) + 1
        self.bottom = _mlp([NUM_DENSE, *work.bottom, work.features])
        self.top = _mlp([work.features + vectors * (vectors - 1) // 2, *work.top, 1])
        pairs = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1])
        self.shape = vectors - 1, work.features

    def forward(self, dense: torch.Tensor, rows: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bottom(dense))
        vectors = torch.cat([x[:, None], rows.view(len(rows), *self.shape)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits = self.top(torch.cat([x, products], dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, label)


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _training(work: Clicks, layers: Any) -> Call:
    tables = fbgemm_tables.layer(work.sizes, work.features)
    optimizer = torch.optim.SGD(layers.parameters(), lr=MLP_LEARNING_RATE)
    offsets = torch.arange(work.samples * len(work.sizes) + 1)
    batches = [
        (
            torch.from_numpy(batch.dense),
            torch.from_numpy(np.ascontiguousarray(batch.ids.T).reshape(-1).astype(np.int64)),
            torch.from_numpy(batch.label),
        )
        for batch in work.batches
    ]

    def call(i: int) -> object:
        dense, ids, label = batches[i % len(batches)]
        optimizer.zero_grad()
        loss = layers(dense, tables(ids, offsets), label)
        loss.backward()
        optimizer.step()
        return loss

    return call
