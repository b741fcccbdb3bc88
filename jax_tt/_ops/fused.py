"""Ops that update their table in the backward pass."""

from typing import Any

import jax

from jax_tt._ids.bags import Bags
from jax_tt._lookup.calls import lookup_rows, pooled_rows
from jax_tt._ops.fused_table import Fused, dense_fused, tt_fused
from jax_tt._table.hoisted import fused_update
from jax_tt._table.options import Lookup
from jax_tt.optimizers import Optimizer


def fused_tt_embed_bag(
    table: Fused,
    bags: Bags | Any,
    optimizer: Optimizer,
    *,
    combiner: str = "sum",
    num_embeddings: int | None = None,
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    grad_scale: Any = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`tt.embed_bag` with its optimizer step fused into the backward pass.

    The cotangent of ``table`` is the **new table**: overwrite the old one with it. Never add, scale, clip, average or
    accumulate it, and use a table in one call per loss: put all features that share it into one batch.
    Sums, scalings and clips by global norm are detected in the next forward pass (NaN, or an error on CPU); averages
    and element-wise clips cannot be detected.

    Args:
        table: `functional.Fused`, from `functional.init_fused`.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
        optimizer: the optimizer of `jax_tt.optimizers` that the table was created with.
        combiner, num_embeddings, bounds, dtype, method, name, precision: as in `tt.embed_bag`.
        axis_name: mesh axes to sum gradients over before the update, inside a ``shard_map`` with ``check_vma=False``;
            with ``check_vma=True`` they are found automatically.
        grad_scale: loss scale that the gradients are divided by inside the op.
        skip_nonfinite: leave table, slots and step unchanged if any summed gradient is not finite.
        stochastic_rounding: round 16-bit storage stochastically instead of to nearest.
        max_gradient: limit of the absolute value of every element of the gradient of the result, as in `Update`.
        key: typed key of the rounding; default a fixed one. The step is folded in.

    Returns:
        ``[B, D]``. ``bags.weights`` get their true gradient, taken with the rows before the update.

    Raises:
        ValueError, TypeError: an argument does not fit, or the op is differentiated with respect to a part of the
            table, under ``vmap``, or twice.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> rule = jax_tt.optimizers.SGD(0.1)
    >>> table = jax_tt.functional.init_fused(jax_tt.tt.init(jax.random.key(0), shape), rule)
    >>> bags = jax_tt.Bags.from_ragged([[1, 2], [3]])
    >>> def loss(table):
    ...     return jax_tt.tt.fused_embed_bag(table, bags, rule, method="reference").sum()
    >>> table = jax.grad(loss)(table)
    >>> float(table.step), float(table.sentinel)
    (1.0, 1.0)
    """
    lookup = Lookup(combiner, bounds, dtype, precision, method, axis_name)
    update, inputs = fused_update(
        optimizer, grad_scale, key, skip_nonfinite, stochastic_rounding, max_gradient
    )
    described, state = tt_fused(table, update, num_embeddings, name)
    return pooled_rows(described, state, bags, lookup, inputs)[0]


def fused_tt_lookup(
    table: Fused,
    ids: Any,
    optimizer: Optimizer,
    *,
    num_embeddings: int | None = None,
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    grad_scale: Any = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`tt.lookup` with its optimizer step fused into the backward pass.

    Args:
        table: `functional.Fused`, from `functional.init_fused`.
        ids: integers of any shape, or `SplitIds`.
        optimizer, num_embeddings, bounds, dtype, method, axis_name, name, precision, grad_scale, skip_nonfinite,
            stochastic_rounding, max_gradient, key: as in `tt.fused_embed_bag`.

    Returns:
        ``[*ids.shape, D]``; the cotangent of ``table`` is the new table.

    >>> import jax, jax_tt
    >>> rule = jax_tt.optimizers.SGD(0.1)
    >>> cores = jax_tt.tt.init(jax.random.key(0), jax_tt.TTShape.suggest(1000, 8, ranks=4))
    >>> table = jax_tt.functional.init_fused(cores, rule)
    >>> ids = jax.numpy.array([1, 5])
    >>> jax_tt.tt.fused_lookup(table, ids, rule, method="reference").shape
    (2, 8)
    """
    lookup = Lookup("sum", bounds, dtype, precision, method, axis_name)
    update, inputs = fused_update(
        optimizer, grad_scale, key, skip_nonfinite, stochastic_rounding, max_gradient
    )
    described, state = tt_fused(table, update, num_embeddings, name)
    return lookup_rows(described, state, ids, lookup, inputs)[0]


def fused_embed_bag(
    table: Fused,
    bags: Bags | Any,
    optimizer: Optimizer,
    *,
    combiner: str = "sum",
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    grad_scale: Any = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """`embed_bag` with its optimizer step fused into the backward pass: only touched rows are read and written.

    Args:
        table: `functional.Fused` of one dense table ``[N, D]``, from `functional.init_fused`.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
        optimizer, combiner, bounds, dtype, method, axis_name, name, grad_scale, skip_nonfinite,
            stochastic_rounding, max_gradient, key: as in `tt.fused_embed_bag`.

    Returns:
        ``[B, D]``; the cotangent of ``table`` is the new table.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> rule = jax_tt.optimizers.SGD(0.5)
    >>> table = jax_tt.functional.init_fused(jnp.zeros((4, 1)), rule)
    >>> bags = jax_tt.Bags.from_ragged([[1, 1], [3]])
    >>> def loss(table):
    ...     return jax_tt.functional.fused_embed_bag(table, bags, rule, method="reference").sum()
    >>> jax.grad(loss)(table).cores[0].ravel().tolist()
    [0.0, -1.0, 0.0, -0.5]
    """
    lookup = Lookup(combiner, bounds, dtype, None, method, axis_name)
    update, inputs = fused_update(
        optimizer, grad_scale, key, skip_nonfinite, stochastic_rounding, max_gradient
    )
    described, state = dense_fused(table, update, name)
    return pooled_rows(described, state, bags, lookup, inputs)[0]
