"""Kinds of tables, all of `rows` x `features` numbers, all trained the same way.

A compressed kind takes at most a `ratio`-th of the bytes of the dense table. All are looked up by `lookup`, and updated
in the backward pass if they are given an optimizer.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from examples.retrieval.residual import ResidualTT, order_bytes, shapes_within

Order = Callable[[jax_tt.TTShape], jax_tt.order.IdOrder | None]


class LowRank(nnx.Module):
    """A [rows, k] table times a [k, features] matrix, which all rows share and optax steps.

    Args:
        rows, features: size of the table that it stands for.
        ratio: that table's float32 bytes over its own.
        std: standard deviation of the initial entries of the product.
        dtype: storage type of the [rows, k] table.
        optimizer: of that table.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        ratio: float,
        std: float,
        dtype: str,
        optimizer: Any,
        rngs: nnx.Rngs,
    ):
        k = low_rank(rows, features, ratio, jnp.dtype(dtype).itemsize)
        init = nnx.initializers.normal((std / k**0.5) ** 0.5)
        self.table = _rows(rows, k, init, dtype, optimizer, rngs)
        self.basis = nnx.Param(init(rngs.params(), (k, features), jnp.float32))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        return self.table(ids[:, None]) @ self.basis[...]

    def start_from(self, start: np.ndarray) -> None:
        """The nearest product to rows [rows, features], both factors of the same mean square."""
        left, values, right = np.linalg.svd(start, full_matrices=False)
        k, root = self.basis.shape[0], np.sqrt(values)
        balance = (len(start) / start.shape[1]) ** 0.25
        numbers = self.table.embedding[...].dtype
        self.table.embedding[...] = jnp.asarray(left[:, :k] * root[:k] * balance, numbers)
        self.basis[...] = right[:k] * root[:k, None] / balance

    def arrays(self) -> list[jax.Array]:
        """What is trained."""
        return [self.table.embedding[...], self.basis[...]]


