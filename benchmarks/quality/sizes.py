"""Ranks, rows and columns of each kind of table for a given ratio."""

from collections.abc import Callable, Iterable
from functools import partial

import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.quality.settings import WHOLE


def check_fits(
    kind: str, rows: int, features: int, ratio: float | None, dtype: str = "float32"
) -> None:
    """Raises the ValueError of `tables.make_table` where no table of this kind is that small, without making it."""
    if kind in WHOLE or (kind == "tt" and ratio is None):
        return
    if ratio is None:
        raise ValueError(f"ratio: got None for {kind}; expected a number above 1.")
    itemsize = jnp.dtype(dtype).itemsize
    match kind:
        case "tt":
            tt_shape(rows, features, ratio)
        case "tt2":
            tt2_shape(rows, features, ratio)
        case "tt_residual":
            residual_shapes(rows, features, ratio, dtype)
        case "low_rank":
            low_rank(rows, features, ratio, itemsize)
        case "hashing":
            hashed_rows(rows, ratio, itemsize)
        case "quotient_remainder":
            remainders(rows, ratio, itemsize)


def split_ratio(
    kind: str, sizes: Iterable[int], features: int, ratio: float | None
) -> list[float | None]:
    """The ratio of each of several tables of these numbers of rows, which together have the given one.

    Tables "tt2" take the same number of bytes each: the smaller one has more interactions a row, which is worth more.
    Those of "tt_residual" do beside one order of their ids. The others have the same ratio.
    """
    rows = list(sizes)
    if ratio is None or kind not in ("tt2", "tt_residual"):
        return [ratio] * len(rows)
    orders = [order_bytes(own) if kind == "tt_residual" else 0 for own in rows]
    rest = (sum(rows) * features * 4 / ratio - sum(orders)) / len(rows)
    if rest <= 0:
        raise _too_small(kind, ratio, f"the orders of {rows} ids take {sum(orders):,} bytes")
    return [own * features * 4 / (order + rest) for own, order in zip(rows, orders, strict=True)]


def tt_shape(rows: int, features: int, ratio: float) -> jax_tt.TTShape:
    """Three cores of the largest equal ranks within the budget."""
    suggest = partial(jax_tt.TTShape.suggest, rows, features)
    return _largest("tt", rows, features, ratio, suggest)


def tt2_shape(rows: int, features: int, ratio: float) -> jax_tt.TTShape:
    """Two cores of the largest rank within the budget: [p_1, 1, features, r] and [p_2, r, 1, 1].

    The p_2 ids that share a first digit are combinations of r vectors, which are theirs alone; the coefficients of the
    second digit are shared by all.
    """
    p = jax_tt.TTShape.suggest(rows, features, 1, d=2).row_factors
    suggest = lambda rank: jax_tt.TTShape(rows, features, rank, p, (features, 1))  # noqa: E731
    return _largest("tt2", rows, features, ratio, suggest)


def residual_shapes(
    rows: int, features: int, ratio: float, dtype: str
) -> tuple[jax_tt.TTShape, ...]:
    """A shape for each term, whose cores have this type."""
    budget = _budget(rows * features, ratio, itemsize=1)
    try:
        return jax_tt.tt.residual_shapes(rows, features, budget, dtype=dtype)
    except ValueError as error:
        raise _too_small("tt_residual", ratio, str(error).rstrip(".")) from error


def order_bytes(rows: int) -> int:
    """Bytes of an order of so many ids."""
    return jax_tt.order.IdOrder.identity(rows).nbytes


def low_rank(rows: int, features: int, ratio: float, itemsize: int = 4) -> int:
    """Columns k of the [rows, k] factor, no more than hold any table; the k x features matrix is float32."""
    k = min(features, 4 * _budget(rows * features, ratio) // (rows * itemsize + features * 4))
    if k == 0:
        raise _too_small("low_rank", ratio, f"one column takes {rows + features} numbers")
    return k


def hashed_rows(rows: int, ratio: float, itemsize: int = 4) -> int:
    """Rows of the hashed table."""
    found = _budget(rows, ratio, itemsize)
    if found == 0:
        raise _too_small("hashing", ratio, f"of {rows} rows not one is left")
    return found


def remainders(rows: int, ratio: float, itemsize: int = 4) -> int:
    """The largest divisor m for which m rows for remainders and ceil(rows / m) for quotients are within the budget."""
    budget = _budget(rows, ratio, itemsize)
    divisors = np.arange(1, budget + 1)
    fit = divisors[divisors - (-rows // divisors) <= budget]
    if len(fit) == 0:
        raise _too_small("quotient_remainder", ratio, f"{rows} ids take 2 * sqrt({rows}) rows")
    return int(fit[-1])


def _largest(
    kind: str, rows: int, features: int, ratio: float, suggest: Callable[[int], jax_tt.TTShape]
) -> jax_tt.TTShape:
    budget = _budget(rows * features, ratio)
    shape = None
    for rank in range(1, budget + 1):
        larger = suggest(rank)
        if larger.num_params > budget or larger == shape:
            break
        shape = larger
    if shape is None:
        raise _too_small(kind, ratio, f"a table of {rows} x {features} at rank 1 takes more")
    return shape


def _budget(numbers: int, ratio: float, itemsize: int = 4) -> int:
    """How many numbers of so many bytes take as much as a `ratio`-th of `numbers` float32 ones."""
    if not ratio > 1:
        raise ValueError(f"ratio: got {ratio}; expected a number above 1.")
    return int(numbers * 4 / (ratio * itemsize))


def _too_small(kind: str, ratio: float, reason: str) -> ValueError:
    return ValueError(f"ratio: got {ratio:g} for {kind}, but {reason}; expected a smaller ratio.")
