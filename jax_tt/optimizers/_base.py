"""The interface of update rules: slots, hyper-parameters at a given step, and one step on rows."""

from __future__ import annotations

import abc
import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import (
    as_scalar,
    expect,
    instance_of,
    mismatch,
    shown,
    type_of,
)
from jax_tt._base.dtypes import accumulator

# A float, a scalar array (traced, or an `nnx.Variable`), or a schedule: step -> scalar, as optax has them.
Scalar = float | jax.Array | Callable[[Any], Any]
Slots = tuple[jax.Array, ...]
# Hyper-parameters in one step, and what rules compute from them, by name.
Hyper = Mapping[str, jax.Array]


# Types of slots with a number per entry of a row; slots with one number per row have the first one.
SLOT_DTYPES = ("float32", "bfloat16")
# The largest number up to which float32 has every integer.
MOST_STEPS = 2.0**24


class Slot(NamedTuple):
    """One array of optimizer state per core or table.

    Attributes:
        name: part of the name of the array.
        rowwise: one scalar per row (slice of a core) instead of one per entry.
        init: initial value.
        rows: number of rows of the array; None for that of the core or table.
        stepped: whether steps of rows change it; otherwise `ChangesAll.change_all` alone does.
        dtype: ``"float32"``, which is float64 beside float64 parameters, or ``"bfloat16"`` for all slots with an entry
            per entry of the row. Rules compute in float32, or float64 for float64 parameters.
    """

    name: str
    rowwise: bool
    init: float
    rows: int | None = None
    stepped: bool = True
    dtype: str = "float32"


class Optimizer(abc.ABC):
    """An update rule that is fused into the backward pass.

    A "row" is a row of a dense table or a slice ``core[k][i]`` of a core, flattened. Only rows that the batch uses
    are updated, with the sum of the gradients of all their occurrences. Other rows and their slots do not change.

    A rule of your own is a frozen dataclass derived from this class, whose fields are its hyper-parameters. It has
    `slots`, `update_rows` and a `native_kind`, which `register` returns for a rule in C++. Without one, use `Custom`.
    The other methods are for rules that need them, and `ReadsScaled` and `ChangesAll` have more.

    Attributes:
        native_kind: name of the rule in the native operations, which `register` returns for one of your own in C++.
        initial: fields that are used only to create new slots.
        static: fields that choose a formula, and so belong to the compiled program.
        elementwise: whether the step of an entry depends on this column of the row alone, so that columns can be
            divided over devices.
        not_for_trains: why slices of tensor trains have no such step, in a sentence for the error; empty if they have.
    """

    native_kind: ClassVar[str]
    initial: ClassVar[frozenset[str]] = frozenset()
    static: ClassVar[frozenset[str]] = frozenset()
    elementwise: ClassVar[bool] = False
    not_for_trains: ClassVar[str] = ""

    @property
    def kind(self) -> str | None:
        """Name of the native rule for these options; None for a rule in plain JAX on all platforms."""
        return self.native_kind

    @classmethod
    def hyperparameter_names(cls) -> tuple[str, ...]:
        """Fields that may change from step to step."""
        fields: Any = cls
        fixed = cls.initial | cls.static
        return tuple(f.name for f in dataclasses.fields(fields) if f.name not in fixed)

    def with_hyperparameters(self, values: Mapping[str, Any]) -> Self:
        """The rule with some of its hyper-parameters replaced by floats, traced scalars or schedules."""
        expected = "a mapping from names to scalars, e.g. {'learning_rate': 0.01}"
        instance_of("hyperparameters", values, Mapping, expected)
        names = self.hyperparameter_names()
        for name in values:
            expected = (
                f"some of those of {type(self).__name__}, {', '.join(names) or 'which has none'}"
            )
            expect(name in names, "hyperparameters", repr(name), expected)
        rule: Any = self
        # As an array, a value of 0 does not switch a term off, which the compiled program has.
        numbers_as_arrays = {
            name: jnp.asarray(value, float) if isinstance(value, numbers.Real) else value
            for name, value in values.items()
        }
        for given in (values, numbers_as_arrays):
            replaced: Self = dataclasses.replace(rule, **given)
            if replaced.kind == self.kind:
                return replaced
        raise ValueError(
            f"hyperparameters: {', '.join(values)} would switch on a term that {self!r} does not have. Give the rule "
            "of the table a value other than 0 or None from the start."
        )

    @property
    @abc.abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """State that is stored for each core or table: slots per entry first, then those per row."""

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        """What `update_rows` and the native rule need at this step (counted from 0), scalars by name.

        These are the fields of `hyperparameter_names` that are not None. A rule that computes something from them once
        for all rows adds it, under the name of the field of the native rule.

        Args:
            step: in the type that rows are computed in, float32 or float64, which the results have, too.
        """
        values = {name: getattr(self, name) for name in self.hyperparameter_names()}
        return {
            name: at_step(value, step, name) for name, value in values.items() if value is not None
        }

    @abc.abstractmethod
    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        """One step on ``rows[R, W]`` with ``grads[R, W]``.

        Args:
            rows, grads: in the type that rows are computed in.
            slots: ``[R, W]`` or ``[R]``, in that type.
            hyper: what `hyperparameters` returned.

        Returns:
            The new rows and slots, which are rounded to the types in which they are stored.
        """

    def compensated(
        self, slots: Slots, errors: jax.Array, spacing: jax.Array, hyper: Hyper
    ) -> Slots:
        """The slots after the new rows of a quantized table were rounded stochastically.

        A rule with a first moment can make up for the errors in its next steps. Others return the slots as they are.

        Args:
            slots: what `update_rows` returned, ``[R, W]`` or ``[R]``.
            errors: its new rows minus the stored ones, ``[R, W]``; 0 in expectation.
            spacing: distances of the levels of a row, ``[R]``, which errors do not exceed.
            hyper: as in `update_rows`.
        """
        del errors, spacing, hyper
        return slots

    def check_width(self, width: int | None) -> None:
        """Raises unless the rule is one for rows of this width; None stands for the slices of a tensor train."""
        if width is None and self.not_for_trains:
            raise TypeError(
                f"optimizer: got {type_of(self)}; it is for dense tables. {self.not_for_trains}"
            )


