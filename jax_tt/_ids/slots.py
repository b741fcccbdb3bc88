"""`Slots`: places of rows, which are no ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_tt._ids.split_ids import same_arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Where rows are on the device, as `Tiers.prefetch` and `dynamic.insert` return it.

    A slot has one row now and another one later, so that it must not be taken for an id. Tables with tiers, which are
    described with ``takes_slots=True``, take nothing else; other tables take no slots.

    Attributes:
        numbers: int32 ``[...]``, rows of the arrays of the table; what they are where there is no row depends on the
            function that returns them.

    >>> import jax_tt, numpy as np
    >>> table = jax_tt.dense_table(64, 8, optimizer=jax_tt.optimizers.SGD(0.1), takes_slots=True)
    >>> collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    >>> tiers = jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=64)}, depth=0)
    >>> staged = next(tiers.prefetch([{"item": np.array([[10**12, 7, 10**12]])}]))
    >>> staged.batch["item"].shape, len(np.unique(staged.batch["item"].numbers))
    ((1, 3), 2)
    """

    numbers: Any

    __eq__ = same_arrays

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)
