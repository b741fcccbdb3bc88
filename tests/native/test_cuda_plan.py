"""The plan of the CUDA kernels against numpy: orders, rows, lists and parts, however it is built."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import stages
from jax_tt._base import ffi

HEADER = 8
LIST_PART = 512
POISONED = -2


@dataclasses.dataclass(frozen=True)
class Batch:
    """Ids of a table of three cores, and where its bags end."""

    row_factors: tuple[int, int, int]
    ids: np.ndarray
    offsets: np.ndarray
    col_factors: tuple[int, int, int] = (2, 2, 2)
    rank: int = 2
    padded: bool = False
    bounds: str = "zero"

    @property
    def rows(self):
        return min(math.prod(self.row_factors), 2**62)

    @property
    def tile(self):
        """Rows and prefixes of a tile at most, if the specialised kernels take the table."""
        if self.rank == 2:
            return None
        left = 2 if self.col_factors[2] < self.col_factors[0] else 0
        crowded = len(self.ids) >= self.row_factors[left] * self.row_factors[1]
        return stages.tile(self.col_factors, self.rank, crowded=crowded)

    @property
    def part_tiles(self):
        """Tiles of a part, where there are tiles: more if that many parts would have too many shares."""
        n, slice_bytes = len(self.ids), 4 * self.rank**2 * self.col_factors[1]
        most = min(max(128, (64 << 20) // slice_bytes), 2048)
        return max(1 if n <= 16_384 else 2, math.ceil(math.ceil(n / most) / min(self.tile or (1,))))

    @property
    def part_rows(self):
        """Entries of a part at most."""
        n = len(self.ids)
        least, parts = (32 if n <= 16_384 else 64), min((64 << 20) // (4 * 8), 2048)
        rows = max(least, -(-n // parts)) if self.tile is None else self.part_tiles * self.tile[0]
        return LIST_PART, rows, LIST_PART

    @property
    def part_numbers(self):
        """Numbers that the parts of each core may have."""
        n, least = len(self.ids), list(self.part_rows)
        if self.tile is not None:
            least[1] = self.part_tiles * min(self.tile)
        sizes = zip(self.row_factors, least, strict=True)
        return [n // size + min(p, n) for p, size in sizes]

    @property
    def valid(self):
        bags = np.searchsorted(self.offsets, np.arange(len(self.ids)), side="right") - 1
        inside = bags < len(self.offsets) - 1
        return inside & (self.ids >= 0) & (self.ids < self.rows)

    @property
    def refused(self):
        """Ids of bags without a row, where the bounds refuse them."""
        return ~self.valid & (self.bounds == "error")

    def digits(self):
        """Of every position, [3, n]."""
        _, p1, p2 = self.row_factors
        ids = self.ids.astype(np.int64)
        return np.stack([ids // (p1 * p2), ids // p2 % p1, ids % p2])


def batch(row_factors, ids, offsets=None, **options):
    ids = np.asarray(ids)
    return Batch(
        row_factors, ids, np.array([0, len(ids)] if offsets is None else offsets), **options
    )


def random(row_factors, n, skew=1.0, **options):
    rng = np.random.default_rng(0)
    ids = (math.prod(row_factors) * rng.random(n) ** skew).astype(np.int64)
    return batch(row_factors, ids, **options)


def plan_of(own):
    module = ffi.load("cuda_emulated")
    if module is None:
        pytest.skip(str(ffi.why_unavailable("cuda_emulated")))
    edges = np.array([1, own.rank, own.rank, 1])
    shape = (np.array(own.row_factors), np.array(own.col_factors), edges)
    n, wide = len(own.ids), own.rows > 2**31
    size, _ = module.plan_size(*shape, own.rows, n, n)
    workspace = module.workspace_size("plan", *shape, n)
    results = [
        jax.ShapeDtypeStruct((size,), jnp.int32),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    ids = own.digits().T.astype(np.int32) if wide else own.ids.astype(np.int32)
    plan, _ = jax.ffi.ffi_call(ffi.target("cuda_emulated", "plan"), results)(
        jnp.asarray(ids),
        jnp.asarray(own.offsets, jnp.int32),
        jnp.ones(()),
        split=wide,
        padded=own.padded,
        bounds=own.bounds,
        table="",
        row_factors=shape[0],
        col_factors=shape[1],
        ranks=shape[2],
        num_embeddings=np.int64(own.rows),
        hint=np.int64(0),
        resharded=False,
    )
    return np.asarray(plan)


class Plan:
    """The arrays of a plan, as `ffi/cuda/tt_plan/plan.h` places them."""

    def __init__(self, own, words):
        n, place = len(own.ids), HEADER

        def take(count):
            nonlocal place
            place += count
            return words[place - count : place]

        self.valid, self.broken, self.bad_ids, self.positions = words[:4]
        self.bag, self.order, self.row_of, self.row_head = (take(n) for _ in range(4))
        self.row_begin = take(n + 1)
        self.row_digit = take(3 * n).reshape(3, n)
        first, last = take(n), take(n)
        self.list = first, self.order, last
        place = -(-place // 4) * 4
        self.parts = [take(4 * count).reshape(-1, 4) for count in own.part_numbers]
        assert place == len(words)


def check_parts(parts, size, numbers):
    """That parts divide the entries of each slice; ``numbers``: the slice of an entry by its number."""
    covered, number = {}, 0
    while number < len(parts):
        slice_, _, _, count = parts[number]
        if slice_ < 0:
            number += 1
            continue
        assert count >= 1
        for k, (same, begin, end, rank) in enumerate(parts[number : number + count]):
            assert same == slice_ and 0 < end - begin <= size and rank == (count if k == 0 else -k)
            assert k == 0 or begin == parts[number + k - 1][2]
            covered |= dict.fromkeys(range(begin, end), slice_)
        number += count
    assert covered == numbers


def check(own):
    words = plan_of(own)
    plan, digits, valid = Plan(own, words), own.digits(), own.valid
    n, positions = len(own.ids), np.flatnonzero(valid)
    assert (plan.valid, plan.broken, plan.positions) == (len(positions), 0, n)
    bags = np.searchsorted(own.offsets, np.arange(n), side="right") - 1
    assert bool(plan.bad_ids) == own.refused.any()
    np.testing.assert_array_equal(
        plan.bag, np.where(valid, bags, np.where(own.refused, POISONED, -1))
    )
    assert (plan.row_of[~valid] == -1).all() and (plan.row_head[~valid] == -1).all()
    # Positions by row, those of a row in their order.
    order = plan.order[: len(positions)]
    np.testing.assert_array_equal(np.sort(order), positions)
    sorted_ids, rows = own.ids[order], plan.row_of[order]
    starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))
    assert len(starts) == len(np.unique(sorted_ids))
    assert (np.diff(digits[1][order]) >= 0).all() and (np.diff(rows) >= 0).all()
    heads = np.zeros(len(order), bool)
    heads[starts] = True
    np.testing.assert_array_equal(plan.row_head[order], np.where(heads, rows, -1))
    np.testing.assert_array_equal(np.diff(rows)[~heads[1:]], 0)
    assert (rows <= np.arange(len(rows))).all()
    ends = np.append(starts, len(order))[1:]
    for start, end in zip(starts, ends, strict=True):
        assert (np.diff(order[start:end]) > 0).all()
        assert tuple(plan.row_begin[rows[start] :][:2]) == (start, end)
        np.testing.assert_array_equal(plan.row_digit[:, rows[start]], digits[:, order[start]])
    # Rows of a slice have numbers without gaps; lists have the positions of each slice together.
    check_parts(
        plan.parts[1], own.part_rows[1], {rows[i]: digits[1][order[i]] for i in starts.tolist()}
    )
    for core in (0, 2):
        listed = plan.list[core][: len(positions)]
        np.testing.assert_array_equal(np.sort(listed), positions)
        slices = digits[core][listed]
        assert (np.diff(slices) >= 0).all()
        check_parts(plan.parts[core], own.part_rows[core], dict(enumerate(slices)))
    return words


def edges(row_factors, n):
    """The first and last rows of slices of the middle core."""
    _, p1, p2 = row_factors
    starts = np.random.default_rng(0).integers(1, math.prod(row_factors) // p2, n // 2) * p2
    starts[: n // 4] -= starts[: n // 4] % (p1 * p2)
    return batch(row_factors, np.concatenate([starts, np.maximum(starts - 1, 0)]))


SMALL = (6, 7, 8)
FEW_SLICES = random((50, 1, 60), 4100)
BATCHES = {
    "none": batch(SMALL, np.zeros(0, np.int64)),
    "uniform": random(SMALL, 500),
    "sparse": random((200, 220, 250), 700),
    "one id": batch(SMALL, np.full(700, 41)),
    "skewed": random((20, 30, 40), 3000, skew=4.0),
    "bad ids": batch(SMALL, [0, 336, -1, 5, -7, 5, 10**6, 335, 0], [0, 2, 2, 7], padded=True),
    "bad ids among others": batch(
        SMALL, np.random.default_rng(0).integers(-4, 340, 600), [0, 9, 550], padded=True
    ),
    "edges of slices": edges((1291, 1289, 1283), 1024),
    "many slices": random((3, 5000, 2), 300),
    "few slices": FEW_SLICES,
    "refused ids": batch(SMALL, [0, 336, 5, -1], bounds="error"),
    "refused ids of few slices": dataclasses.replace(
        FEW_SLICES,
        ids=np.where(np.arange(4100) % 900, FEW_SLICES.ids, 10**6),
        bounds="error",
    ),
    "few slices of an outer core": random((50, 60, 1), 4100),
    "wide digits": random((2**17, 2**17, 2**17), 300),
}
assert 4100 > 4096  # more ids than the one launch takes for a slice


@pytest.mark.parametrize("name", BATCHES)
def test_plan(name):
    check(BATCHES[name])


@pytest.mark.parametrize("n", [8192, 8193])
def test_batches_that_one_block_or_several_sort(n):
    """Around the size at which one block gives way to several."""
    module = ffi.load("cuda_emulated")
    if module is None:
        pytest.skip(str(ffi.why_unavailable("cuda_emulated")))
    module.clear_launch_counts()
    check(random((50, 1, 60), n))  # one slice, so that as many ids are not planned in one launch
    counts = module.launch_counts()
    assert ("SortInOneBlock" in counts, "SortTiles" in counts) == (n <= 8192, n > 8192)


def tiles_of(prefixes, tile):
    """Rows of the tiles that rows with these prefixes fill, each as full as it gets."""
    sizes, rows, own = [], 0, []
    for prefix in prefixes:
        own.append(prefix)
        if rows + 1 > tile[0] or len(set(own)) > tile[1]:
            sizes.append(rows)
            rows, own = 0, [prefix]
        rows += 1
    return [*sizes, rows]


@pytest.mark.parametrize(
    "own",
    [
        random((5, 2, 300), 1000, col_factors=(4, 4, 4), rank=32),
        random((60, 2, 90), 900, col_factors=(4, 4, 2), rank=16),
        pytest.param(
            random((80, 5, 500), 20_000, col_factors=(4, 4, 4), rank=32), marks=pytest.mark.slow
        ),
    ],
    ids=["few prefixes", "mirrored", "two tiles"],
)
def test_parts_end_with_tiles(own):
    """The parts of the specialised kernels, of rows and of the prefixes that they share."""
    plan = Plan(own, check(own))
    rows = np.sort(plan.row_head[plan.row_head >= 0])
    left = 2 if own.col_factors[2] < own.col_factors[0] else 0
    for slice_ in range(own.row_factors[1]):
        mine = rows[plan.row_digit[1][rows] == slice_]
        tiles = tiles_of(plan.row_digit[left][mine].tolist(), own.tile)
        step = own.part_tiles
        found = [end - begin for same, begin, end, _ in plan.parts[1] if same == slice_]
        assert found == [sum(tiles[i : i + step]) for i in range(0, len(tiles), step)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        batch(SMALL, np.where(np.arange(9500) % 50, 41, np.arange(9500) % 336)),
        random((40, 50, 60), 66_000, skew=2.0),
    ],
    ids=["a slice beyond shared memory", "beyond one launch"],
)
def test_large_plan(own):
    check(own)
