"""`TTShape`: the sizes of a tensor-train table, validated once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_dtype, as_int, as_number, as_positive, mismatch
from jax_tt._base.rows_of_arrays import exactly_one
from jax_tt._ids.split_ids import SplitIds, join_on_host, split_on_host
from jax_tt._tt.budget import best_shape, least_params
from jax_tt._tt.factor import balanced_cover, exact_factors


class Cost(NamedTuple):
    """Size and work of a table of a given shape; see :meth:`TTShape.cost`."""

    params: int
    bytes: int
    dense_params: int
    dense_bytes: int
    compression: float
    flops_forward: int
    flops_backward: int


def max_ranks(row_factors: Sequence[int], col_factors: Sequence[int]) -> tuple[int, ...]:
    """Largest useful rank between each pair of neighbouring cores."""
    sizes = [p * q for p, q in zip(row_factors, col_factors, strict=True)]
    return tuple(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))


@dataclasses.dataclass(frozen=True)
class TTShape:
    """Shape of a table of ``num_embeddings`` rows and ``features`` columns that is stored as ``d`` cores.

    The number of a row is written in the mixed radix ``row_factors`` with the last digit varying fastest, that of a
    column in the mixed radix ``col_factors``. Core ``k`` has shape ``[p_k, r_k, q_k, r_{k+1}]`` with outer ranks 1.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        ranks: one integer, or the ``d - 1`` inner ranks. A rank above the useful maximum
            ``min(prod_{j<k} p_j q_j, prod_{j>=k} p_j q_j)`` is clipped to it.
        row_factors: ``d`` integers (2 <= d <= 5) with ``N <= prod(p) < 2**63``.
        col_factors: ``d`` integers with ``prod(q) == D``.

    Raises:
        ValueError: a size is out of range; the message suggests a correction.
        TypeError: a size is not an integer.

    >>> import jax_tt
    >>> shape = jax_tt.TTShape(11_000_000, 64, (32, 32), (200, 220, 250), (4, 4, 4))
    >>> shape.core_shapes
    ((200, 1, 4, 32), (220, 32, 4, 32), (250, 32, 4, 1))
    >>> shape.num_params
    958720
    """

    num_embeddings: int
    features: int
    ranks: tuple[int, ...]
    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    _requested: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        ranks: int | Sequence[int],
        row_factors: Sequence[int],
        col_factors: Sequence[int],
    ):
        n, width = _checked_sizes(num_embeddings, features)
        p = _positives("row_factors", row_factors)
        q = _positives("col_factors", col_factors)
        _check_factors(n, width, p, q)
        d = len(p)
        each = ranks if _is_sequence(ranks) else (as_positive("ranks", ranks),) * (d - 1)
        requested = _positives("ranks", each)
        if len(requested) != d - 1:
            raise ValueError(
                f"ranks: got {len(requested)} ranks {requested} for {d} factors; expected one integer or "
                f"the {d - 1} inner ranks (the outer ranks are always 1), e.g. ranks={(32,) * (d - 1)}."
            )
        clipped = tuple(min(r, m) for r, m in zip(requested, max_ranks(p, q), strict=True))
        values = {
            "num_embeddings": n,
            "features": width,
            "ranks": clipped,
            "row_factors": p,
            "col_factors": q,
            "_requested": requested,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def suggest(
        cls, num_embeddings: int, features: int, ranks: int | Sequence[int] = 32, d: int = 3
    ) -> TTShape:
        """A balanced shape: row factors with few unused rows, column factors exact and ascending.

        Args:
            num_embeddings: number of rows.
            features: number of columns; a prime gives column factors such as ``(1, 1, 13)``.
            ranks: one integer or ``d - 1`` of them.
            d: number of cores, 2 to 5.

        Returns:
            A valid `TTShape`. Of the possible orders of its row factors, the one with the fewest parameters.

        >>> import jax_tt
        >>> jax_tt.TTShape.suggest(11_000_000, 64, ranks=32).col_factors
        (4, 4, 4)
        """
        n, width = _checked_sizes(num_embeddings, features)
        d = as_int("d", d)
        _check_d("d", d)
        q = exact_factors(width, d)
        orders = sorted(set(itertools.permutations(balanced_cover(n, d))))
        return min((cls(n, width, ranks, p, q) for p in orders), key=lambda shape: shape.num_params)

    @classmethod
    def for_budget(
        cls,
        num_embeddings: int,
        features: int,
        *,
        max_bytes: int | None = None,
        ratio: float | None = None,
        max_rank: int | None = None,
        dtype: Any = jnp.float32,
    ) -> TTShape:
        """The number of cores, factors and ranks with the least predicted error for a given size, without the table.

        The error is predicted from a model of the table: the squares of the singular values of every unfolding decrease
        as 1, 1/2, 1/3, ..., and the squared error is the sum of what the cuts discard. For 2 to 5 cores with nearly
        equal row factors, parameters are added one after another where they reduce that sum most. Of the shapes whose
        predicted error is within 2 % of the least, the one with the fewest flops per lookup is chosen. If the table is
        available, `tt.from_dense` with ``max_bytes`` chooses the ranks by its actual singular values.

        Args:
            num_embeddings: number of rows.
            features: number of columns.
            max_bytes: the cores take at most this many bytes.
            ratio: the cores have at most ``num_embeddings * features / ratio`` entries.
            max_rank: upper limit of the ranks. The flops of a lookup grow with the square of the ranks, which can
                exceed a thousand if the size is large.
            dtype: storage type of the cores, for ``max_bytes``.

        Returns:
            A valid `TTShape` within the budget.

        Raises:
            ValueError: not exactly one of ``max_bytes`` and ``ratio`` is given, or no shape is that small.

        >>> import jax_tt
        >>> shape = jax_tt.TTShape.for_budget(10_000_000, 64, max_bytes=4_000_000)
        >>> shape.cost().bytes <= 4_000_000
        True
        """
        n, width = _checked_sizes(num_embeddings, features)
        exactly_one(max_bytes=max_bytes, ratio=ratio)
        if ratio is not None:
            as_number("ratio", ratio, "a number above 0, e.g. 100", lambda x: x > 0)
            name, value, params = "ratio", ratio, int(n * width / ratio)
        else:
            size = as_dtype("dtype", dtype, jnp.float32).itemsize
            name, value = "max_bytes", as_positive("max_bytes", max_bytes)
            params = value // size
        largest = None if max_rank is None else as_positive("max_rank", max_rank)
        found = best_shape(n, width, params, largest)
        if found is None:
            expected = f"at least {least_params(n, width)}, a table of {n} x {width} at rank 1"
            raise mismatch(name, f"{value}, which is {params} parameters", expected)
        return cls(n, width, *found)

    @property
    def d(self) -> int:
        """Number of cores."""
        return len(self.row_factors)

    @property
    def full_ranks(self) -> tuple[int, ...]:
        """Ranks including the outer ones: ``(1, *ranks, 1)``."""
        return (1, *self.ranks, 1)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Shape ``(p_k, r_k, q_k, r_{k+1})`` of each core."""
        r = self.full_ranks
        factors = zip(self.row_factors, self.col_factors, strict=True)
        return tuple((p, r[k], q, r[k + 1]) for k, (p, q) in enumerate(factors))

    @property
    def num_params(self) -> int:
        """Number of entries of all cores."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    @property
    def num_rows(self) -> int:
        """Number of rows that the cores can address, ``prod(row_factors) >= num_embeddings``."""
        return math.prod(self.row_factors)

    def grow(self, num_embeddings: int) -> TTShape:
        """The shape of a table that has grown: the first row factor is increased as far as necessary.

        The first digit of a row is its most significant one, so that existing rows keep their digits.

        Args:
            num_embeddings: new number of rows, at least the current one.

        Returns:
            `TTShape` with the same ranks and the same other factors.

        >>> import jax_tt
        >>> shape = jax_tt.TTShape(990, 8, 4, (10, 10, 10), (2, 2, 2))
        >>> shape.grow(1000).row_factors, shape.grow(1001).row_factors
        ((10, 10, 10), (11, 10, 10))
        """
        n = as_positive("num_embeddings", num_embeddings)
        if n < self.num_embeddings:
            got = f"{n} for a table of {self.num_embeddings}"
            raise mismatch("num_embeddings", got, "at least as many: a table only grows")
        first, *rest = self.row_factors
        factors = (max(first, -(-n // math.prod(rest))), *rest)
        return TTShape(n, self.features, self.ranks, factors, self.col_factors)

    def cost(self, nnz: int = 1, dtype: Any = jnp.float32) -> Cost:
        """Size and work of the table.

        Args:
            nnz: number of lookups for which flops are counted.
            dtype: storage type of the cores and of the dense table that they are compared with.

        Returns:
            `tt.Cost` with parameters, bytes, those of the dense table, the compression ratio, and the flops of ``nnz``
            lookups, each contracted separately, starting from the cheaper side.

        >>> import jax_tt
        >>> jax_tt.TTShape(11_000_000, 64, 32, (200, 220, 250), (4, 4, 4)).cost(1).flops_forward
        36864
        """
        nnz = as_int("nnz", nnz, 0)
        q, r = self.col_factors, self.full_ranks
        core_work = [2 * r[k] * q[k] * r[k + 1] for k in range(self.d)]
        from_left = sum(math.prod(q[:k]) * core_work[k] for k in range(1, self.d))
        from_right = sum(math.prod(q[k + 1 :]) * core_work[k] for k in range(self.d - 1))
        flops = nnz * min(from_left, from_right)
        size = jnp.dtype(dtype).itemsize
        dense = self.num_embeddings * self.features
        return Cost(
            params=self.num_params,
            bytes=self.num_params * size,
            dense_params=dense,
            dense_bytes=dense * size,
            compression=dense / self.num_params,
            flops_forward=flops,
            flops_backward=2 * flops,
        )

    def layer_arguments(self) -> dict[str, Any]:
        """Arguments for `TTEmbed` and `TTEmbedBag` that give this shape.

        >>> import jax_tt
        >>> jax_tt.TTShape.suggest(1000, 8, ranks=4).layer_arguments()["tt_ranks"]
        (4, 4)
        """
        return {
            "num_embeddings": self.num_embeddings,
            "features": self.features,
            "tt_ranks": self.ranks,
            "row_factors": self.row_factors,
            "col_factors": self.col_factors,
        }

    def split_ids(self, ids: Any) -> SplitIds:
        """Splits host ids exactly into digits, for tables beyond 2**31 rows without x64.

        Args:
            ids: numpy integers (or nested lists of them) of any shape.

        Returns:
            `SplitIds` with int32 digits ``[..., d]``. An id below 0 or at least ``num_embeddings`` remains out of
            range, and is handled by the ``bounds`` of the operation.
        """
        return split_on_host(ids, self.num_embeddings, self.row_factors)

    def join_ids(self, ids: SplitIds) -> np.ndarray:
        """The integers of digits, on the host: the inverse of `split_ids`.

        Args:
            ids: `SplitIds` with digits ``[..., d]``, not traced.

        Returns:
            int64 ``[...]``; -1 for a negative id and for padding, ``num_embeddings`` for one that is too large.

        >>> import jax_tt, numpy as np
        >>> shape = jax_tt.TTShape(10**12, 32, 8, (252,) * 5, (2, 2, 2, 2, 2))
        >>> shape.join_ids(shape.split_ids(np.array([10**11, -3])))
        array([100000000000,           -1])
        """
        return join_on_host(ids, self.num_embeddings, self.row_factors)

    def __str__(self) -> str:
        ranks = str(self.ranks)
        if self.ranks != self._requested:
            ranks += f" (clipped from {self._requested}, the most that helps)"
        cost = self.cost()
        return (
            f"TTShape {self.num_embeddings:,} x {self.features}: rows {_times(self.row_factors)}, "
            f"columns {_times(self.col_factors)}, ranks {ranks}; {cost.params:,} parameters, "
            f"{cost.compression:,.1f}x smaller than dense"
        )

    def __repr__(self) -> str:
        clipped = "" if self.ranks == self._requested else f" <clipped from {self._requested}>"
        return (
            f"TTShape(num_embeddings={self.num_embeddings}, features={self.features}, "
            f"ranks={self.ranks}{clipped}, row_factors={self.row_factors}, "
            f"col_factors={self.col_factors})"
        )


def _times(factors: Sequence[int]) -> str:
    return " x ".join(map(str, factors))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _positives(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not _is_sequence(values):
        raise TypeError(f"{name}: got {values!r}; expected a tuple of integers.")
    return tuple(as_positive(f"{name}[{k}]", value) for k, value in enumerate(values))


def _checked_sizes(num_embeddings: Any, features: Any) -> tuple[int, int]:
    n = as_int("num_embeddings", num_embeddings, 1, 2**63 - 1)
    return n, as_int("features", features, 1, 2**31 - 1)


def _check_d(name: str, d: int) -> None:
    if not 2 <= d <= 5:
        raise ValueError(f"{name}: got {d} cores; a tensor-train table has 2 to 5, e.g. d=3.")


def _check_factors(n: int, width: int, p: tuple[int, ...], q: tuple[int, ...]) -> None:
    _check_d("row_factors", len(p))
    d = len(p)
    if len(q) != d:
        got = f"{len(q)} factors {q} for {d} row_factors {p}"
        raise mismatch("col_factors", got, f"{d}, e.g. col_factors={exact_factors(width, d)}")
    if math.prod(q) != width:
        example = f"e.g. col_factors={exact_factors(width, d)}"
        expected = f"a product of exactly features={width}, {example}"
        raise mismatch("col_factors", f"{_times(q)} = {math.prod(q)}", expected)
    rows = math.prod(p)
    if rows >= 2**63 or max(p) >= 2**31:
        expected = "a product below 2**63 and every factor below 2**31"
        raise mismatch("row_factors", f"{_times(p)} = {rows}", expected, "Use more cores.")
    if rows < n:
        example = f"e.g. row_factors={balanced_cover(n, d)}"
        expected = f"a product of at least num_embeddings={n}, {example}"
        raise mismatch("row_factors", f"{_times(p)} = {rows}", expected)
