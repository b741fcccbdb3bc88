"""The variables of one table among those of a whole linen model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._table.table import Table

PARAMS = "params"


class TableVariables:
    """The arrays of a table by name, unboxed; `replaced` boxes them again.

    Raises:
        ValueError: the variables hold no tensor-train table at ``path``.
    """

    def __init__(self, variables: Mapping[str, Any], path: tuple[str, ...], table: Table) -> None:
        self._all = traverse_util.flatten_dict(dict(variables), keep_empty_nodes=True)
        collections = {PARAMS, OVERWRITE_WITH_GRADIENT, *table.buffers.values()}
        self._places = {
            place[-1]: place
            for place in self._all
            if place[0] in collections and place[1:-1] == path
        }
        first = table.param_names[0]
        if first not in self._places:
            raise ValueError(
                f"path: the variables hold no {first} at {'/'.join(path) or 'their top'}; expected the names that lead "
                "to the layer in the collections."
            )
        self.values = {
            name: nn.meta.unbox(self._all[place]) for name, place in self._places.items()
        }
        self._first = self._places[first]

    def replaced(self, values: Mapping[str, Any], table: Table) -> dict[str, Any]:
        """All variables of the model with the state ``values`` of ``table`` in place of that of the old table."""
        own = set(self._places.values())
        kept = {place: value for place, value in self._all.items() if place not in own}
        for name, value in values.items():
            collection = table.buffers.get(name, self._first[0])
            place = self._places.get(name, (collection, *self._first[1:-1], name))
            like = None if name in table.buffers else self._all[self._first]
            like = self._all.get(place, like)
            kept[place] = value if like is None else nn.meta.replace_boxed(like, value)
        return traverse_util.unflatten_dict(kept)
