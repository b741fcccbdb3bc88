"""torch on the GPU: `EmbeddingBag(sparse=True)` with `torch.optim.SGD`, timed by CUDA events."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

import jax
import numpy as np
import torch

from benchmarks.gpu.work import GpuWork
from benchmarks.work import LEARNING_RATE


class DenseStep:
    """Forward, sparse gradient and SGD."""

    def __init__(self, work: GpuWork) -> None:
        self._gradient = torch.from_numpy(np.array(work.gradient())).cuda()
        self._layer = torch.nn.EmbeddingBag.from_pretrained(
            torch.full((work.shape.num_embeddings, work.shape.features), 0.01, device="cuda"),
            freeze=False,
            mode="sum",
            sparse=True,
        )
        self._optimizer = torch.optim.SGD(self._layer.parameters(), lr=LEARNING_RATE)
        self._batches = torch.empty(0)

    def prepare(self, ids: jax.Array) -> None:
        self._batches = torch.from_numpy(np.array(ids, np.int64)).cuda()

    def restart(self) -> None:
        with torch.no_grad():
            self._layer.weight.fill_(0.01)
        torch.cuda.synchronize()

    def run(self, ids: jax.Array, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            for batch in self._batches:
                self._optimizer.zero_grad(set_to_none=True)
                self._layer(batch).backward(self._gradient)
                self._optimizer.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def check(self, name: str) -> None:
        if not bool(torch.isfinite(self._layer.weight).all()):
            raise FloatingPointError(f"{name}: the table holds NaN or infinity")
