"""The batches that a GPU is measured with, fresh ones for every call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ids import STREAMS
from benchmarks.work import HEADLINE_BAG_SIZE, HEADLINE_BAGS, HEADLINE_SHAPE
from jax_tt import TTShape

# Steps of one measured program, each with a batch of its own: those of a dense table do not fit into a cache together.
STEPS = 64


@dataclasses.dataclass(frozen=True)
class GpuWork:
    """Sum-pooled bags of one size over one table."""

    shape: TTShape
    bags: int
    bag_size: int
    steps: int = STEPS

    @property
    def nnz(self) -> int:
        return self.bags * self.bag_size

    def ids(self, rng: np.random.Generator, stream: str) -> jax.Array:
        """Ids of all steps of one call, ``[steps, bags, bag_size]``."""
        ids = STREAMS[stream](rng, self.shape.num_embeddings, self.steps * self.nnz)
        return jnp.asarray(ids.reshape(self.steps, self.bags, self.bag_size), jnp.int32)

    def gradient(self) -> jax.Array:
        """Small entries with random signs, with which a thousand steps of a Zipf stream do not diverge."""
        rng = np.random.default_rng(2)
        values = rng.standard_normal((self.bags, self.shape.features), np.float32)
        return jnp.asarray(3e-5 * values)

    @property
    def step_flops(self) -> int:
        """Flops of forward and backward when every lookup is contracted separately."""
        cost = self.shape.cost(self.nnz)
        return cost.flops_forward + cost.flops_backward


def _small(bags: int, bag_size: int) -> GpuWork:
    return GpuWork(TTShape.suggest(5000, 16, ranks=8), bags, bag_size, steps=2)


def headline(quick: bool) -> GpuWork:
    """512 bags of 20 ids from 11 million rows: the batch that TT-Rec's kernels were published with."""
    return _small(8, 3) if quick else GpuWork(HEADLINE_SHAPE, HEADLINE_BAGS, HEADLINE_BAG_SIZE)


def dense(quick: bool) -> dict[str, GpuWork]:
    """The rows and columns of the headline table with its batch, and with a hundred of them."""
    if quick:
        return {"24 ids": _small(8, 3)}
    sizes = {"10,240 ids": (HEADLINE_BAGS, STEPS), "1,024,000 ids": (100 * HEADLINE_BAGS, 16)}
    return {
        name: GpuWork(HEADLINE_SHAPE, bags, HEADLINE_BAG_SIZE, steps)
        for name, (bags, steps) in sizes.items()
    }


def rows(quick: bool) -> GpuWork:
    """The headline batch from a million rows of 64 columns."""
    if quick:
        return _small(8, 3)
    shape = TTShape.suggest(1_000_000, 64, ranks=2)
    return GpuWork(shape, HEADLINE_BAGS, HEADLINE_BAG_SIZE)


def keys(quick: bool) -> dict[str, GpuWork]:
    """The same for tables of keys, and a batch whose keys take more than one block to sort."""
    if quick:
        return {"24 keys": _small(8, 3)}
    one = rows(quick)
    return {"10,240 keys": one, "102,400 keys": dataclasses.replace(one, bags=10 * one.bags)}


def elrec(quick: bool) -> dict[str, GpuWork]:
    """The shapes of EL-Rec: 64 columns, rank 128, one id a bag."""
    if quick:
        return {"5,000 rows, 16 ids": _small(16, 1)}
    return {
        f"{rows // 100_000 / 10:g}M rows, {ids:,} ids": GpuWork(
            TTShape.suggest(rows, 64, ranks=128), ids, 1
        )
        for rows, ids in ((2_500_000, 4096), (10_000_000, 4096), (10_000_000, 8192))
    }


def ecorec(quick: bool) -> dict[str, GpuWork]:
    """The shapes of EcoRec: 32 columns, rank 32, bags of 16."""
    if quick:
        return {"5,000 rows, 24 ids": _small(6, 4)}
    shape = TTShape.suggest(10_000_000, 32, ranks=32)
    return {
        f"10M rows, {ids:,} ids": GpuWork(shape, ids // 16, 16) for ids in (2048, 16_384, 131_072)
    }


def middle(works: dict[str, GpuWork]) -> tuple[str, GpuWork]:
    """The name and the work in the middle of several, for where there is no time for all."""
    return list(works.items())[len(works) // 2]
