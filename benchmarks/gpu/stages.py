"""The stages of a step on a GPU: flops, bytes, the least time that these allow, and the expected time.

    python -m benchmarks.gpu.stages            # prints the tables
    python -m benchmarks.gpu.stages --write    # puts them between the markers of docs/performance.md

The rates of the card are measured, and so is what stands beside the expected times; both are read from its results
file. Compare the two to find the stage that should be improved next.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping

from benchmarks import render, results
from benchmarks.gpu import tables, work
from benchmarks.gpu.work import GpuWork
from benchmarks.machine import ROOT
from jax_tt import TTShape

PAGE = ROOT / "docs" / "performance.md"
MARKERS = ("<!-- stages:begin -->", "<!-- stages:end -->")

CARD = "nvidia-h100-80gb-hbm3"


@functools.cache
def _figures(case: str) -> dict[str, float]:
    """The figures of a case on the card, by name."""
    data = results.load(render.RESULTS / f"{CARD}.json")["cases"][case]
    return {figure["name"]: figure["value"] for figure in data["figures"]}


BYTES_PER_SECOND = 1e12 * _figures("gpu_peaks")["copy"]
FLOPS_PER_SECOND = 1e12 * _figures("gpu_peaks")["float32"]
MULTIPROCESSORS = 132
# Products of float32 in two parts: three products of TF32.
SPLIT_FLOPS_PER_SECOND = 1e12 * _figures("gpu_peaks")["tf32"] / 3
# What is expected of any kernel, and to be replaced by measurements: its start inside a graph and the first load from
# memory; the share of multiply-adds among the instructions of the tiled passes outside of tensor cores; the share of
# their rate that the products on tensor cores reach.
START_SECONDS = 2.5e-6
MULTIPLY_ADD_SHARE = 0.7
#
# Counted in the machine code of the specialised gradients: 11 instructions of a warp for each product of 16 x 8 x 8,
# which tensor cores make in 4 cycles; of the cycles, the share that schedulers issue something with three warps each.
ISSUE_SHARE = 0.65
TENSOR_CORE_SHARE = 4 / 11 * ISSUE_SHARE
# The same for the sums of rows of dense tables: instructions of a warp before it comes to its rows, and for those that
# it has at a time, of ids on different rows; blocks from which on warps take more positions instead of being more.
ROW_PROLOGUE, ROW_INSTRUCTIONS = 425, 125
MANY_ROW_BLOCKS = 512
# The program's own kernels around a step: slices of ids and selections.
OTHERS_SECONDS = 4.5e-6
# A batch of more ids than one launch plans: its sort waits for memory several times in each of its passes.
MOST_PLANNED_AT_ONCE = 65_536
SORT_PASS_SECONDS = 4e-6
# The keys of dense batches: bits of a pass of the sort of large ones.
SORT_BITS = 8
# Of a step of 26 tables, seven of them tensor trains; a test counts them.
MIXED_LAUNCHES = 12
# One launch plans the others, and each of its blocks reads all ids: the blocks of the three cores at most, and
# instructions for an id, counted in the machine code. What a block does beside that, with its own keys for the most
# part, is a chain of instructions that wait for each other.
PLAN_BLOCKS = (64, 128, 64)
PLAN_THREADS = 256
IDS_PER_PLAN_BLOCK = 64
INSTRUCTIONS_PER_ID = 19
PLAN_CHAIN_SECONDS = 4e-6
INSTRUCTIONS_PER_SECOND = MULTIPROCESSORS * 128 * 1.75e9
WARP_INSTRUCTIONS_PER_SECOND = INSTRUCTIONS_PER_SECOND / 32
# A block of dense tables sorts its keys in rounds that end with a barrier.
SORT_ROUND_SECONDS = 30e-9
# The same for dense tables, ``ffi/cuda/dense/split.cu``: a sample of the ids divides them among blocks, of which the
# largest share is so many times the average one, and two of which fit on a multiprocessor. Ids of the sample and then
# all, ids of the block's own, and their bags are loads that wait for others. A block has some instructions of warps
# whatever it sorts; warps sort runs of keys in registers.
SPLIT_BLOCKS = 128
SPLIT_BLOCKS_AT_ONCE = 2
FEW_IDS = 4096
IDS_PER_SPLIT_BLOCK, FEW_IDS_PER_SPLIT_BLOCK = 160, 256
IDS_PER_CHECK_BLOCK = 4096
SAMPLES_PER_BLOCK = 4
LARGEST_SHARE = 2.5
SPLIT_INSTRUCTIONS_PER_ID = 26
SPLIT_INSTRUCTIONS_PER_BLOCK = 8000
WARP_KEYS = 64
EXCHANGE_SECONDS = 30e-9
WAIT_SECONDS = 0.5e-6


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: its kernels, what they compute, and what they move between chip and memory at least."""

    name: str
    kernels: int
    flops: float = 0
    split_flops: float = 0  # on tensor cores, each by three products
    bytes: float = 0
    # Blocks of the tiled products; 0 where any number of blocks may share the work.
    tiles: float = 0
    padding: float = 1  # products of full tiles to those that are needed
    extra: float = 0  # seconds that neither flops nor bytes explain
    issued: float = 0  # instructions of warps

    @property
    def computing(self) -> float:
        return self.flops / FLOPS_PER_SECOND + self.split_flops / SPLIT_FLOPS_PER_SECOND

    @property
    def moving(self) -> float:
        return self.bytes / BYTES_PER_SECOND

    @property
    def floor(self) -> float:
        return max(self.computing, self.moving)

    @property
    def bound(self) -> str:
        return "flops" if self.computing > self.moving else "bytes"

    @property
    def expected(self) -> float:
        # The last round of blocks leaves multiprocessors idle.
        rounds = self.tiles / MULTIPROCESSORS
        uneven = math.ceil(rounds) / rounds if rounds else 1.0
        products = self.padding * self.split_flops / SPLIT_FLOPS_PER_SECOND / TENSOR_CORE_SHARE
        compute = uneven * (products + self.flops / FLOPS_PER_SECOND / MULTIPLY_ADD_SHARE)
        compute += self.issued / WARP_INSTRUCTIONS_PER_SECOND / ISSUE_SHARE
        return self.kernels * START_SECONDS + max(compute, self.moving) + self.extra


