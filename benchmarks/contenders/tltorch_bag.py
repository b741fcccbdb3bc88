"""tensorly-torch: `FactorizedEmbedding` in its block-TT form with `torch.optim.SGD`."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

import torch
from tltorch import FactorizedEmbedding

from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work


def tt(work: Work) -> tuple[Call, Call]:
    """Forward alone, and forward, backward and SGD, over one table of the same shape and rank."""
    shape = work.shape
    layer = FactorizedEmbedding(
        shape.num_rows,
        shape.features,
        auto_tensorize=False,
        tensorized_num_embeddings=shape.row_factors,
        tensorized_embedding_dim=shape.col_factors,
        factorization="blocktt",
        rank=shape.full_ranks,
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    gradient = torch.from_numpy(work.gradient)
    ids = [torch.from_numpy(batch) for batch in work.batches]

    def pooled(i: int) -> torch.Tensor:
        return layer(ids[i % len(ids)]).view(work.bags, work.bag_size, -1).sum(1)

    def forward(i: int) -> object:
        with torch.no_grad():
            return pooled(i)

    def step(i: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        pooled(i).backward(gradient)
        optimizer.step()

    return forward, step
