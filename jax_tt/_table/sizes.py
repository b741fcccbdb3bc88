"""`Sized`: the bytes of a table, from what its initial states are."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._table.parts_of_arrays import is_rows
from jax_tt._table.state import StateSpec

# The roles of arrays that only steps need.
_OF_STEPS = ("slot", "scalar")


class Sized:
    """The bytes of a table, which follow from its `spec` and `init`: kinds define neither of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that lookups need: parameters, constants, orders, keys and caches, without optimizer state."""
        return self._nbytes[0]

    @property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer state of a fused table, with its step count; 0 for other tables."""
        return self._nbytes[1]

    @functools.cached_property
    def _nbytes(self) -> tuple[int, int]:
        table: Any = self
        return sizes(table.spec, jax.eval_shape(lambda: table.init(jax.random.key(0))))


def sizes(spec: StateSpec, state: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the arrays of a state that lookups need, and of the others, which only steps need."""
    roles = {array.name: array.role for array in spec.arrays}
    totals = [0, 0]
    for name, value in state.items():
        # The step count of a table of a collection is not in its spec. Initialisers may box values.
        of_steps = roles.get(name, "scalar") in _OF_STEPS
        for array in jax.tree.leaves(value, is_leaf=is_rows):
            totals[of_steps] += array.size * jnp.dtype(array.dtype).itemsize
    return totals[0], totals[1]