STEP = "step"
OTHERS = Stage("XLA and others", 0, extra=OTHERS_SECONDS)


def distinct(range_: float, draws: float) -> float:
    """Expected number of distinct values among uniform draws."""
    return -range_ * math.expm1(-draws / range_)


def warp_sort_seconds(keys: float) -> float:
    """The time that a block takes to sort by bitonic merges, of which warps do the last part in registers."""
    in_warp = int(math.log2(WARP_KEYS))
    merges = max(0, math.ceil(math.log2(max(keys, 2))) - in_warp)
    exchanges = in_warp * (in_warp + 1) // 2 + merges * in_warp
    rounds = merges * (merges + 1) / 2 + merges + 1
    return exchanges * EXCHANGE_SECONDS + rounds * SORT_ROUND_SECONDS


def plan(p: tuple[int, ...], n: int) -> Stage:
    """The plan of a table of three cores, whose middle core is the pivot."""
    if n > MOST_PLANNED_AT_ONCE:
        # Two kernels clear counts. A pass of the sort reads and writes up to six words for an id.
        return Stage("plan", 11, bytes=4 * n * 32, extra=3 * SORT_PASS_SECONDS)
    blocks = n / PLAN_THREADS + 1
    for slices, most in zip(p, PLAN_BLOCKS, strict=True):
        of_core = min(slices, most, max(1, n // IDS_PER_PLAN_BLOCK))
        blocks += math.ceil(slices / math.ceil(slices / of_core))
    issued = blocks * n * INSTRUCTIONS_PER_ID / 32
    return Stage("plan", 1, bytes=4 * n * 11, issued=issued, extra=PLAN_CHAIN_SECONDS)


def tile(col_factors: tuple[int, ...], rank: int, *, crowded: bool) -> tuple[int, int]:
    """Rows and prefixes of a tile at most, as ``ffi/cuda/tt/fast_launch.h`` chooses them."""
    lines = 64
    a, b = sorted((col_factors[0], col_factors[2]))
    count = 128 // rank
    if count > max(2, col_factors[1]):
        count //= 2
    columns, row = rank * count, rank * b + count * a * b
    words = 164 + rank * (columns + 8) + lines * (rank + 8) + lines * (columns + 8)
    rows = min(32, (10_240 if rank == 128 else 6144) // row)
    of_third = (75 * 256 - words) // row
    if rank <= 32 and of_third >= 16 and not crowded:
        rows = min(rows, of_third)
    return rows, lines // a


def stages(batch: GpuWork) -> list[Stage]:
    """The stages of one fused SGD step of a table of three cores, ids uniform, float32."""
    shape, n, bags = batch.shape, batch.nnz, batch.bags
    p, q, (r, s) = shape.row_factors, shape.col_factors, shape.ranks
    dim = shape.features
    rows = distinct(math.prod(p), n)
    first = 2 if q[2] < q[0] else 0  # the core that is contracted with the pivot first
    prefixes = distinct(p[first] * p[1], n)
    sizes = (q[0] * r, r * q[1] * s, s * q[2])  # of a slice of each core
    touched = [distinct(p_k, n) * size for p_k, size in zip(p, sizes, strict=True)]
    product = 2 * q[first] * r * q[1] * s  # flops of L G, of dX G^T and of L^T dX
    join = 2 * dim * s  # of X R, of g R^T and of X^T g
    slices = distinct(p[1], n)
    tile_rows, tile_prefixes = tile(q, r, crowded=n >= p[first] * p[1])
    # A slice's last tile is half full on average.
    tiles = slices * (max(rows / slices / tile_rows, prefixes / slices / tile_prefixes) + 0.5)
    padding = tiles * tile_prefixes / prefixes
    most_parts = min(max(128, (64 << 20) // (4 * sizes[1])), 2048)
    least = min(tile_rows, tile_prefixes)
    parts = tiles / max(1 if n <= 16_384 else 2, math.ceil(math.ceil(n / most_parts) / least))
    word = 4
    return [
        plan(p, n),
        Stage(
            "rows",
            1,
            flops=rows * join,
            split_flops=prefixes * product,
            bytes=word * (sum(touched) + rows * dim),
            tiles=tiles,
            padding=padding,
        ),
        Stage("bags", 1, bytes=word * (rows * dim + 2 * n + bags * dim)),
        Stage(
            "gradients",
            1,
            flops=2 * rows * join,
            split_flops=3 * prefixes * product,
            bytes=word
            * (sum(touched) + 3 * n + bags * dim + rows * (sizes[0] + sizes[2]) + parts * sizes[1]),
            tiles=tiles,
            padding=padding,
        ),
        # Shares are read; values are read and written.
        Stage(
            "sums, step",
            1,
            bytes=word
            * (rows * (sizes[0] + sizes[2]) + parts * sizes[1] + 3 * sum(touched) + 6 * n),
        ),
        OTHERS,
    ]


def dense_plan(n: int, num_embeddings: int, tables: int = 1) -> Stage:
    """The positions of dense tables with n ids each, sorted by row."""
    if n > MOST_PLANNED_AT_ONCE:
        # A kernel clears counts, one makes keys, one counts, and one for each pass. The first pass reads keys, the
        # others pairs; all but the last write pairs, that one rows and bags, which it reads by position.
        passes = math.ceil(math.log2(num_embeddings + 1) / SORT_BITS)
        words = 3 + 1 + 1 + 2 * (passes - 1) + 2 * (passes - 1) + 3
        return Stage(
            "plan", 3 + passes, bytes=4 * n * tables * words, extra=passes * SORT_PASS_SECONDS
        )
    per_block = FEW_IDS_PER_SPLIT_BLOCK if n < FEW_IDS else IDS_PER_SPLIT_BLOCK
    blocks = min(max(n // per_block, 1), SPLIT_BLOCKS)
    samples = SAMPLES_PER_BLOCK * blocks if blocks > 1 else 0
    on_each = math.ceil(tables * (blocks + math.ceil(n / IDS_PER_CHECK_BLOCK)) / MULTIPROCESSORS)
    instructions = SPLIT_INSTRUCTIONS_PER_BLOCK + n / 32 * SPLIT_INSTRUCTIONS_PER_ID
    issuing = instructions * MULTIPROCESSORS / WARP_INSTRUCTIONS_PER_SECOND / ISSUE_SHARE
    own = min(n, LARGEST_SHARE * n / blocks)
    waiting = warp_sort_seconds(samples) + warp_sort_seconds(own) + 3 * WAIT_SECONDS
    return Stage(
        "plan",
        1,
        bytes=4 * n * tables * 3,
        extra=on_each * issuing + math.ceil(on_each / SPLIT_BLOCKS_AT_ONCE) * waiting,
    )


def dense_stages(batch: GpuWork, tables: int = 1) -> list[Stage]:
    """The stages of one fused SGD step of a dense float32 table, ids uniform, in a call with as many such tables."""
    shape, n, bags = batch.shape, batch.nnz, batch.bags
    row = 4 * shape.features
    rows = distinct(shape.num_embeddings, n)
    large = n > MOST_PLANNED_AT_ONCE
    return [
        Stage("bags", 1, bytes=(4 + row) * n + row * bags),
        dense_plan(n, shape.num_embeddings),
        # Of each 64 sorted positions, two sectors.
        Stage("rows read often", 2 if large else 0, bytes=n if large else 0),
        Stage(
            "sums, step",
            1,
            bytes=8 * n + row * bags + 2 * row * rows,
            issued=_row_instructions(batch, tables),
        ),
        OTHERS,
    ]


def _row_instructions(batch: GpuWork, tables: int) -> float:
    """Of the warps that sum and step the rows of a dense table, four columns a lane."""
    lanes = 1
    while lanes < 32 and 4 * lanes < batch.shape.features:
        lanes *= 2
    run = 1
    while run < lanes and batch.nnz * tables * lanes > MANY_ROW_BLOCKS * 256 * run:
        run *= 2
    return batch.nnz * lanes / 32 * (ROW_PROLOGUE / run + ROW_INSTRUCTIONS)


def mixed() -> str:
    """The expected time of a step of 26 tables in one call a kind: what starts is shared, what is done adds up."""
    name, batch = list(tables.works(quick=False).items())[-1]
    ids, columns = batch.tables.samples, batch.tables.features
    of_tables: list[Stage] = []
    dense = [rows for rows in batch.tables.sizes if not batch.tables.is_train(rows)]
    for rows in batch.tables.sizes:
        if batch.tables.is_train(rows):
            one = GpuWork(TTShape.suggest(rows, columns, ranks=32), ids, 1)
            of_tables += [stage for stage in stages(one) if stage != OTHERS]
        else:
            one = GpuWork(TTShape.suggest(rows, columns, ranks=1), ids, 1)
            of_dense = dense_stages(one, len(dense))
            of_tables += [s for s in of_dense if s.name != "plan" and s != OTHERS]
    # One launch sorts the ids of all dense tables, side by side.
    of_tables += [OTHERS, dense_plan(ids, max(dense), len(dense))]
    doing = sum(stage.expected - stage.kernels * START_SECONDS for stage in of_tables)
    # Blocks of all trains' plans are at work side by side.
    doing -= (len(batch.tables.sizes) - len(dense) - 1) * PLAN_CHAIN_SECONDS
    expected = MIXED_LAUNCHES * START_SECONDS + doing
    took = 1e3 * _figures("gpu_tables")[f"{name}, uniform ms"]
    return (
        f"The 26 tables of Criteo, {name}, {columns} columns, {ids:,} ids each, in {MIXED_LAUNCHES} launches: expected "
        f"{1e6 * expected:.0f}, measured {took:.0f}."
    )


def measured(case: str, label: str, step: str) -> dict[str, float]:
    """Microseconds of each stage of a work, and of a whole step, as measured on the card."""
    prefix, figures = f"{label} stage ", _figures(case)
    found = {
        name.removeprefix(prefix): value
        for name, value in figures.items()
        if name.startswith(prefix)
    }
    return found | {STEP: 1e3 * figures[step]}


def table(
    batches: dict[str, GpuWork],
    of: Callable[[GpuWork], list[Stage]] = stages,
    measurements: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """Floors, expected and measured times in microseconds, a line per stage, some columns per batch."""
    known = measurements or {}
    columns = {name: of(batch) for name, batch in batches.items()}

    def line(name: str, cells: Callable[[str], list[str]]) -> str:
        return f"| {name} | " + " | ".join(cell for each in columns for cell in cells(each)) + " |"

    def times(name: str, stage: str, floor: str, expected: float) -> list[str]:
        last = [f"{known[name][stage]:.1f}"] if name in known else []
        return [floor, f"{expected:.1f}", *last]

    def of_stage(k: int) -> Callable[[str], list[str]]:
        def cells(name: str) -> list[str]:
            stage = columns[name][k]
            floor = f"{1e6 * stage.floor:.2f} ({stage.bound})"
            return times(name, stage.name, floor, 1e6 * stage.expected)

        return cells

    def of_step(name: str) -> list[str]:
        floor, expected = (
            1e6 * sum(getattr(stage, what) for stage in columns[name])
            for what in ("floor", "expected")
        )
        return times(name, STEP, f"{floor:.1f}", expected)

    def of_work(name: str) -> list[str]:
        flops = sum(stage.flops + stage.split_flops for stage in columns[name])
        moved = sum(stage.bytes for stage in columns[name])
        empty = [""] if name in known else []
        return [f"{flops / 1e9:.2f} Gflop", f"{moved / 1e6:.1f} MB", *empty]

    head = line("µs", lambda name: [f"{name}: floor", "expected", *["measured"] * (name in known)])
    names = [stage.name for stage in next(iter(columns.values()))]
    return "\n".join(
        [
            head,
            "| --- |" + " ---: |" * (head.count("|") - 2),
            *(line(name, of_stage(k)) for k, name in enumerate(names)),
            line(f"**{STEP}**", of_step),
            line("work", of_work),
        ]
    )


def text() -> str:
    headline = {"headline": work.headline(quick=False)}
    of_headline = {"headline": measured("gpu_headline", "headline", "step_ms")}
    trains = [table(headline, measurements=of_headline)]
    trains += [table(batches) for batches in (work.elrec(False), work.ecorec(False))]
    works = work.dense(quick=False)
    dense = {f"dense, {name}": batch for name, batch in works.items()}
    of_dense = {f"dense, {name}": measured("gpu_dense", name, f"{name} ms") for name in works}
    return "\n\n".join([*trains, table(dense, dense_stages, of_dense), mixed()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    print(text())
    if arguments.write:
        before, begin, rest = PAGE.read_text().partition(MARKERS[0])
        _, end, after = rest.partition(MARKERS[1])
        if not (begin and end):
            sys.exit(f"{PAGE.relative_to(ROOT)}: no {MARKERS[0]} ... {MARKERS[1]} to write between")
        PAGE.write_text(f"{before}{begin}\n\n{text()}\n\n{end}{after}")


if __name__ == "__main__":
    main()
