"""`StateSpec`: which arrays the states of a table have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator, widest
from jax_tt._table.options import Update
from jax_tt.optimizers import Slot
from jax_tt.optimizers._base import SLOT_DTYPES

# Arrays of a table by name; the names are those of a checkpoint.
State = Mapping[str, Any]
Params = tuple[Any, ...]
SlotArrays = tuple[tuple[Any, ...], ...]

# The scalars of a fused table.
SCALARS = ("step", "sentinel", "used")

Role = Literal["parameter", "slot", "scalar", "constant", "buffer"]


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a state.

    Attributes:
        name: its key in the state.
        role: ``"parameter"``; ``"slot"``, optimizer state of a parameter; ``"scalar"``, such as the step count of a
            fused table; ``"constant"``, which lookups read and nothing trains; or ``"buffer"``, which only the
            preparation of a batch and changes between steps use.
        shape: None where it depends on more than the table.
        dtype: None where states may have several types, as parameters do; slots then have the accumulator type of
            their parameter.
        initial: the entries of a new row of a slot; None for initial values.
        of: the parameter that a slot belongs to.
        stepped: whether steps of rows change a slot.
        stepped_shape: the shape of a parameter as the optimizer sees it; None for its shape.
        by_row: whether entry k belongs to row k alone.
        collection: the linen collection of an array without a gradient, or None.
        unit: arrays of the same number are differentiated together or not at all; None for arrays without a gradient.
        attended: whether `attend` multiplies it with queries.
        numbers: type of the numbers that a parameter stands for; None for its type.
        rounded: name of the type that new rows of a parameter are rounded to; None for its type.
        hint: what errors about an array that does not fit the table say in the end.

    >>> import jax_tt
    >>> (rows,) = jax_tt.dense_table(1000, 16).spec.arrays
    >>> rows.name, rows.role, rows.shape, rows.by_row
    ('embedding', 'parameter', (1000, 16), True)
    """

    name: str
    role: Role
    shape: tuple[int, ...] | None = None
    dtype: Any = None
    initial: float | None = None
    of: str | None = None
    stepped: bool = True
    stepped_shape: tuple[int, ...] | None = None
    by_row: bool = False
    collection: str | None = None
    unit: int | None = None
    attended: bool = False
    numbers: Any = None
    rounded: str | None = None
    hint: str = ""


