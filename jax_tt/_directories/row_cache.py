"""`RowCache`: the value of a layer's `cache` argument."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import (
    as_dtype,
    as_int,
    as_number,
    as_positive,
    expect,
    mismatch,
    one_of,
)
from jax_tt._base.dtypes import x64_enabled
from jax_tt._directories.cache_directory import POLICIES
from jax_tt._directories.miss_ratio import stream
from jax_tt._directories.scores import Scoring
from jax_tt.optimizers import Optimizer

GRADIENTS = ("rows", "cores")

_ROOM = 16  # ghosts per bucket; a batch searches one bucket per distinct miss
_CAUTION = 4  # requests of the coldest cached row relative to the largest error of a count


@dataclasses.dataclass(frozen=True)
class WriteBack:
    """How evicted rows are written back into the cores.

    What a row learned, its cached value v minus its value w in the cores, is fitted by a change of the cores:
    ``min_delta |v - w(cores + delta)|^2 + ridge * s * |delta|^2``. The norm of delta measures the change of the whole
    table, so that the ridge protects all other rows; s is the size of ``J J^T`` along ``v - w`` in this norm, where J
    is the derivative of the evicted rows. The fit takes Gauss-Newton steps, each solved by conjugate gradients, on
    `chunk` rows at a time; a step is halved until the loss decreases, and skipped if it does not. Rows that are not
    finite are dropped.

    Args:
        ridge: weight of the change of all other rows. 0 fits the evicted rows as well as the cores can; 1 loses about
            three tenths of what they learned, but changes the other rows only a quarter as much as 0.1.
        steps: Gauss-Newton steps per chunk.
        iterations: maximum of conjugate-gradient iterations per step.
        chunk: rows fitted together.

    >>> import jax_tt
    >>> jax_tt.cache.WriteBack(iterations=20).ridge
    0.1
    """

    ridge: float = 0.1
    steps: int = 2
    iterations: int = 12
    chunk: int = 1024

    def __post_init__(self) -> None:
        for name in ("steps", "iterations", "chunk"):
            as_positive(f"WriteBack.{name}", getattr(self, name))
        expected = "a finite number of at least 0"
        as_number("WriteBack.ridge", self.ridge, expected, lambda x: 0 <= x < math.inf)


@dataclasses.dataclass(frozen=True)
class RowCache:
    """A set-associative cache of uncompressed rows in front of a tensor-train table.

    Every training call of the layer *counts* its rows; this is cheap and changes no row. *Populating* the cache
    replaces cold cached rows by hot rows that were counted. `refresh_caches` (which `FusedOptimizer.update` calls)
    does this every ``refresh_every`` training steps, and so does the layer's ``populate()``.

    Args:
        capacity: number of cached rows, rounded up to whole sets.
        ways: rows per set. The set of a row depends on its id only; more ways mean fewer conflicts.
        policy: ``"lfu"`` keeps the most frequently requested rows, ``"lru"`` the most recently requested ones and,
            within one step, those with most requests. A row touched in the current step is never evicted, and a row
            is evicted only for a hotter one.
        half_life: requests per slot of the cache after which a request counts half: 64 with a capacity of 1,000 is
            64,000 requests. None gives all requests the same weight, which suits ids whose popularity does not
            change. ``policy="lfu"`` only.
        counters: uncached rows to keep counts of, 16 bytes each, rounded up to whole buckets; default 16 per slot,
            but not more than the table has rows.
        refresh_every: training steps between two refreshes, or None to call ``populate()`` yourself.
        gradients: ``"rows"``: a cached row is a separate parameter, trained like a row of a dense table, and is
            written back into the cores when it is evicted. ``"cores"``: the cache is a copy from the last refresh,
            and all gradients go to the cores.
        write_back: `WriteBack`, or None to drop what evicted rows have learned; ``gradients="rows"`` only.
        dtype: type of the rows; default that of the cores.

    >>> import jax_tt
    >>> jax_tt.RowCache(capacity=1000, ways=32).layout(num_embeddings=100_000)
    (32, 32, 1024, 16)
    """

    capacity: int
    ways: int = 32
    policy: str = "lfu"
    half_life: int | None = 64
    counters: int | None = None
    refresh_every: int | None = None
    gradients: str = "rows"
    write_back: WriteBack | None = WriteBack()
    dtype: Any = None

    def __post_init__(self) -> None:
        as_positive("RowCache.capacity", self.capacity)
        as_positive("RowCache.ways", self.ways)
        one_of("RowCache.policy", self.policy, POLICIES)
        one_of("RowCache.gradients", self.gradients, GRADIENTS)
        for name in ("half_life", "counters", "refresh_every"):
            if getattr(self, name) is not None:
                as_positive(f"RowCache.{name}", getattr(self, name))
        if self.write_back is not None and not isinstance(self.write_back, WriteBack):
            expected = "a jax_tt.cache.WriteBack, or None to drop what leaving rows have learned"
            raise mismatch("RowCache.write_back", repr(self.write_back), expected, error=TypeError)
        if self.dtype is not None:
            # A name, since np.dtype("float64") == None, and jit reuses programs for equal caches.
            name = as_dtype("RowCache.dtype", self.dtype, None).name
            object.__setattr__(self, "dtype", name)

    @classmethod
    def suggest(
        cls,
        ids: Any,
        budget_bytes: int,
        *,
        features: int,
        dtype: Any = jnp.float32,
        optimizer: Optimizer | None = None,
        **options: Any,
    ) -> RowCache:
        """The largest cache that fits into a memory budget, with the counters that it needs.

        A slot takes the row (``features`` of ``dtype``), its optimizer state and 12 bytes of directory; a counter takes
        16 bytes (16 and 20 for ids beyond 31 bits). LFU must distinguish the coldest cached row from uncached rows:
        with c counters, a count may be too small by 1/c of all misses. Enough counters are chosen to make this at most
        a quarter of the requests for the coldest cached row in the sample. LRU needs only the latest misses: 4 counters
        per slot, which is also the minimum for LFU. There are at most as many counters as distinct ids, and counters
        above the minimum take at most a third of the budget.

        Args:
            ids: a sample of requested ids, a hundred times as many as the cache has rows; negative ids are ignored.
            budget_bytes: memory for rows, their optimizer state and the directory.
            features: columns of the table.
            dtype: type of the rows.
            optimizer: the fused optimizer; None for optax, whose state is not counted, and if the cache holds copies
                (``gradients="cores"``).
            **options: of `RowCache`.

        Returns:
            `RowCache` with a capacity of at most the number of distinct ids in the sample.

        Raises:
            ValueError: the sample is empty, or the budget too small for one row.

        >>> import jax_tt, numpy as np
        >>> ids = np.random.default_rng(0).zipf(1.2, 100_000) % 50_000
        >>> cache = jax_tt.RowCache.suggest(ids, 200_000, features=64, ways=8)
        >>> cache.capacity, cache.counters
        (496, 4166)
        """
        probe = cls(capacity=1, **{"dtype": dtype, **options})
        return _suggested(probe, ids, budget_bytes, features, optimizer)

    @property
    def scoring(self) -> Scoring:
        """How requests become scores."""
        return Scoring(self.policy, self.half_life if self.policy == "lfu" else None)

    def layout(self, num_embeddings: int) -> tuple[int, int, int, int]:
        """Sets, ways, ghost buckets, and ghosts per bucket, for a table of this many rows."""
        capacity = min(self.capacity, num_embeddings)
        ways = min(self.ways, capacity)
        sets = -(-capacity // ways)
        expect(sets * ways < 2**31, "RowCache.capacity", self.capacity, "fewer than 2**31")
        counters = self.counters
        if counters is None:
            counters = min(16 * sets * ways, num_embeddings)
        room = min(_ROOM, counters)
        return sets, ways, sets * max(1, -(-counters // (sets * room))), room

    def key_dtype(self, num_embeddings: int) -> Any:
        """Type of the stored ids."""
        if num_embeddings <= 2**31 - 1:
            return jnp.int32
        if not x64_enabled():
            got = f"a table of {num_embeddings} rows, whose ids are beyond 31 bits"
            raise mismatch("cache", got, "no cache, or jax_enable_x64, which keeps them in 64 bits")
        return jnp.int64


def _suggested(
    cache: RowCache, ids: Any, budget_bytes: int, features: int, optimizer: Optimizer | None
) -> RowCache:
    """The cache with the capacity and the counters that `RowCache.suggest` describes."""
    budget, features = as_int("budget_bytes", budget_bytes), as_int("features", features)
    counts = np.sort(np.unique(stream(ids), return_counts=True)[1])[::-1].astype(np.int64)
    expect(counts.size, "ids", "none", "a sample of the ids that the table is asked for")
    slot, counter = entry_bytes(
        int(np.asarray(ids).max()), features, as_dtype("dtype", cache.dtype, jnp.float32), optimizer
    )
    capacity = np.arange(1, counts.size + 1)
    if cache.policy == "lfu":
        misses = counts.sum() - np.cumsum(counts)
        counters = _CAUTION * misses // counts
    else:
        counters = 4 * capacity
    least = np.minimum(4 * capacity, counts.size)
    most = np.maximum(least, min(counts.size, budget // (3 * counter)))
    counters = np.clip(counters, least, most)
    fits = np.flatnonzero(slot * capacity + counter * counters <= budget)
    if not fits.size:
        least = slot + counter * int(counters[0])
        expected = f"at least {least} bytes, for one row and its counters"
        raise mismatch("budget_bytes", f"{budget_bytes} bytes", expected)
    best = int(capacity[fits[-1]])
    if best > cache.ways:
        best -= best % cache.ways  # whole sets, since rounding up would exceed the budget
    return dataclasses.replace(cache, capacity=best, counters=int(counters[best - 1]))


def entry_bytes(
    largest_id: int, features: int, dtype: Any, optimizer: Optimizer | None
) -> tuple[int, int]:
    """Bytes of a slot, with its row and the optimizer state of the row, and of a counter."""
    counter = 20 if largest_id > 2**31 - 1 else 16
    kinds = optimizer.slots if optimizer else ()
    state = sum(
        jnp.dtype(kind.dtype).itemsize * (1 if kind.rowwise else features) for kind in kinds
    )
    return features * jnp.dtype(dtype).itemsize + state + counter - 4, counter
