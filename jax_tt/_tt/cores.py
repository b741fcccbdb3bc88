"""The sizes of a tensor train, and the checks of cores that users pass."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, as_positive, expect, mismatch, type_of
from jax_tt._base.storage import MAX_COLUMNS, check_storage, table_label
from jax_tt._tt.shape import TTShape


@dataclasses.dataclass(frozen=True)
class TrainSizes:
    """The sizes of cores ``[p_k, r_k, q_k, r_{k+1}]``.

    ``ranks`` has ``d + 1`` entries, of which the first and last are 1.
    """

    num_embeddings: int
    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    param_dtype: Any

    @property
    def d(self) -> int:
        return len(self.row_factors)

    @functools.cached_property
    def features(self) -> int:
        return math.prod(self.col_factors)

    @functools.cached_property
    def attributes(self) -> dict[str, Any]:
        """The sizes as attributes of native operations."""
        return {
            "row_factors": np.asarray(self.row_factors, np.int64),
            "col_factors": np.asarray(self.col_factors, np.int64),
            "ranks": np.asarray(self.ranks, np.int64),
            "num_embeddings": np.int64(self.num_embeddings),
        }

    @property
    def shape(self) -> TTShape:
        """The `TTShape` of these sizes."""
        inner = self.ranks[1:-1]
        return TTShape(
            self.num_embeddings, self.features, inner, self.row_factors, self.col_factors
        )


def checked_cores(
    cores: Sequence[Any], num_embeddings: int | None = None, name: str | None = None
) -> tuple[TrainSizes, tuple[jax.Array, ...]]:
    """Checks that cores fit together; returns their sizes and the cores as JAX arrays."""
    label = table_label(name)
    if not isinstance(cores, tuple | list) or not 2 <= len(cores) <= 5:
        got = f"{len(cores)} cores" if isinstance(cores, tuple | list) else type_of(cores)
        raise mismatch(f"{label}cores", got, "a tuple of 2 to 5 arrays, e.g. from jax_tt.tt.init")
    arrays = [as_array(f"{label}cores[{k}]", core) for k, core in enumerate(cores)]
    shapes = [tuple(core.shape) for core in arrays]
    ranks = _ranks(label, shapes)
    check_storage(label, "cores", {str(core.dtype) for core in arrays})
    rows = math.prod(shape[0] for shape in shapes)
    columns = math.prod(shape[2] for shape in shapes)
    if rows >= 2**63 or columns > MAX_COLUMNS:
        got = f"{rows} rows of {columns} columns, by the shapes {shapes}"
        raise mismatch(f"{label}cores", got, "fewer than 2**63 rows and 2**31 columns")
    n = rows if num_embeddings is None else as_positive(f"{label}num_embeddings", num_embeddings)
    expected = f"1 to {rows}, the rows that these cores address"
    expect(n <= rows, f"{label}num_embeddings", n, expected)
    row_factors, col_factors = (tuple(shape[axis] for shape in shapes) for axis in (0, 2))
    sizes = TrainSizes(n, row_factors, col_factors, ranks, arrays[0].dtype)
    # Cores read from a file are numpy arrays, which a traced index cannot index.
    return sizes, tuple(map(jnp.asarray, arrays))


def _ranks(label: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks of cores with these shapes, which must match."""
    for k, shape in enumerate(shapes):
        if len(shape) != 4 or 0 in shape:
            expected = "[p, r_left, q, r_right], none of them 0"
            raise mismatch(f"{label}cores[{k}]", f"shape {shape}", expected)
    ranks = (shapes[0][1], *(shape[3] for shape in shapes))
    for k, shape in enumerate(shapes):
        got = f"the left rank {shape[1]}, in shapes {shapes}"
        expected = f"{ranks[k]}, the right rank of cores[{k - 1}]"
        expect(shape[1] == ranks[k], f"{label}cores[{k}]", got, expected)
    got = f"outer ranks {ranks[0]} and {ranks[-1]}"
    expect(ranks[0] == ranks[-1] == 1, f"{label}cores", got, "1 and 1")
    return ranks


def table_pair(
    a: Sequence[Any], b: Sequence[Any], num_embeddings: int | None = None
) -> tuple[TrainSizes, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Two tables of the same factors."""
    left, a = checked_cores(a, num_embeddings, name="a")
    right, b = checked_cores(b, num_embeddings, name="b")
    if (left.row_factors, left.col_factors) != (right.row_factors, right.col_factors):
        got = f"row factors {right.row_factors} and column factors {right.col_factors}"
        expected = f"those of a, {left.row_factors} and {left.col_factors}"
        raise mismatch("b", got, expected, "Only the ranks may differ.")
    return left, a, b
