"""What has changed in a hash table since a dump, by digests of its keys with their rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jax_tt._formats.dump import Dump
from jax_tt._formats.stored import FileError
from jax_tt._ops.row_digests import joined_digests, row_digests
from jax_tt._table.types import State

# In the arrays beside those of keys: all keys of the table with a digest each, and those that have left it.
_HELD, LEFT = ("held_keys", "held_digests"), "left_keys"

Digests = dict[str, np.ndarray]


def digests_of(entries: np.ndarray, state: State, names: Iterable[str]) -> Digests:
    """Numbers uint64 ``[n]`` that change with every key, its score and its last batch, and with its rows of arrays.

    Args:
        entries: the keys of the table.
        state: its arrays by name.
        names: of arrays with a row for every slot.
    """
    keys, slots = entries["key"], entries["slot"]
    found = {"keys": joined_digests(keys, entries["score"], entries["touched"])}
    for name in names:
        # A table of another type holds other values, which are not compared.
        rows = row_digests(state[name])[slots]
        found[f"{name} {state[name].dtype}"] = joined_digests(keys, rows)
    return found


def summed(digests: Digests) -> dict[str, int]:
    """The digests of all keys as one number by name, whatever slots they are in."""
    return {name: int(own.sum(dtype=np.uint64)) for name, own in digests.items()}


def held_by(entries: np.ndarray, digests: Digests) -> dict[str, np.ndarray]:
    """What a dump says of all keys of its table, for dumps of changes that follow it."""
    return dict(zip(_HELD, (entries["key"], joined_digests(*digests.values())), strict=True))


def changed_since(base: Dump, held: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Which keys of a table a dump does not have as they are, bool ``[n]``, and the keys that it has beside them.

    Args:
        base: the dump.
        held: `held_by` of the table.

    Raises:
        FileError: it does not say what it holds.
    """
    before = base.rest(_HELD)
    if base.digests is None or len(before) < len(_HELD):
        raise FileError(
            f"{base.path}: does not say what state of a hash table it holds, so that changes since then are unknown; "
            "make a full dump."
        )
    (keys, digests), (old_keys, old_digests) = (
        [own[name] for name in _HELD] for own in (held, before)
    )
    _, here, there = np.intersect1d(keys, old_keys, assume_unique=True, return_indices=True)
    changed = np.ones(len(keys), bool)
    changed[here] = digests[here] != old_digests[there]
    return changed, np.delete(old_keys, there)


def check_base(dump: Dump, label: str, digests: Digests) -> None:
    """Raises unless a dump of changes follows the state of a table.

    Args:
        dump: one of changes.
        label: of the table, for the error.
        digests: of its keys, and of the arrays that are loaded.
    """
    base = dump.base or {}
    differs = [name for name, own in summed(digests).items() if base.get(name, own) != own]
    if differs:
        raise ValueError(
            f"{label}state: got {len(digests['keys'])} keys in another state than the one that {dump.path} is a dump "
            f"of changes of ({', '.join(differs)} differ); expected that of {dump.since}. Load this one into a table "
            "without keys, and then the dumps of changes in their order; or make a full dump."
        )