class Hashing(nnx.Module):
    """A table of fewer rows; an id has the row of its hash, which it shares with others. Arguments as `LowRank`."""

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        ratio: float,
        std: float,
        dtype: str,
        optimizer: Any,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(std)
        size = hashed_rows(rows, ratio, jnp.dtype(dtype).itemsize)
        self.table = _rows(size, features, init, dtype, optimizer, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        size = self.table.embedding.shape[0]
        row = mix(ids) % jnp.uint32(size)
        return self.table(row.astype(jnp.int32)[:, None])

    def arrays(self) -> list[jax.Array]:
        """What is trained."""
        return [self.table.embedding[...]]


class QuotientRemainder(nnx.Module):
    """The entrywise product of a row for `id // m` and one for `id % m`: no two ids share both.

    H.-J. Shi et al., "Compositional embeddings using complementary partitions", KDD 2020. The m is the largest within
    the budget: the fewest ids to a remainder. Arguments as `LowRank`.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        ratio: float,
        std: float,
        dtype: str,
        optimizer: Any,
        rngs: nnx.Rngs,
    ):
        self.divisor = remainders(rows, ratio, jnp.dtype(dtype).itemsize)
        init = nnx.initializers.normal(std**0.5)
        self.quotient = _rows(-(-rows // self.divisor), features, init, dtype, optimizer, rngs)
        self.remainder = _rows(self.divisor, features, init, dtype, optimizer, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        quotient, remainder = ids // self.divisor, ids % self.divisor
        return self.quotient(quotient[:, None]) * self.remainder(remainder[:, None])

    def arrays(self) -> list[jax.Array]:
        """What is trained."""
        return [self.quotient.embedding[...], self.remainder.embedding[...]]


_SMALL = {"low_rank": LowRank, "hashing": Hashing, "quotient_remainder": QuotientRemainder}


def make_table(
    kind: str,
    rows: int,
    features: int,
    *,
    std: float,
    optimizer: Any,
    ratio: float | None,
    tt_ranks: int | tuple[int, ...],
    order: Order,
    start: np.ndarray | None = None,
    dtype: str = "float32",
    rngs: nnx.Rngs,
) -> Any:
    """A table.

    Args:
        kind: "dense", "tt" of three cores, "tt2" of two, "tt_residual", a sum of such, "low_rank", "hashing" or
            "quotient_remainder".
        rows, features: its size.
        std: standard deviation of its initial entries.
        optimizer: fused one of `jax_tt.optimizers`, or None to leave the step of dense and TT tables to optax.
        ratio: float32 bytes of the dense table over bytes, at least; None only for dense tables and for TT tables of
            `tt_ranks`. The orders of ids count for "tt_residual" only, which is made of them.
        tt_ranks: of a TT table where there is no ratio.
        order: of the ids of a TT table.
        start: rows [rows, features] to start from instead of random ones, as near as the kind of table can hold them.
        dtype: storage type; the dense table and TT tables of a single train are float32.

    Raises:
        ValueError: no table of this kind is that small.
    """
    if kind == "dense":
        init = nnx.initializers.normal(std) if start is None else _constant(start)
        if optimizer is None:
            return nnx.Embed(rows, features, embedding_init=init, rngs=rngs)
        return _rows(rows, features, init, dtype, optimizer, rngs)
    if kind == "tt" and ratio is None:
        return _tt(
            jax_tt.TTShape.suggest(rows, features, tt_ranks), std, optimizer, order, start, rngs
        )
    if ratio is None:
        raise ValueError(f"ratio: got None for a table of kind {kind}; expected a number above 1.")
    if kind in _SHAPES:
        return _tt(_SHAPES[kind](rows, features, ratio), std, optimizer, order, start, rngs)
    if kind == "tt_residual":
        if start is None:
            raise ValueError(
                "start: got none for tt_residual; expected rows, which it is fitted to."
            )
        return ResidualTT(start, ratio=ratio, dtype=dtype, optimizer=optimizer, rngs=rngs)
    table = _SMALL[kind](
        rows, features, ratio=ratio, std=std, dtype=dtype, optimizer=optimizer, rngs=rngs
    )
    if start is not None:
        table.start_from(start)
    return table


def check_fits(
    kind: str, rows: int, features: int, ratio: float | None, dtype: str = "float32"
) -> None:
    """Raises the ValueError of `make_table` where no table of this kind is that small, without making it."""
    if kind in _SHAPES and ratio is not None:
        _SHAPES[kind](rows, features, ratio)
    if kind in (*_SMALL, "tt_residual"):
        itemsize = jnp.dtype(dtype).itemsize
        if ratio is None:
            raise ValueError(f"ratio: got None for {kind}; expected a number above 1.")
        if kind == "low_rank":
            low_rank(rows, features, ratio, itemsize)
        elif kind == "hashing":
            hashed_rows(rows, ratio, itemsize)
        elif kind == "tt_residual":
            shapes_within(rows, features, ratio, itemsize)
        else:
            remainders(rows, ratio, itemsize)


def lookup(table: Any, ids: jax.Array) -> jax.Array:
    """ids [n] -> [n, features], of a table of any kind."""
    return table(ids[:, None]) if isinstance(table, jax_tt.EmbedBag) else table(ids)


def arrays(table: Any) -> list[jax.Array]:
    """What is trained of a table of any kind, without the optimizer's slots."""
    if isinstance(table, jax_tt.TTEmbed):
        return jax.tree.leaves(table.cores)
    if isinstance(table, jax_tt.EmbedBag | nnx.Embed):
        return [table.embedding[...]]
    return table.arrays()


def scaled_init(shape: jax_tt.TTShape, std: float) -> Any:
    """Normal core entries for table entries of standard deviation `std`: each is a sum of prod(ranks) products of d."""
    return nnx.initializers.normal((std / np.sqrt(np.prod(shape.ranks))) ** (1 / shape.d))


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


_SHAPES = {"tt": tt_shape, "tt2": tt2_shape}


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


def low_rank(rows: int, features: int, ratio: float, itemsize: int = 4) -> int:
    """Columns k of the [rows, k] factor; the k x features matrix is float32."""
    k = 4 * _budget(rows * features, ratio) // (rows * itemsize + features * 4)
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


def mix(ids: jax.Array) -> jax.Array:
    """Scatters ids over 32 bits: the finaliser of MurmurHash3, a bijection. int[...] -> uint32[...]."""
    x = ids.astype(jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _tt(
    shape: jax_tt.TTShape,
    std: float,
    optimizer: Any,
    order: Order,
    start: np.ndarray | None,
    rngs: nnx.Rngs,
) -> jax_tt.TTEmbed:
    id_order = order(shape)
    table = jax_tt.TTEmbed(
        **shape.layer_arguments(),
        core_init=scaled_init(shape, std),
        optimizer=optimizer,
        id_order=id_order,
        rngs=rngs,
    )
    if start is not None:
        by_row = start if id_order is None else start[id_order.inverse.rows]
        for k, core in enumerate(jax_tt.tt_from_dense(by_row, shape=shape).cores):
            getattr(table, f"core_{k}")[...] = core
    return table


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


def _constant(value: np.ndarray) -> Any:
    return lambda key, shape, dtype: jnp.asarray(value, dtype)


def _rows(
    rows: int, features: int, init: Any, dtype: str, optimizer: Any, rngs: nnx.Rngs
) -> jax_tt.EmbedBag:
    return jax_tt.EmbedBag(
        rows,
        features,
        embedding_init=init,
        param_dtype=jnp.dtype(dtype),
        dtype=jnp.float32,
        optimizer=optimizer,
        rngs=rngs,
    )


def _budget(numbers: int, ratio: float, itemsize: int = 4) -> int:
    if not ratio > 1:
        raise ValueError(f"ratio: got {ratio}; expected a number above 1.")
    return int(numbers * 4 / (ratio * itemsize))


def _too_small(kind: str, ratio: float, reason: str) -> ValueError:
    return ValueError(f"ratio: got {ratio:g} for {kind}, but {reason}; expected a smaller ratio.")