@runtime_checkable
class ReadsScaled(Protocol):
    """A rule whose lookups in training return rows times a factor. Only for dense tables.

    >>> import jax_tt
    >>> isinstance(jax_tt.optimizers.GlobalDecayRowWiseAdagrad(0.1), jax_tt.optimizers.ReadsScaled)
    True
    """

    def read_scale(self, slots: Slots, hyper: Hyper) -> jax.Array:
        """Returns the factors ``[R]`` of rows with these ``slots``; ``hyper`` as in `Optimizer.update_rows`."""
        ...


@runtime_checkable
class ChangesAll(Protocol):
    """A rule that changes all rows of a table between some steps.

    >>> import jax_tt
    >>> isinstance(jax_tt.optimizers.SGD(0.1), jax_tt.optimizers.ChangesAll)
    False
    """

    def changes_all(self, step: jax.Array) -> jax.Array:
        """Whether to run `change_all` once the table has taken ``step`` steps."""
        ...

    def change_all(self, rows: jax.Array, slots: Slots, step: jax.Array) -> tuple[jax.Array, Slots]:
        """Returns all rows ``[R, W]`` of a table and all slots after the change."""
        ...


def at_step(value: Scalar, step: jax.Array, name: str = "a hyper-parameter") -> jax.Array:
    """A hyper-parameter at ``step`` as a scalar, for `Optimizer.hyperparameters`.

    Args:
        value: a number, a scalar array, an ``nnx.Variable`` or a schedule, a function of the step.
        step: number of steps before this one. The result is float64 if it is, else float32; it is a scalar of numpy
            if ``value`` is a number, so that programs do not compute it.
        name: of the hyper-parameter, for errors.

    Raises:
        TypeError, ValueError: it is not a real scalar, or the schedule does not return one.

    >>> import jax_tt
    >>> float(jax_tt.optimizers.at_step(lambda step: 1 / (step + 1), 3))
    0.25
    """
    if callable(value) and not is_array(value):
        value = value(step)
    expected = "one real number, or a schedule that returns one"
    convert: Any = np.asarray if isinstance(value, numbers.Real) else jnp.asarray
    try:
        scalar = convert(value, accumulator(getattr(step, "dtype", jnp.float32)))[()]
    except (TypeError, ValueError) as error:
        raise mismatch(name, shown(value), expected, error=TypeError) from error
    if scalar.shape != ():
        raise mismatch(name, scalar, expected)
    return scalar


def this_step(step: jax.Array) -> jax.Array:
    """The number of a step counted from 1, so that 0 in a slot says that a row was never used."""
    return jnp.minimum(at_step(step, step) + 1, MOST_STEPS)


def one_more(count: jax.Array) -> jax.Array:
    """A counter of steps after one more."""
    return jnp.minimum(count + 1, MOST_STEPS)


def interval(last_step: jax.Array, step: jax.Array) -> jax.Array:
    """Steps since the last use of a row; 1 if there was none, and where steps are no longer counted."""
    return jnp.where(last_step == 0, 1, jnp.maximum(step - last_step, 1))


def check_numbers(rule: Any, *names: str, within: str = "[0, inf)") -> None:
    """Checks fields that are in an interval: numbers by value, arrays by shape, schedules when they are called.

    Initial values cannot be schedules, and static fields are numbers.
    """
    low, high = map(float, within[1:-1].split(","))
    for name in names:
        value = getattr(rule, name)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        array = is_array(value)
        fits, expected = (
            number or array or callable(value),
            ", a scalar array or a schedule of the step",
        )
        if name in rule.initial:
            fits, expected = number or array, " or a scalar array"
        elif name in rule.static:
            fits, expected = number, ", since it is part of the program"
        expect(fits, name, shown(value), f"a number{expected}", error=TypeError)
        if array:
            as_scalar(name, value)
        elif isinstance(value, numbers.Real):
            at = float(value)
            above = low <= at if within[0] == "[" else low < at
            below = at <= high if within[-1] == "]" else at < high
            expect(above and below, name, value, f"a number in {within}")


def is_zero(value: Any) -> bool:
    """Whether a hyper-parameter is the number 0: an array or a schedule may be something else in another step."""
    return isinstance(value, numbers.Real) and float(value) == 0


def is_array(value: Any) -> bool:
    """Variables of NNX count: they hold arrays, though they can be called."""
    return isinstance(value, jax.Array | np.ndarray) or hasattr(value, "__jax_array__")
