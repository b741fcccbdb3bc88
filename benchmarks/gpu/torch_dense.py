"""torch on the GPU: `EmbeddingBag(sparse=True)` with `torch.optim.SGD`, timed by CUDA events."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

from collections.abc import Callable

import jax
import numpy as np
import torch

from benchmarks.gpu.work import GpuWork
from benchmarks.work import LEARNING_RATE


def dense_step(work: GpuWork) -> Callable[[jax.Array], float]:
    """Forward, sparse gradient and SGD; seconds of all steps of a call."""
    layer = torch.nn.EmbeddingBag.from_pretrained(
        torch.full((work.shape.num_embeddings, work.shape.features), 0.01, device="cuda"),
        freeze=False,
        mode="sum",
        sparse=True,
    )
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    gradient = torch.from_numpy(np.array(work.gradient())).cuda()

    def call(ids: jax.Array) -> float:
        batches = torch.from_numpy(np.array(ids, np.int64)).cuda()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            layer(batch).backward(gradient)
            optimizer.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return call
