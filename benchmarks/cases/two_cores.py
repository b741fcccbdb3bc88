"""Tensor trains of two cores, of the shapes that keep the most quality, beside the flops and bytes that they need."""

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
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    seconds_per_flop = timings[MATMUL].median / matmul_flops
    seconds_per_byte = timings[COPY].median / copied_bytes
    for name, work in works.items():
        needs = {FORWARD: (1, *_bytes(work, 1, 1)), FUSED: (3, *_bytes(work, 3, 3))}
        for contender, (passes, gathered, slices) in needs.items():
            flops = passes * work.shape.cost(work.nnz).flops_forward
            floor = flops * seconds_per_flop + (gathered + slices) * seconds_per_byte
            report.figure(
                f"{contender} over floor, {name}", timings[name, contender].median / floor, "x",
                f"{name}: {contender} over {1e3 * floor:.2f} ms of flops and bytes", at_most=1.5,
            )  # fmt: skip


def _bytes(work: Work, gathers: int, uses: int) -> tuple[int, int]:
    """Bytes of the slices that distinct rows gather, and of all slices of the batch, so many times each.

    The rows of a batch can share the reads of the slices of one core; those of the other core are read for each row.
    A step reads them forward and backward and sums as many numbers for their gradient, and reads all slices twice and
    writes them.
    """
    rows = np.unique(work.batches[0])
    digits = np.unravel_index(rows, work.shape.row_factors)
    sizes = [int(np.prod(shape[1:])) for shape in work.shape.core_shapes]
    slices = sum(len(np.unique(digit)) * size for digit, size in zip(digits, sizes, strict=True))
    return 4 * gathers * len(rows) * min(sizes), 4 * uses * slices


def _copy(count: int) -> tuple[Call, int]:
    """A pass over an array in place by all cores, and the bytes that it reads and writes."""
    double = jax.jit(lambda array: 2 * array, donate_argnums=0)
    array = [jnp.zeros(count)]

    def call(i: int) -> None:
        array[0] = double(array[0])
        array[0].block_until_ready()

    return call, 8 * count
