"""`jax_tt.functional`: operations on dense arrays, and operations that update their table in the backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_positive
from jax_tt._base.keywords import takes_keywords
from jax_tt._ids.bags import Bags
from jax_tt._ids.id_space import IdSpace, outside
from jax_tt._ids.inputs import bag_batch, lookup_batch
from jax_tt._ids.offsets import Treatment, entered_batches
from jax_tt._ids.split_ids import SplitIds
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._lookup.calls import lookup_rows, pooled_rows
from jax_tt._ops.fused_table import Fused, dense_fused, tt_fused
from jax_tt._ops.trains import tt_embed_bag, tt_lookup
from jax_tt._table.options import Lookup, StepInputs, Update
from jax_tt._table.step_values import fused_update
from jax_tt._tt.shape import TTShape
from jax_tt.optimizers import Optimizer

_UPDATE_OPTIONS = {*inspect.signature(fused_update).parameters} - {"optimizer"}


class _Options(TypedDict, total=False):
    """Types of the options that all operations with a fused update take; defaults are in the signatures."""

    name: str | None
    bounds: str
    dtype: Any
    method: str
    axis_name: Any
    grad_scale: Any
    skip_nonfinite: bool
    stochastic_rounding: bool
    max_gradient: float | None
    key: jax.Array | None


class _BagOptions(_Options, total=False):
    combiner: str


class _TTOptions(_Options, total=False):
    num_embeddings: int | None
    precision: jax.lax.PrecisionLike


class _TTBagOptions(_BagOptions, _TTOptions, total=False):
    pass


def count_out_of_range(ids_or_bags: Any, num_embeddings: int | TTShape) -> jax.Array:
    """Number of ids outside ``[0, num_embeddings)``; padding and unused capacity do not count.

    Args:
        ids_or_bags: integers of any shape, `SplitIds` or `Bags`.
        num_embeddings: rows of the table, or its `TTShape`, which split ids need.

    Returns:
        int32 scalar; under ``vmap``, one per example. Works under ``jit``.

    Raises:
        TypeError: split ids with a number of rows.
        ValueError: an argument does not fit, or traced 32-bit ids for more rows than 32 bits can address.

    >>> import jax_tt
    >>> int(jax_tt.functional.count_out_of_range(jax_tt.Bags.from_ragged([[1, 12], [-3]]), 10))
    2
    """
    space = _space(ids_or_bags, num_embeddings)
    if isinstance(ids_or_bags, Bags):
        batch, _ = bag_batch(space, ids_or_bags, jnp.float32)
        (batch,), _ = entered_batches([batch], ["bags.offsets"], Treatment("zero"))
    else:
        batch, _ = lookup_batch(space, ids_or_bags)
    return jnp.sum(outside(space, batch), dtype=jnp.int32)


def _space(ids_or_bags: Any, num_embeddings: int | TTShape) -> IdSpace:
    given = ids_or_bags.ids if isinstance(ids_or_bags, Bags) else ids_or_bags
    if isinstance(num_embeddings, TTShape):
        return IdSpace(num_embeddings.num_embeddings, num_embeddings.row_factors)
    if isinstance(given, SplitIds):
        raise TypeError(
            f"num_embeddings: got {num_embeddings!r} for SplitIds; expected the TTShape that they were split with, "
            "which says how many rows each digit counts."
        )
    rows = as_positive("num_embeddings", num_embeddings)
    if rows >= 2**63:
        raise ValueError(f"num_embeddings: got {rows}; expected less than 2**63.")
    # The factors are arbitrary; they are used to split ids that do not fit into 32 bits.
    return IdSpace(rows, (-(-rows // 2**60), 2**30, 2**30))


def embed_bag(
    table: jax.Array,
    bags: Bags | Any,
    *,
    combiner: str = "sum",
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
) -> jax.Array:
    """`tt.embed_bag` for a dense table.

    Args:
        table: ``[N, D]``.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
        combiner, bounds, dtype, method, axis_name, name: as in `tt.embed_bag`.

    Returns:
        ``[B, D]``. Differentiable in the table (a dense gradient) and in ``bags.weights``.

    >>> import jax.numpy as jnp, jax_tt
    >>> table = jnp.arange(6.0).reshape(3, 2)
    >>> bags = jax_tt.Bags.from_ragged([[0, 2], []])
    >>> jax_tt.functional.embed_bag(table, bags, method="reference").tolist()
    [[4.0, 6.0], [0.0, 0.0]]
    """
    lookup = Lookup(combiner, bounds, dtype, None, method, axis_name)
    dense, rows = DenseTable.of(table, name=name)
    return pooled_rows(dense, {"embedding": rows}, bags, lookup)[0]


@takes_keywords(tt_embed_bag, fused_update)
def fused_tt_embed_bag(
    table: Fused,
    bags: Bags | Any,
    optimizer: Optimizer,
    **options: Unpack[_TTBagOptions],
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
    num_embeddings, name = options.pop("num_embeddings", None), options.pop("name", None)
    lookup, update, inputs = _options(optimizer, options)
    described, state = tt_fused(table, update, num_embeddings, name)
    return pooled_rows(described, state, bags, lookup, inputs)[0]


@takes_keywords(tt_lookup, fused_update)
def fused_tt_lookup(
    table: Fused,
    ids: Any,
    optimizer: Optimizer,
    **options: Unpack[_TTOptions],
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
    num_embeddings, name = options.pop("num_embeddings", None), options.pop("name", None)
    lookup, update, inputs = _options(optimizer, options)
    described, state = tt_fused(table, update, num_embeddings, name)
    return lookup_rows(described, state, ids, lookup, inputs)[0]


@takes_keywords(embed_bag, fused_update)
def fused_embed_bag(
    table: Fused,
    bags: Bags | Any,
    optimizer: Optimizer,
    **options: Unpack[_BagOptions],
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
    name = options.pop("name", None)
    lookup, update, inputs = _options(optimizer, options)
    described, state = dense_fused(table, update, name)
    return pooled_rows(described, state, bags, lookup, inputs)[0]


def _options(optimizer: Optimizer, options: Mapping[str, Any]) -> tuple[Lookup, Update, StepInputs]:
    of_update = {name: value for name, value in options.items() if name in _UPDATE_OPTIONS}
    lookup = Lookup(**{name: options[name] for name in options if name not in of_update})
    return lookup, *fused_update(optimizer, **of_update)
