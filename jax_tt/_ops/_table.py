"""`FusedTable`: a table together with the state of the optimizer fused into its backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._arguments import as_array
from jax_tt._ops._canonical import dense_table, table_label, tt_table
from jax_tt._ops._spec import DenseSpec, TTSpec
from jax_tt.optimizers import Optimizer


class FusedTable(NamedTuple):
    """Parameters of a fused op. Its cotangent is the *new* table: overwrite with it, never add it.

    Attributes:
        cores: cores ``[p_k, r_k, q_k, r_{k+1}]``, or a dense table ``[N, D]`` alone.
        slots: per core a tuple of float32 arrays, ``[p_k, r_k * q_k * r_{k+1}]`` or, row-wise, ``[p_k]``.
        step: float32 scalar, the number of updates so far.
        sentinel: float32 scalar that overwriting keeps at 1. Anything that treats the new values as a
            gradient (a second use of the table in one loss, accumulation, scaling, a stock optimizer)
            moves it, and so does overwriting with the zeros of a loss that did not use the table;
            the next forward pass refuses.
        used: float32 scalar, 1. Its cotangent is 0 where the loss did not use the table, whose cotangent is
            all zeros then: keep the old table.
    """

    cores: tuple[Any, ...]
    slots: tuple[tuple[Any, ...], ...]
    step: Any
    sentinel: Any
    used: Any


# Fields beside cores and slots.
SCALARS = ("step", "sentinel", "used")


def init_fused_table(cores: Sequence[jax.Array] | jax.Array, optimizer: Optimizer) -> FusedTable:
    """A table with fresh optimizer state.

    Args:
        cores: cores of a tensor-train table, or one dense table ``[N, D]``.
        optimizer: the rule, e.g. ``jax_tt.optimizers.Adagrad(0.05)``.

    Returns:
        `FusedTable` at step 0.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(1000, 8, ranks=4))
    >>> table = jax_tt.init_fused_table(cores, jax_tt.optimizers.Adagrad(0.05))
    >>> [slot.shape for slots in table.slots for slot in slots]
    [(10, 8), (10, 32), (10, 8)]
    """
    check_optimizer(optimizer)
    parts: tuple[jax.Array, ...]
    if isinstance(cores, tuple | list) and len(cores) != 1:
        _, parts = tt_table(cores, None)
    else:
        alone = isinstance(cores, tuple | list)
        argument = "cores[0]" if alone else "cores"
        _, table = dense_table(cores[0] if alone else cores, argument=argument)
        parts = (table,)
    slots = tuple(
        tuple(
            jnp.full(slot_shape(core.shape, slot.rowwise), slot.init, jnp.float32)
            for slot in optimizer.slots
        )
        for core in parts
    )
    step, sentinel, used = (jnp.full((), value, jnp.float32) for value in (0, 1, 1))
    return FusedTable(parts, slots, step, sentinel, used)


def slot_shape(core_shape: Sequence[int], rowwise: bool) -> tuple[int, ...]:
    """Shape of an optimizer slot: one entry per row, or per entry of each row."""
    rows = core_shape[0]
    return (rows,) if rowwise else (rows, math.prod(core_shape[1:]))


def check_optimizer(optimizer: Any) -> None:
    """Raises where ``optimizer`` is not one of the fused rules."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: got {type(optimizer).__name__}; expected a rule of jax_tt.optimizers such as Adagrad(0.05). "
            "For optax, use the op without 'fused' and pass its gradients to optax."
        )


def tt_fused(
    table: Any,
    optimizer: Any,
    num_embeddings: int | None,
    bounds: str,
    name: str | None,
    precision: Any = None,
) -> tuple[TTSpec, FusedTable]:
    """Checks a fused tensor-train table; its description, and the table as JAX arrays."""
    _check_types(table, optimizer, name)
    spec, cores = tt_table(table.cores, num_embeddings, bounds, name, precision)
    return spec, _with_state(table._replace(cores=cores), optimizer, name)


def dense_fused(
    table: Any, optimizer: Any, bounds: str, name: str | None
) -> tuple[DenseSpec, FusedTable]:
    """`tt_fused` for one dense table."""
    _check_types(table, optimizer, name)
    if len(table.cores) != 1:
        raise ValueError(
            f"{table_label(name)}table.cores: got {len(table.cores)} arrays; expected one dense table [N, D]. "
            "Tensor-train tables go to fused_tt_embed_bag."
        )
    spec, weights = dense_table(table.cores[0], bounds, name, "table.cores[0]")
    return spec, _with_state(table._replace(cores=(weights,)), optimizer, name)


def _check_types(table: Any, optimizer: Any, name: str | None) -> None:
    label = table_label(name)
    check_optimizer(optimizer)
    if not isinstance(table, FusedTable):
        raise TypeError(
            f"{label}table: got {type(table).__name__}; expected a FusedTable, made with "
            "jax_tt.init_fused_table(cores, optimizer)."
        )
    slots = table.slots if isinstance(table.slots, tuple | list) else (None,)
    for what, parts in (("cores", [table.cores]), ("slots", slots)):
        if not all(isinstance(part, tuple | list) for part in parts):
            raise TypeError(
                f"{label}table.{what}: expected a tuple of arrays per table (cores) or per core (slots); make the "
                "table with jax_tt.init_fused_table(cores, optimizer)."
            )


def _with_state(table: FusedTable, optimizer: Optimizer, name: str | None) -> FusedTable:
    """The table with its state as JAX arrays, checked against its cores and against the rule."""
    label = f"{table_label(name)}table"

    def state(part: str, value: Any) -> jax.Array:
        array = jnp.asarray(as_array(f"{label}.{part}", value))
        if array.dtype != jnp.float32:
            raise ValueError(
                f"{label}.{part}: got dtype {array.dtype}; slots, step, sentinel and used are float32."
            )
        return array

    slots = tuple(
        tuple(state(f"slots[{k}][{j}]", slot) for j, slot in enumerate(part))
        for k, part in enumerate(table.slots)
    )
    scalars = {part: state(part, getattr(table, part)) for part in SCALARS}
    wanted = tuple(
        tuple(slot_shape(core.shape, slot.rowwise) for slot in optimizer.slots)
        for core in table.cores
    )
    given = tuple(tuple(slot.shape for slot in part) for part in slots)
    if given != wanted:
        raise ValueError(
            f"{label}.slots: got shapes {given}; {type(optimizer).__name__} expects {wanted}. "
            "Make the table with jax_tt.init_fused_table(cores, optimizer) for this optimizer."
        )
    for part, value in scalars.items():
        if value.shape != ():
            raise ValueError(
                f"{label}.{part}: got shape {value.shape}; expected a scalar. A table with leading dimensions cannot "
                "go through a fused op; use one table per call."
            )
    return FusedTable(table.cores, slots, **scalars)
