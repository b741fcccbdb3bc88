"""Rules that users write in JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import one_of, shown, type_of
from jax_tt.optimizers._base import Hyper, Optimizer, Slot, Slots, at_step

# (rows[R, W], gradients[R, W], slots by name, step) -> (rows[R, W], slots by name).
Rule = Callable[
    [jax.Array, jax.Array, dict[str, jax.Array], jax.Array],
    tuple[jax.Array, Mapping[str, jax.Array]],
]
_KINDS = ("row", "entry")


@dataclasses.dataclass(frozen=True)
class Custom(Optimizer):
    """A rule of your own in plain JAX, on all platforms.

    ``function(rows, gradients, slots, step)`` returns the new rows and slots. ``rows[R, W]`` and the sums of their
    ``gradients[R, W]`` are in float32, or float64 for a table of this type, ``slots`` is a dict of arrays ``[R, W]`` or
    ``[R]``, and ``step`` counts the steps before this one, as for schedules. The function must treat every row on its
    own, and rows of zeros with gradients of zero must not disturb it: in a dense table, ``rows`` are the distinct rows
    of the batch, followed by rows of zeros up to the number of its ids, whose results are dropped; in a tensor train
    they are all slices of a core, and results of slices that the batch does not use are dropped.

    The new rows of a dense table are written in place, except in two cases in which XLA makes temporary arrays of its
    size: bfloat16 tables on a CPU, which XLA converts to float32 and back, and ``method="reference"``. The step sorts
    the ids of the batch, and takes longer than the native one of the other rules. The function is part of the compiled
    program: define it once, at module level, rather than anew for every call.

    Args:
        function: the rule, as above.
        slots: kinds of its slots by name: ``"entry"`` for one number per entry of a row, ``"row"`` for one per row.
            They have the type of ``gradients`` and start at 0.

    Raises:
        TypeError, ValueError: an argument does not fit, or, when a program is traced, the function returns other shapes
            or slots.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> def signs(rows, gradients, slots, step):
    ...     momentum = 0.9 * slots["momentum"] + gradients
    ...     return rows - 0.1 * jnp.sign(momentum), {"momentum": momentum}
    >>> rule = jax_tt.optimizers.Custom(signs, slots={"momentum": "entry"})
    >>> table = jax_tt.dense_table(4, 1, optimizer=rule)
    >>> ids = jnp.array([[1, 1, 3]])
    >>> loss = lambda state: jax_tt.lookup_bags(table, state, ids)[0].sum()
    >>> state = jax.grad(loss)(table.init(jax.random.key(0)))
    >>> state["slot_momentum_0"].ravel().tolist()
    [0.0, 2.0, 0.0, 1.0]
    """

    function: Rule
    slots: Mapping[str, str] | tuple[Slot, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride]
    static: ClassVar[frozenset[str]] = frozenset({"function", "slots"})

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"function: got {shown(self.function)}; expected a function (rows, gradients, slots, step) -> "
                "(rows, slots)."
            )
        if isinstance(self.slots, Mapping):
            object.__setattr__(self, "slots", _slots(self.slots))
        elif not isinstance(self.slots, tuple) or not all(isinstance(s, Slot) for s in self.slots):
            raise TypeError(
                f"slots: got {shown(self.slots)}; expected a mapping from names to 'row' or 'entry', e.g. "
                "{'momentum': 'entry'}."
            )

    @property
    def kind(self) -> None:
        return None

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        return {"step": at_step(step, step)}

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        names = [slot.name for slot in cast("tuple[Slot, ...]", self.slots)]
        given = dict(zip(names, slots, strict=True))
        returned: Any = self.function(rows, grads, dict(given), hyper["step"])
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"function: returned {type_of(returned)}; expected the pair (rows, slots), the latter a dict, "
                "{} without slots."
            )
        new, stepped = returned
        _check_array("rows", new, rows)
        if not isinstance(stepped, Mapping) or set(stepped) != set(names):
            got = (
                sorted(map(str, stepped))
                if isinstance(stepped, Mapping)
                else type(stepped).__name__
            )
            raise ValueError(
                f"function: returned the slots {got}; expected a dict with those of the rule, {sorted(names)}."
            )
        for name in names:
            _check_array(f"slots[{name!r}]", stepped[name], given[name])
        return new.astype(rows.dtype), tuple(stepped[name] for name in names)


def _slots(kinds: Mapping[str, str]) -> tuple[Slot, ...]:
    for name, kind in kinds.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(
                f"slots: got the name {name!r}; expected a name that can be part of a variable's, e.g. 'momentum'."
            )
        one_of(f"slots[{name!r}]", kind, _KINDS)
    return tuple(Slot(name, kind == "row", 0.0) for name, kind in kinds.items())


def _check_array(what: str, got: Any, like: jax.Array) -> None:
    shape = getattr(got, "shape", None)
    dtype = getattr(got, "dtype", None)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"function: returned {what} of type {dtype}; expected floating-point numbers."
        )
    if shape != like.shape:
        raise ValueError(
            f"function: returned {what} of shape {shape}; expected an array of the shape that it was given, "
            f"{like.shape}."
        )
