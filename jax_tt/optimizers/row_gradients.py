"""The gradients of the rows of a batch, left for the program to use."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_tt._base.arguments import as_positive
from jax_tt.optimizers._base import Hyper, Optimizer, Slot, Slots

# A row's number is stored in two slots of floats, as quotient and remainder of this base; both are exact.
_BASE = 2**16


class GradientsOfRows(NamedTuple):
    """What `RowGradients` leaves of a batch.

    Attributes:
        rows: numbers of rows ``[capacity]``, ascending, uint32, or int64 with x64; beyond the last row the highest
            number of the type, which ``table.at[rows].add(..., mode="drop")`` ignores.
        gradients: their summed gradients ``[capacity, D]``, float32, or float64 for a float64 table; 0 beyond the last
            row.
        distinct: the number of distinct rows of the batch, a scalar of that type. If it exceeds the capacity, all
            gradients are NaN.

    >>> import jax, jax_tt
    >>> rule = jax_tt.optimizers.RowGradients(capacity=2)
    >>> table = jax_tt.dense_table(10, 4, optimizer=rule)
    >>> rule.read(table.init(jax.random.key(0))).gradients.shape
    (2, 4)
    """

    rows: jax.Array
    gradients: jax.Array
    distinct: jax.Array


@dataclasses.dataclass(frozen=True)
class RowGradients(Optimizer):
    """No update: the summed gradients of the distinct rows of the batch are left in the slots of the table.

    A step changes the slots alone, and counts as a step. `read` takes them from the state after it; no array has the
    size of the table. It is ``NONE`` of FBGEMM's table-batched embedding. For a rule of your own that is to run in the
    step, `Custom` needs no capacity. It is for dense tables.

    Args:
        capacity: the largest number of distinct rows in a batch; the number of ids of a batch always suffices. If
            there are more, all gradients are NaN, and `read` raises an error outside ``jit``.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> rule = jax_tt.optimizers.RowGradients(capacity=3)
    >>> table = jax_tt.dense_table(10, 2, optimizer=rule)
    >>> ids = jnp.array([[7, 1, 7]])
    >>> loss = lambda state: jax_tt.lookup_bags(table, state, ids)[0].sum()
    >>> found = rule.read(jax.grad(loss)(table.init(jax.random.key(0))))
    >>> found.rows[:2].tolist(), found.gradients.tolist(), int(found.distinct)
    ([1, 7], [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0]], 2)
    """

    capacity: int
    static: ClassVar[frozenset[str]] = frozenset({"capacity"})
    not_for_trains: ClassVar[str] = (
        "The gradients of a tensor train are as large as its cores: build the table without an optimizer to get them."
    )

    def __post_init__(self) -> None:
        as_positive("capacity", self.capacity)

    @property
    def kind(self) -> None:
        return None

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("gradient", False, 0.0, self.capacity),
            Slot("row_high", True, -1.0, self.capacity),
            Slot("row_low", True, 0.0, self.capacity),
            Slot("count", True, 0.0, 1),
        )

    def read(self, state: Mapping[str, Any]) -> GradientsOfRows:
        """The gradients of the last step that used the table; none before the first.

        Args:
            state: arrays of the table by name.

        Returns:
            `GradientsOfRows`.

        Raises:
            ValueError: ``state`` has no slots of this rule; or, outside ``jit``, the batch had more than ``capacity``
                distinct rows.
        """
        gradients, high, low, (count,) = self._arrays(state)
        if not isinstance(count, Tracer) and count > self.capacity:
            raise ValueError(
                f"capacity: got {self.capacity}; the last batch had {int(count)} distinct rows. Make the table with a "
                "larger capacity: the number of ids of a batch always suffices."
            )
        # Tables may have more rows than int32 can count.
        dtype = jnp.int64 if jax.config.read("jax_enable_x64") else jnp.uint32
        number = jnp.maximum(high, 0).astype(dtype) * _BASE + low.astype(dtype)
        none = jnp.asarray(jnp.iinfo(dtype).max, dtype)
        return GradientsOfRows(jnp.where(high < 0, none, number), gradients, count)

    def _arrays(self, state: Mapping[str, Any]) -> list[jax.Array]:
        names = [f"slot_{slot.name}_0" for slot in self.slots]
        found = [state[name] for name in names if name in state]
        shapes = [getattr(array, "shape", None) for array in found]
        rows = [shape[0] if shape else None for shape in shapes]
        if rows != [slot.rows for slot in self.slots]:
            raise ValueError(
                f"state: got slots of shapes {shapes}; expected the state of a table with {self}, with the slots "
                f"{', '.join(names)}."
            )
        return [jnp.asarray(array) for array in found]

    def left(self, rows: jax.Array, sums: jax.Array) -> Slots:
        """The slots after a batch with ``rows[n]``, of which the highest number is none, and their ``sums[n, D]``."""
        none = rows == jnp.iinfo(rows.dtype).max
        count = jnp.sum(~none).astype(sums.dtype)
        high = jnp.where(none, -1, (rows // _BASE).astype(sums.dtype))
        low = jnp.where(none, 0, (rows % _BASE).astype(sums.dtype))
        gradients = jnp.where(none[:, None], 0, sums)
        gradients, high, low = (
            _resized(array, self.capacity, fill)
            for array, fill in ((gradients, 0.0), (high, -1.0), (low, 0.0))
        )
        return jnp.where(count > self.capacity, jnp.nan, gradients), high, low, count[None]

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        raise TypeError("optimizer: got RowGradients; it has no step, and is for a DenseTable.")


def _resized(array: jax.Array, rows: int, fill: float) -> jax.Array:
    """Cuts an array to this number of rows, or fills it up."""
    new = jnp.full((rows, *array.shape[1:]), fill, array.dtype)
    kept = min(rows, array.shape[0])
    return new.at[:kept].set(array[:kept])
