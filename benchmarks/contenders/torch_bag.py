"""torch: `EmbeddingBag(sparse=True)` with `torch.optim.SGD`."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

import torch

from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work


def dense(work: Work) -> tuple[Call, Call]:
    """Forward alone, and forward, sparse gradient and SGD, over one table."""
    layer = torch.nn.EmbeddingBag.from_pretrained(
        torch.full((work.shape.num_embeddings, work.shape.features), 0.01),
        freeze=False,
        mode="sum",
        sparse=True,
        include_last_offset=True,
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    offsets, gradient = torch.from_numpy(work.offsets), torch.from_numpy(work.gradient)
    ids = [torch.from_numpy(batch) for batch in work.batches]

    def forward(i: int) -> object:
        with torch.no_grad():
            return layer(ids[i % len(ids)], offsets)

    def step(i: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        layer(ids[i % len(ids)], offsets).backward(gradient)
        optimizer.step()

    return forward, step
