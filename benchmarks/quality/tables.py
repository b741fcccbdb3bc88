"""Kinds of tables, all of `rows` x `features` numbers, all trained the same way.

A compressed kind takes at most a `ratio`-th of the bytes of the dense table. All take ids [n] to [n, features], and are
updated in the backward pass if they are given an optimizer.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from benchmarks.quality.residual import residual_tt
from benchmarks.quality.sizes import tt2_shape, tt_shape
from benchmarks.quality.small import Hashing, LowRank, QuotientRemainder, make_rows
from examples.retrieval.model import scaled_init

Order = Callable[[jax_tt.TTShape], jax_tt.order.IdOrder | None]


_BITS = {"int8": 8, "int4": 4}
_TT_SHAPES = {"tt": tt_shape, "tt2": tt2_shape}
_SMALL = {"low_rank": LowRank, "hashing": Hashing, "quotient_remainder": QuotientRemainder}


def make_table(
    kind: str,
    rows: int,
    features: int,
    *,
    std: float,
    optimizer: Any,
    ratio: float | None,
    tt_rank: int,
    order: Order,
    start: np.ndarray | None = None,
    dtype: str = "float32",
    rngs: nnx.Rngs,
) -> Any:
    """A table.

    Args:
        kind: "dense", "int8", "int4", "tt" of three cores, "tt2" of two, "tt_residual", a sum of such, "low_rank",
            "hashing" or "quotient_remainder".
        rows, features: its size.
        std: standard deviation of its initial entries.
        optimizer: fused one of `jax_tt.optimizers`, or None for tables that optax steps.
        ratio: float32 bytes of the dense table over bytes, at least; None for tables with a row for each id, and for
            TT tables of `tt_rank`. The orders of ids count for "tt_residual" only, which is made of them.
        tt_rank: of a TT table where there is no ratio.
        order: of the ids of a TT table.
        start: rows [rows, features] to start from instead of random ones, as near as the kind of table can hold them.
        dtype: storage type; the dense table and TT tables of a single train are float32.

    Raises:
        ValueError: no table of this kind is that small.
    """
    if kind == "dense":
        init = nnx.initializers.normal(std) if start is None else _constant(start)
        return make_rows(rows, features, init, dtype, optimizer, rngs)
    if kind in _BITS:
        init = nnx.initializers.normal(std) if start is None else _constant(start)
        update = None if optimizer is None else jax_tt.Update(optimizer)
        table = jax_tt.tables.QuantizedTable(
            rows, features, _BITS[kind], update, embedding_init=init
        )
        return jax_tt.TableEmbed(table, rngs=rngs)
    if kind == "tt" and ratio is None:
        return _tt(
            jax_tt.TTShape.suggest(rows, features, tt_rank), std, optimizer, order, start, rngs
        )
    if ratio is None:
        raise ValueError(f"ratio: got None for a table of kind {kind}; expected a number above 1.")
    if kind in _TT_SHAPES:
        return _tt(_TT_SHAPES[kind](rows, features, ratio), std, optimizer, order, start, rngs)
    if kind == "tt_residual":
        if start is None:
            raise ValueError(
                "start: got none for tt_residual; expected rows, which it is fitted to."
            )
        return residual_tt(start, ratio=ratio, dtype=dtype, optimizer=optimizer, rngs=rngs)
    table = _SMALL[kind](
        rows, features, ratio=ratio, std=std, dtype=dtype, optimizer=optimizer, rngs=rngs
    )
    if start is not None:
        table.start_from(start)
    return table


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
        for k, core in enumerate(jax_tt.tt.from_dense(by_row, shape=shape).cores):
            getattr(table, f"core_{k}")[...] = core
    return table


def _constant(value: np.ndarray) -> Any:
    return lambda key, shape, dtype: jnp.asarray(value, dtype)
