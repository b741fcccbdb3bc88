"""Options of a lookup and of an update, checked on construction."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_dtype, mismatch, one_of, shown, type_of
from jax_tt._base.dtypes import resolve_precision
from jax_tt._base.environment import resolve_method
from jax_tt.optimizers import Optimizer
from jax_tt.optimizers._base import SLOT_DTYPES

# What refuses comes first, what looks at nothing last.
BOUNDS = ("error", "warn", "clip", "zero", "unchecked")
# An error in a compiled step loses the state that the step donates.
DEFAULT_BOUNDS = "warn"
# Modes in which ids out of range contribute nothing and do not count as touched.
IGNORED = ("warn", "zero")
_BOUNDS_HINT = (
    ". 'error' stops at ids out of range, 'warn' and 'zero' read zeros for them, with a warning and without, 'clip' "
    "moves them to the nearest row"
)
COMBINERS = ("sum", "mean", "mean_count", "sqrtn", "max")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NeededCotangents:
    """The arrays whose cotangents a loss needs, and whether it needs the cotangent of the per-sample weights.

    It is static, so that it can be among the residuals.
    """

    names: frozenset[str] = frozenset()
    weights: bool = False


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Options of a call, as `jax_tt.tt.embed_bag` describes them.

    Attributes:
        train: whether the call is a training call, which a row cache counts.
        wanted: cotangents that the loss needs, set by the differentiation rule.
        caller: the function that errors of native ops name, set by that function.

    >>> import jax_tt
    >>> jax_tt.Lookup("mean", bounds="clip").combiner
    'mean'
    """

    combiner: str = "sum"
    bounds: str = DEFAULT_BOUNDS
    dtype: Any = None
    precision: Any = None
    method: str = "auto"
    axis_name: Any = None
    train: bool = True
    wanted: NeededCotangents = NeededCotangents()
    caller: str = "lookup"

    def __post_init__(self) -> None:
        one_of("combiner", self.combiner, COMBINERS)
        one_of("bounds", self.bounds, BOUNDS, _BOUNDS_HINT)
        resolve_method(self.method)
        resolve_precision(self.precision)
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))
        check_axis_name(self.axis_name)
        if self.dtype is not None:
            # A name, since np.dtype("float64") == None.
            object.__setattr__(self, "dtype", as_dtype("dtype", self.dtype, None).name)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def replace(self, **changes: Any) -> Lookup:
        """These options with others in place of some."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Update:
    """How the backward pass of a fused table updates it.

    Attributes:
        optimizer: one of `jax_tt.optimizers`.
        skip_nonfinite: leave the table unchanged if any summed gradient is not finite.
        stochastic_rounding: round 16-bit parameters and optimizer state stochastically instead of to nearest.
        max_gradient: limit of the absolute value of every element of the gradient of the looked-up rows, before these
            gradients are weighted, pooled and summed by row; None for no limit. Loss scales are divided out first. With
            ``skip_nonfinite``, elements that are not finite are not limited. It is no limit of the gradient of the
            weights of bags.
        frozen: whether losses leave the table, its optimizer state and its keys as they are.
        shared: whether a collection has the step, the sentinel and the flag `used`, and not the state of
            the table. `Collection` sets it.

    >>> import jax, jax_tt
    >>> update = jax_tt.Update(jax_tt.optimizers.SGD(0.1))
    >>> sorted(jax_tt.tables.DenseTable(1000, 16, update=update).init(jax.random.key(0)))
    ['embedding', 'sentinel', 'step', 'used']
    """

    optimizer: Optimizer
    skip_nonfinite: bool = False
    stochastic_rounding: bool = True
    max_gradient: float | None = None
    frozen: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        for name in ("skip_nonfinite", "stochastic_rounding", "frozen", "shared"):
            object.__setattr__(self, name, bool(getattr(self, name)))
        if self.max_gradient is not None:
            object.__setattr__(self, "max_gradient", _as_limit(self.max_gradient))

    def rounds_stochastically(self, storage: Any) -> bool:
        """Whether parameters of type ``storage``, or slots, are rounded stochastically."""
        narrow = self._has_narrow_slots or jnp.dtype(storage).itemsize <= 2
        return self.stochastic_rounding and narrow

    @functools.cached_property
    def _has_narrow_slots(self) -> bool:
        return any(jnp.dtype(slot.dtype).itemsize == 2 for slot in self.optimizer.slots)


def _as_limit(value: Any) -> float:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < np.float32(value) < np.inf:
        expected = "a positive number within the range of float32, or None for no limit"
        fix = "It is part of the program, and cannot be an array."
        raise mismatch("max_gradient", shown(value), expected, fix)
    return float(value)


class StepInputs(NamedTuple):
    """Inputs of a call for the update in its backward pass.

    Attributes:
        grad_scale: loss scale that the gradients are divided by, or None.
        key: typed key of stochastic rounding, or None.
        hyperparameters: fields of the optimizer for this call, by name.

    >>> import jax_tt
    >>> jax_tt.extension.StepInputs(hyperparameters={"learning_rate": 0.01}).grad_scale is None
    True
    """

    grad_scale: Any = None
    key: Any = None
    hyperparameters: Mapping[str, Any] | None = None


NO_INPUTS = StepInputs()


def check_axis_name(axis_name: Any) -> None:
    """Raises unless ``axis_name`` is hashable, like the names of mesh axes in `jax.lax.psum`."""
    try:
        hash(axis_name)
    except TypeError:
        expected = "the name of a mesh axis or a tuple of names, e.g. axis_name='data'"
        raise mismatch("axis_name", type_of(axis_name), expected, error=TypeError) from None


def check_optimizer(optimizer: Any) -> None:
    """Raises unless ``optimizer`` is one of `jax_tt.optimizers`."""
    if isinstance(optimizer, Optimizer):
        return _check_slots(optimizer)
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        expected = f"an instance of it, e.g. optimizer=jax_tt.optimizers.{optimizer.__name__}(learning_rate=0.05)"
        raise mismatch("optimizer", f"the class {optimizer.__name__}", expected, error=TypeError)
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        raise TypeError(
            f"optimizer: got an optax transformation ({type(optimizer).__name__}); a fused table is updated inside the "
            "backward pass, by a rule of jax_tt.optimizers, e.g. optimizer="
            "jax_tt.optimizers.Adagrad(learning_rate=0.05). To use optax for the table, build the layer or the "
            "table with optimizer=None, and give the gradients to optax."
        )
    expected = "a rule of jax_tt.optimizers, e.g. jax_tt.optimizers.Adagrad(learning_rate=0.05)"
    raise mismatch("optimizer", shown(optimizer), expected, error=TypeError)


def _check_slots(optimizer: Optimizer) -> None:
    for slot in optimizer.slots:
        types = ("float32",) if slot.rowwise else SLOT_DTYPES
        if slot.dtype not in types:
            label = f"optimizer: slot {slot.name!r} of {type(optimizer).__name__}"
            expected = f"{' or '.join(map(repr, types))} per {'row' if slot.rowwise else 'entry'}"
            raise mismatch(label, f"dtype={slot.dtype!r}", expected)
    dtypes = {slot.dtype for slot in optimizer.slots if not slot.rowwise}
    if len(dtypes) > 1:
        label = f"optimizer: slots per entry of {type(optimizer).__name__}"
        raise mismatch(label, f"dtypes {sorted(dtypes)}", "the same type for all of them")


def check_static(argument: str, optimizer: Optimizer) -> None:
    """Raises unless the hyper-parameters are hashable, since the optimizer of a table is static."""
    try:
        hash(optimizer)
    except TypeError:
        held = [k for k, v in vars(optimizer).items() if hasattr(v, "shape")]
        name = held[0] if held else "learning_rate"
        raise TypeError(
            f"{argument}: {type(optimizer).__name__} holds an array in {', '.join(held) or 'a field'}; the rule of a "
            "table is part of the program and holds floats or schedules of the step. A value that changes between "
            f"steps goes to the call, hyperparameters={{{name!r}: value}}, or, in NNX only, into a variable, "
            f"{name}=nnx.Variable(jnp.float32(0.05))."
        ) from None


def check_update(update: Any) -> None:
    """Raises unless ``update`` is None or an `Update`."""
    if update is not None and not isinstance(update, Update):
        expected = "None or a jax_tt.Update, e.g. jax_tt.Update(jax_tt.optimizers.Adagrad(0.05))"
        raise mismatch("update", shown(update), expected, error=TypeError)


DEFAULT_LOOKUP = Lookup()
