"""`functional.Fused`: a table together with the state of the optimizer fused into its backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_array, type_of
from jax_tt._base.storage import table_label
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._table.options import Update
from jax_tt._table.state import SCALARS, slot_shape, slot_type
from jax_tt._table.table import Table
from jax_tt.optimizers import Optimizer


class Fused(NamedTuple):
    """Parameters of a fused op. Its cotangent is the *new* table: overwrite the table with it, do not add it.

    Attributes:
        cores: cores ``[p_k, r_k, q_k, r_{k+1}]``, or a dense table ``[N, D]`` alone.
        slots: per core a tuple of arrays ``[p_k, r_k * q_k * r_{k+1}]`` or, row-wise, ``[p_k]``, of the types that
            `Optimizer.slots` have; float32 ones are float64 beside float64 cores.
        step: float32 scalar, the number of updates so far.
        sentinel: float32 scalar that overwriting keeps at 1. Anything that treats the new values as a
            gradient (a second use of the table in one loss, accumulation, scaling, a stock optimizer)
            changes it, and so does overwriting with the zeros of a loss that did not use the table;
            the next forward pass fails then.
        used: float32 scalar, 1. Its cotangent is 0 if the loss did not use the table, whose cotangent is
            then all zeros: keep the old table.
    """

    cores: tuple[Any, ...]
    slots: tuple[tuple[Any, ...], ...]
    step: Any
    sentinel: Any
    used: Any

    taken_by = "fused_*"


def init_fused(cores: Sequence[jax.Array] | jax.Array, optimizer: Optimizer) -> Fused:
    """A table with fresh optimizer state.

    Args:
        cores: cores of a tensor-train table, or one dense table ``[N, D]``.
        optimizer: the optimizer, e.g. ``jax_tt.optimizers.Adagrad(0.05)``.

    Returns:
        `functional.Fused` at step 0.

    >>> import jax, jax_tt
    >>> cores = jax_tt.tt.init(jax.random.key(0), jax_tt.TTShape.suggest(1000, 8, ranks=4))
    >>> table = jax_tt.functional.init_fused(cores, jax_tt.optimizers.Adagrad(0.05))
    >>> [slot.shape for slots in table.slots for slot in slots]
    [(10, 8), (10, 32), (10, 8)]
    """
    update = Update(optimizer)
    table: Table
    if isinstance(cores, tuple | list) and len(cores) != 1:
        table, params = TTTable.of(cores, update=update)
    else:
        alone = isinstance(cores, tuple | list)
        argument = "cores[0]" if alone else "cores"
        given = cores[0] if alone else cores
        table, array = DenseTable.of(given, update=update, argument=argument)
        params = (array,)
    state = table.spec.named(params)
    return fused_table(table, state | table.init_rest(state))


def fused_table(table: Table, state: Mapping[str, Any]) -> Fused:
    """The state of a fused table as a `functional.Fused`."""
    return Fused(
        table.spec.params(state), table.spec.slots(state), *(state[name] for name in SCALARS)
    )


def fused_state(table: Table, given: Fused) -> dict[str, Any]:
    """The arrays of a `functional.Fused` by name."""
    state = table.spec.named(given.cores) | {name: getattr(given, name) for name in SCALARS}
    for names, slots in zip(table.spec.slot_names, given.slots, strict=True):
        state |= dict(zip(names, slots, strict=True))
    return state


def tt_fused(
    given: Any, update: Update, num_embeddings: int | None = None, name: str | None = None
) -> tuple[TTTable, dict[str, jax.Array]]:
    """Checks a fused tensor-train table and returns its description and state."""
    _check_types(given, name)
    table, cores = TTTable.of(given.cores, num_embeddings, update, name)
    return table, _state(table, given, cores)


def dense_fused(
    given: Any, update: Update, name: str | None = None
) -> tuple[DenseTable, dict[str, jax.Array]]:
    """`tt_fused` for one dense table."""
    _check_types(given, name)
    if len(given.cores) != 1:
        raise ValueError(
            f"{table_label(name)}table.cores: got {len(given.cores)} arrays; expected one dense table [N, D]. "
            "Tensor-train tables go to tt.fused_embed_bag."
        )
    table, rows = DenseTable.of(given.cores[0], update, name, "table.cores[0]")
    return table, _state(table, given, (rows,))


def _check_types(given: Any, name: str | None) -> None:
    label = table_label(name)
    if not isinstance(given, Fused):
        raise TypeError(
            f"{label}table: got {type_of(given)}; expected a Fused, made with "
            "jax_tt.functional.init_fused(cores, optimizer)."
        )
    slots = given.slots if isinstance(given.slots, tuple | list) else (None,)
    for what, parts in (("cores", [given.cores]), ("slots", slots)):
        if not all(isinstance(part, tuple | list) for part in parts):
            raise TypeError(
                f"{label}table.{what}: expected a tuple of arrays per table (cores) or per core (slots); make the "
                "table with jax_tt.functional.init_fused(cores, optimizer)."
            )


def _state(table: Table, given: Fused, params: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    """The arrays by name, checked against the parameters and the optimizer."""
    assert table.update is not None
    label, rule = f"{table.ids.label}table", table.update.optimizer
    advice = (
        "Make the table with jax_tt.functional.init_fused(cores, optimizer) for this optimizer, and use one table per "
        "call."
    )

    def checked(part: str, value: Any, shape: tuple[int, ...], dtype: Any = "float32") -> jax.Array:
        array = jnp.asarray(as_array(f"{label}.{part}", value))
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{label}.{part}: got {array.dtype} of shape {array.shape}; expected {dtype} of shape {shape}. {advice}"
            )
        return array

    counts, wanted = tuple(map(len, given.slots)), (len(rule.slots),) * len(params)
    if counts != wanted:
        raise ValueError(
            f"{label}.slots: got {counts} arrays by core; {type(rule).__name__} expects {wanted}. {advice}"
        )
    slots = tuple(
        tuple(
            checked(
                f"slots[{k}][{j}]",
                value,
                slot_shape(param.shape, slot),
                slot_type(slot, param.dtype),
            )
            for j, (value, slot) in enumerate(zip(part, rule.slots, strict=True))
        )
        for k, (param, part) in enumerate(zip(params, given.slots, strict=True))
    )
    scalars = {part: checked(part, getattr(given, part), ()) for part in SCALARS}
    return fused_state(table, Fused(params, slots, **scalars))
