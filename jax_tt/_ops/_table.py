"""`FusedTable`: a table together with the state of the optimizer fused into its backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    """

    cores: tuple[Any, ...]
    slots: tuple[tuple[Any, ...], ...]
    step: Any
    sentinel: Any


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
    parts: tuple[Any, ...] = tuple(cores) if isinstance(cores, tuple | list) else (cores,)
    slots = tuple(
        tuple(
            jnp.full(slot_shape(core.shape, slot.rowwise), slot.init, jnp.float32)
            for slot in optimizer.slots
        )
        for core in parts
    )
    return FusedTable(parts, slots, jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32))


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


def check_table(table: Any, optimizer: Optimizer, dense: bool, name: str | None) -> None:
    """Checks the parts of a table against each other and against the rule."""
    label = "" if name is None else f"{name}: "
    if not isinstance(table, FusedTable):
        raise TypeError(
            f"{label}table: got {type(table).__name__}; expected a FusedTable, made with "
            "jax_tt.init_fused_table(cores, optimizer)."
        )
    if dense and len(table.cores) != 1:
        raise ValueError(
            f"{label}table.cores: got {len(table.cores)} arrays; expected one dense table [N, D]. "
            "Tensor-train tables go to fused_tt_embed_bag."
        )
    wanted = tuple(
        tuple(slot_shape(core.shape, slot.rowwise) for slot in optimizer.slots)
        for core in table.cores
    )
    given = tuple(tuple(tuple(slot.shape) for slot in slots) for slots in table.slots)
    if given != wanted:
        raise ValueError(
            f"{label}table.slots: got shapes {given}; {type(optimizer).__name__} expects {wanted}. "
            "Make the table with jax_tt.init_fused_table(cores, optimizer) for this optimizer."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        (table.slots, table.step, table.sentinel)
    ):
        if leaf.dtype != jnp.float32:
            raise ValueError(
                f"{label}table{jax.tree_util.keystr(path)}: got dtype {leaf.dtype}; slots, step and sentinel "
                "are float32."
            )
    if table.step.shape != () or table.sentinel.shape != ():
        raise ValueError(
            f"{label}table: step has shape {table.step.shape}, sentinel {table.sentinel.shape}; expected scalars. A "
            "table with leading dimensions cannot go through a fused op; use one table per call."
        )
