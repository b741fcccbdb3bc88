"""The variables of one table among those of a whole linen model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._layers._names import core_names

PARAMS, ROW_CACHE = "params", "row_cache"


class TableVariables:
    """Parameters, optimizer state and row cache of a table, by name; boxes are taken off and put on again.

    Raises:
        ValueError: the variables hold no tensor-train table at ``path``.
    """

    def __init__(self, variables: Mapping[str, Any], path: tuple[str, ...]) -> None:
        self._all = traverse_util.flatten_dict(dict(variables), keep_empty_nodes=True)
        self._places = {
            place[-1]: place
            for place in self._all
            if place[0] in (PARAMS, OVERWRITE_WITH_GRADIENT, ROW_CACHE) and place[1:-1] == path
        }
        first = core_names(1)[0]
        if first not in self._places:
            raise ValueError(
                f"path: the variables hold no {first} at {'/'.join(path) or 'their top'}; expected the names that lead "
                "to the layer in the collections."
            )
        self.values = {
            name: nn.meta.unbox(self._all[place]) for name, place in self._places.items()
        }
        self._first = self._places[first]

    def get(self, place: tuple[str, ...]) -> Any:
        """The variable at a place of the model, or None."""
        return self._all.get(place)

    def replaced(
        self, values: Mapping[str, Any], others: Mapping[tuple[str, ...], Any] | None = None
    ) -> dict[str, Any]:
        """All variables of the model with these in place of the table's, and ``others`` where their places say."""
        own = set(self._places.values())
        kept = {place: value for place, value in self._all.items() if place not in own}
        for name, value in values.items():
            place = self._places.get(name, (*self._first[:-1], name))
            kept[place] = nn.meta.replace_boxed(self._all.get(place, self._all[self._first]), value)
        return traverse_util.unflatten_dict({**kept, **(others or {})})
