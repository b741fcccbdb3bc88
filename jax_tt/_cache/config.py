"""`RowCache`: what a layer's `cache` argument says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jax_tt._arguments import as_dtype, as_int, one_of
from jax_tt._cache.directory import POLICIES
from jax_tt._dtypes import x64_enabled

GRADIENTS = ("rows", "cores")

_ROOM = 32  # ghosts of a bucket: one batch looks through one bucket per distinct miss
_MAX_SLOTS = 2**31 - 1


def _check_positive(name: str, value: Any) -> None:
    if as_int(name, value) < 1:
        raise ValueError(f"{name}: got {value}; expected an integer of at least 1.")


@dataclasses.dataclass(frozen=True)
class WriteBack:
    """How rows that leave the cache are put back into the cores.

    What a row learned, its cached value v less the row w that the cores give, is fitted by a change of the cores:
    ``min_delta |J delta - (v - w)|^2 + ridge * s * |delta|^2 + keep * |K delta|^2``, where J and K are the derivatives
    of the leaving rows and of as many rows drawn at random, and s is the size of ``J J^T`` along ``v - w``. Solved by
    conjugate gradients, `chunk` rows at a time; a step is shortened for as long as that leaves less of ``v - w``, and
    not taken where it leaves more than there was. A row that is not finite is dropped.

    Args:
        steps: Gauss-Newton steps per chunk.
        iterations: conjugate-gradient iterations per step.
        ridge: weight of the size of the change.
        keep: weight of the damage to rows that were not in the cache; 0 to leave them out of the problem.
        chunk: rows fitted together.

    >>> import jax_tt
    >>> jax_tt.WriteBack(iterations=20).ridge
    0.001
    """

    steps: int = 2
    iterations: int = 16
    ridge: float = 1e-3
    keep: float = 0.0
    chunk: int = 1024

    def __post_init__(self) -> None:
        for name in ("steps", "iterations", "chunk"):
            _check_positive(f"WriteBack.{name}", getattr(self, name))
        for name in ("ridge", "keep"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(
                    f"WriteBack.{name}: got {value!r}; expected a finite number of at least 0."
                )


@dataclasses.dataclass(frozen=True)
class RowCache:
    """A set-associative cache of uncompressed rows in front of a tensor-train table.

    Rows are *counted* by every training call of the layer: that costs little and changes no row. The cache is
    *populated* when hot rows that were counted trade places with cold cached ones: by `refresh_caches` (which
    `FusedOptimizer.update` calls) every ``refresh_every`` training steps, or by the layer's ``populate()``.

    Args:
        capacity: rows to hold, rounded up to whole sets.
        ways: rows of a set. A row's set follows from its id; more ways mean fewer conflicts.
        policy: ``"lfu"`` keeps the rows asked for most often, ``"lru"`` those asked for last. A row touched in the
            current step never leaves, and one leaves only for a hotter one.
        counters: rows outside the cache to keep counts of, 16 bytes each, rounded up to whole buckets; default 16 for
            every slot, but not more than the table has rows.
        refresh_every: training steps between two refreshes, or None to call ``populate()`` yourself.
        gradients: ``"rows"``: a cached row is a parameter of its own, trained like one row of a dense table, and what
            it learned is written back into the cores when it leaves. ``"cores"``: the cache is a copy, gradients
            always reach the cores, and a cached row is as old as the last refresh.
        write_back: `WriteBack`, or None to drop what leaving rows have learned; ``gradients="rows"`` only.
        dtype: type of the rows; default that of the cores.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    >>> import jax_tt
    >>> jax_tt.RowCache(capacity=1000, ways=32).layout(num_embeddings=100_000)
    (32, 32, 512, 32)
    """

    capacity: int
    ways: int = 32
    policy: str = "lfu"
    counters: int | None = None
    refresh_every: int | None = None
    gradients: str = "rows"
    write_back: WriteBack | None = WriteBack()
    dtype: Any = None

    def __post_init__(self) -> None:
        _check_positive("RowCache.capacity", self.capacity)
        _check_positive("RowCache.ways", self.ways)
        one_of("RowCache.policy", self.policy, POLICIES)
        one_of("RowCache.gradients", self.gradients, GRADIENTS)
        for name in ("counters", "refresh_every"):
            if getattr(self, name) is not None:
                _check_positive(f"RowCache.{name}", getattr(self, name))
        if self.write_back is not None and not isinstance(self.write_back, WriteBack):
            raise TypeError(
                f"RowCache.write_back: got {self.write_back!r}; expected a jax_tt.WriteBack, or None to drop what "
                "leaving rows have learned."
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", as_dtype("RowCache.dtype", self.dtype, None))

    def layout(self, num_embeddings: int) -> tuple[int, int, int, int]:
        """Sets, ways, buckets of ghosts and ghosts of a bucket, for a table of this many rows."""
        capacity = min(self.capacity, num_embeddings)
        ways = min(self.ways, capacity)
        sets = -(-capacity // ways)
        if sets * ways > _MAX_SLOTS:
            raise ValueError(
                f"RowCache.capacity: got {self.capacity}; expected at most {_MAX_SLOTS}."
            )
        counters = self.counters
        if counters is None:
            counters = min(16 * sets * ways, num_embeddings)
        room = min(_ROOM, counters)
        return sets, ways, sets * max(1, -(-counters // (sets * room))), room

    def key_dtype(self, num_embeddings: int) -> Any:
        """Type that ids are kept in."""
        if num_embeddings <= 2**31 - 1:
            return jnp.int32
        if not x64_enabled():
            raise ValueError(
                f"cache: a table of {num_embeddings} rows has ids beyond 31 bits; jax_enable_x64 lets the cache keep "
                "them in 64 bits. Set it, or use the table without a cache."
            )
        return jnp.int64
