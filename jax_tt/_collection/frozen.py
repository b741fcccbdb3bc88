"""A mapping that can be a part of a hashable description."""

from __future__ import annotations

import functools
from collections.abc import ItemsView, Iterator, Mapping
from typing import Any, TypeVar

from jax_tt._base.keywords import UnknownName

Value = TypeVar("Value")


class Frozen(Mapping[str, Value]):
    """A hashable mapping; unlike in dicts, the order matters in comparisons.

    ``kind`` is what the values are, for errors about keys that do not exist.
    """

    def __init__(self, items: Mapping[str, Value], kind: str = "name") -> None:
        self._items, self._kind = dict(items), kind

    def __getitem__(self, key: str) -> Value:
        if key not in self._items:
            raise UnknownName(self._kind, key, self._items)
        return self._items[key]

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def items(self) -> ItemsView[str, Value]:
        return self._items.items()

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Frozen):
            return NotImplemented
        return tuple(self._items.items()) == tuple(other._items.items())

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(self._items.items()))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        # Without the hash: those of strings differ from process to process.
        return Frozen, (self._items, self._kind)

    def __repr__(self) -> str:
        return repr(self._items)