def parameter(
    name: str, shape: Sequence[int], *, by_row: bool = False, attended: bool = True, **facts: Any
) -> Array:
    """A trained parameter, whose first axis counts the rows of the update; ``facts`` are attributes of `Array`.

    >>> import jax_tt
    >>> rows = jax_tt.extension.parameter("rows", (1000, 16), by_row=True)
    >>> jax_tt.extension.StateSpec.of([rows]).row_names
    ('rows',)
    """
    facts = {"unit": 0, "by_row": by_row, "attended": attended, **facts}
    return Array(name, "parameter", tuple(shape), **facts)


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """The arrays of the states of a table, which `StateSpec.of` derives from the parameters.

    Attributes:
        arrays: all of them; arrays of a unit follow each other.

    >>> import jax_tt
    >>> update = jax_tt.Update(jax_tt.optimizers.Adagrad(0.1))
    >>> spec = jax_tt.tables.DenseTable(1000, 16, update=update).spec
    >>> spec.param_names, spec.slot_names
    (('embedding',), (('slot_sum_0',),))
    >>> spec.trained_names
    ('embedding', 'slot_sum_0', 'step', 'sentinel', 'used')
    """

    arrays: tuple[Array, ...]

    @classmethod
    def of(
        cls,
        params: Mapping[str, Sequence[int]] | Iterable[Array],
        update: Update | None = None,
        *others: Array,
    ) -> StateSpec:
        """The parameters, the optimizer state that ``update`` has for them, and other arrays.

        Args:
            params: the shape of each by name, or what `parameter` returns.
            update: of a fused table, or None.
            others: arrays that no optimizer steps.
        """
        if isinstance(params, Mapping):
            of_shapes: Mapping[Any, Sequence[int]] = params
            params = [parameter(name, shape) for name, shape in of_shapes.items()]
        params = tuple(params)
        return cls((*params, *_slots(params, update), *scalars_of(update), *others))

    def extended(self, *others: Array) -> StateSpec:
        """The spec with more arrays."""
        return StateSpec((*self.arrays, *others))

    def without_rows(self) -> StateSpec:
        """The spec of a wrapper, of which entry k of an array need not belong to row k."""
        return StateSpec(tuple(dataclasses.replace(array, by_row=False) for array in self.arrays))

    def renamed(self, names: Mapping[str, str], **facts: Any) -> tuple[Array, ...]:
        """The arrays under other names, with other ``facts``, which are attributes of `Array`."""
        return tuple(
            dataclasses.replace(
                array,
                name=names[array.name],
                of=None if array.of is None else names[array.of],
                **facts,
            )
            for array in self.arrays
        )

    # Parameters

    @functools.cached_property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters; the first axis counts the rows of the update."""
        return {array.name: array.shape or () for array in self._params}

    @functools.cached_property
    def param_names(self) -> tuple[str, ...]:
        return tuple(array.name for array in self._params)

    @functools.cached_property
    def stepped_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters as the optimizer sees them."""
        return {array.name: _stepped_shape(array) for array in self._params}

    @functools.cached_property
    def row_names(self) -> tuple[str, ...]:
        """The parameters of which row k is that of id k alone."""
        return tuple(array.name for array in self._params if array.by_row)

    @functools.cached_property
    def attended_names(self) -> tuple[str, ...]:
        """The arrays that `attend` multiplies with queries."""
        return tuple(array.name for array in self.arrays if array.attended)

    @functools.cached_property
    def rounded_type(self) -> str | None:
        """Name of the type that new rows are rounded to; None for the type of the parameters."""
        return self._params[0].rounded

    @functools.cached_property
    def _params(self) -> tuple[Array, ...]:
        return tuple(array for array in self.arrays if array.role == "parameter")

    # Optimizer state

    @functools.cached_property
    def slot_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the optimizer state, one tuple per parameter."""
        return tuple(tuple(slot.name for slot in slots) for slots in self._slots)

    @functools.cached_property
    def stepped_names(self) -> tuple[tuple[str, ...], ...]:
        """The names in `slot_names` of slots that steps of rows change."""
        return tuple(tuple(slot.name for slot in slots if slot.stepped) for slots in self._slots)

    @functools.cached_property
    def scalar_names(self) -> tuple[str, ...]:
        """State of a fused table other than parameters and slots, unless a collection has it."""
        return tuple(array.name for array in self.arrays if array.role == "scalar")

    @functools.cached_property
    def _slots(self) -> tuple[tuple[Array, ...], ...]:
        slots = [array for array in self.arrays if array.role == "slot"]
        return tuple(tuple(slot for slot in slots if slot.of == name) for name in self.param_names)

    # All arrays

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all arrays whose shape depends on the table alone."""
        return {array.name: array.shape for array in self.arrays if array.shape is not None}

    @functools.cached_property
    def trained_names(self) -> tuple[str, ...]:
        """Arrays that a loss is differentiated with respect to: the parameters, or the whole state if fused."""
        return tuple(array.name for array in self.arrays if array.unit is not None)

    @functools.cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Parts of a fused table that can only be differentiated as a whole."""
        units: dict[int, list[str]] = {}
        for array in self.arrays:
            if array.unit is not None:
                units.setdefault(array.unit, []).append(array.name)
        return tuple(map(tuple, units.values()))

    @functools.cached_property
    def constant_names(self) -> tuple[str, ...]:
        """Arrays without a gradient that a lookup reads."""
        return tuple(
            array.name
            for array in self.arrays
            if array.unit is None and array.role in ("parameter", "constant")
        )

    @functools.cached_property
    def buffers(self) -> dict[str, str]:
        """Linen collections of the arrays without gradients, by name."""
        return {array.name: array.collection for array in self.arrays if array.collection}

    @functools.cached_property
    def row_arrays(self) -> dict[str, float | None]:
        """The arrays of which entry k is that of row k alone, and the entries of a new row; None for its values."""
        return {array.name: array.initial for array in self.arrays if array.by_row}

    # Arrays of a state

    def params(self, state: State) -> Params:
        return tuple(state[name] for name in self.param_names)

    def slots(self, state: State) -> SlotArrays:
        return tuple(tuple(state[name] for name in names) for names in self.slot_names)

    def stepped_slots(self, state: State) -> SlotArrays:
        """The slots that steps of rows change."""
        return tuple(tuple(state[name] for name in names) for names in self.stepped_names)

    def storage(self, state: State) -> Any:
        """Type of the parameters."""
        types = {state[name].dtype if own is None else own for name, own in self._storing}
        return types.pop() if len(types) == 1 else functools.reduce(widest, types)

    def named(self, params: Sequence[Any]) -> dict[str, Any]:
        """Parameters by name."""
        return dict(zip(self.param_names, params, strict=True))

    def initial_scalars(self) -> dict[str, jax.Array]:
        return {
            array.name: jnp.full((), array.initial, array.dtype)
            for array in self.arrays
            if array.role == "scalar" and array.initial is not None
        }

    @functools.cached_property
    def _storing(self) -> tuple[tuple[str, Any], ...]:
        """The parameters that `storage` asks, with the type of their numbers if it is not their own."""
        return tuple(
            (array.name, array.numbers) for array in self._params if array.unit in (0, None)
        )


def scalars_of(update: Update | None) -> list[Array]:
    """The scalars of a table with this update, unless a collection has them."""
    names = () if update is None or update.shared else SCALARS
    return [
        Array(name, "scalar", (), jnp.dtype(jnp.float32), float(name != "step"), unit=0)
        for name in names
    ]


def slot_shape(param_shape: Sequence[int], slot: Slot) -> tuple[int, ...]:
    """Shape of an optimizer slot: one entry per row, or per entry of each row."""
    rows = param_shape[0] if slot.rows is None else slot.rows
    return (rows,) if slot.rowwise else (rows, math.prod(param_shape[1:]))


def slot_type(slot: Slot, param: Any) -> Any:
    """Type of an optimizer slot of a parameter of type ``param``."""
    return accumulator(param) if slot.dtype == SLOT_DTYPES[0] else jnp.dtype(slot.dtype)


def _slots(params: Sequence[Array], update: Update | None) -> list[Array]:
    return [
        Array(
            f"slot_{slot.name}_{k}",
            "slot",
            slot_shape(_stepped_shape(param), slot),
            None if slot.dtype == SLOT_DTYPES[0] else jnp.dtype(slot.dtype),
            slot.init,
            of=param.name,
            stepped=slot.stepped,
            by_row=param.by_row and slot.rows is None,
            unit=param.unit,
        )
        for k, param in enumerate(params)
        for slot in (() if update is None else update.optimizer.slots)
    ]


def _stepped_shape(param: Array) -> tuple[int, ...]:
    return param.stepped_shape or param.shape or ()


# The sentinel of a fused table stays at 1 only if the table is overwritten.

# Averages of ones round by less, one step of Adam at a learning rate of 1e-4 moves it by more. The same number as
# kSentinelTolerance of ffi/core/sentinel.h.
SENTINEL_TOLERANCE = 2.0**-14


def sentinel_holds(sentinel: Any) -> Any:
    """Whether each sentinel of an array is 1 up to rounding; False for NaN."""
    return abs(sentinel - 1) <= SENTINEL_TOLERANCE


def kept_sentinel(sentinel: Any) -> Any:
    """The sentinel after a step.

    An invalid one stays invalid, so that all further passes fail; rounding errors are reset to 1.
    """
    return jnp.where(sentinel_holds(sentinel), 1, sentinel)


def sentinel_untouched(sentinel: Any) -> Any:
    """Whether a sentinel is what a step returned: exactly 1."""
    return sentinel == 1


def spoilt_sentinel(sentinel: Any) -> Any:
    """The sentinel where a step returned it untouched; otherwise one that no forward pass takes for rounding."""
    beyond = jnp.where(sentinel_holds(sentinel), jnp.nan, sentinel)
    return jnp.where(sentinel_untouched(sentinel), sentinel, beyond)
