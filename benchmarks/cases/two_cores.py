"""Tensor trains of two cores, of the shapes that keep the most quality, beside the flops and bytes that they need."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders import numpy_matmul, ours
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.sweep import FORWARD, FUSED
from benchmarks.timing import Call, interleave
from benchmarks.work import HEADLINE_BAG_SIZE, HEADLINE_BAGS, Work
from jax_tt import TTShape

SHAPES = {
    "p 266, 266, q 64, 1, r 32": TTShape(266 * 266, 64, 32, (266, 266), (64, 1)),
    "p 266, 266, q 1, 64, r 32": TTShape(266 * 266, 64, 32, (266, 266), (1, 64)),
    "p 266, 266, q 8, 8, r 32": TTShape(266 * 266, 64, 32, (266, 266), (8, 8)),
    "p 3000, 4000, q 8, 8, r 32": TTShape(12_000_000, 64, 32, (3000, 4000), (8, 8)),
    "p 3000, 4000, q 8, 8, r 64": TTShape(12_000_000, 64, 64, (3000, 4000), (8, 8)),
}
TERMS = 4
TERM, SUM = "p 266, 266, q 64, 1, r 32", f"sum of {TERMS} of p 266, 266, q 64, 1, r 32"
MATMUL, COPY = ("machine", "numpy matmul"), ("machine", "copy")


@case("two_cores", "TT tables of two cores, 512 bags x 20 ids: forward and step over their floors")
def measure(settings: Settings, report: Report) -> None:
    bags, size = (16, 4) if settings.quick else (HEADLINE_BAGS, HEADLINE_BAG_SIZE)
    works = {name: Work.make(shape, bags, size) for name, shape in SHAPES.items()}
    matmul, matmul_flops = numpy_matmul.matmul(256 if settings.quick else 2048)
    copy, copied_bytes = _copy(1 << (16 if settings.quick else 26))
    calls: dict[tuple[str, str], Call] = {MATMUL: matmul, COPY: copy}
    for name, work in works.items():
        calls[name, FORWARD] = ours.tt_forward(work)
        calls[name, FUSED] = ours.tt_fused_step(work)
    terms = [_reordered(works[TERM], seed) for seed in range(TERMS)]
    calls[SUM, FORWARD], calls[SUM, FUSED] = ours.tt_sum(terms)
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    seconds_per_flop = timings[MATMUL].median / matmul_flops
    seconds_per_byte = timings[COPY].median / copied_bytes
    alone = {name: ([work], 1.5) for name, work in works.items()}
    for name, (own, bound) in {**alone, SUM: (terms, 1.3)}.items():
        for contender, passes in ((FORWARD, 1), (FUSED, 3)):
            floor = sum(
                passes * work.shape.cost(work.nnz).flops_forward * seconds_per_flop
                + _bytes(work, passes) * seconds_per_byte
                for work in own
            )
            report.figure(
                f"{contender} over floor, {name}", timings[name, contender].median / floor, "x",
                f"{name}: {contender} over {1e3 * floor:.2f} ms of flops and bytes", at_most=bound,
            )  # fmt: skip


def _reordered(work: Work, seed: int) -> Work:
    """The same batches with the rows of the table in another order."""
    order = np.random.default_rng(seed).permutation(work.shape.num_embeddings)
    return dataclasses.replace(work, batches=[order[ids].astype(ids.dtype) for ids in work.batches])


def _bytes(work: Work, passes: int) -> int:
    """Bytes of the slices that distinct rows gather, and of all slices of the batch, so many times each.

    The rows of a batch can share the reads of the slices of one core; those of the other core are read for each row.
    A step reads them forward and backward and sums as many numbers for their gradient, and reads all slices twice and
    writes them.
    """
    rows = np.unique(work.batches[0])
    digits = np.unravel_index(rows, work.shape.row_factors)
    sizes = [int(np.prod(shape[1:])) for shape in work.shape.core_shapes]
    slices = sum(len(np.unique(digit)) * size for digit, size in zip(digits, sizes, strict=True))
    return 4 * passes * (len(rows) * min(sizes) + slices)


def _copy(count: int) -> tuple[Call, int]:
    """A pass over an array in place by all cores, and the bytes that it reads and writes."""
    double = jax.jit(lambda array: 2 * array, donate_argnums=0)
    array = [jnp.zeros(count)]

    def call(i: int) -> None:
        array[0] = double(array[0])
        array[0].block_until_ready()

    return call, 8 * count
