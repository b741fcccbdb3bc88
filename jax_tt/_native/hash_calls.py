"""The calls of the native operations on hash tables, one value each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_tt._sets.hash_directory import Eviction, KeyDirectory
from jax_tt._sets.initial import InitialRows
from jax_tt._sets.missing import IGNORED, Check


class Search(NamedTuple):
    """The search of keys in one table.

    Attributes:
        directory, keys, present: as in `jax_tt._sets.hash_reference.find`.
        guess: None, or int32 ``[n]``, the slot where each key was, which is taken if it still holds the key; -1 for a
            key that had none, which is not searched, and of which nothing is said.
        absent: static, the slot of keys that are not there.
        check: static, what is said of these keys.
    """

    directory: KeyDirectory
    keys: Any
    present: Any
    guess: Any = None
    absent: int = -1
    check: Check = IGNORED


class Entry(NamedTuple):
    """An insertion into one table.

    Attributes:
        directory, keys, present, given, now, epoch: as in `jax_tt._sets.hash_reference.insert`.
        eviction: static.
        return_old: static, whether `Insertion` has what was there before; else these arrays are empty.
        check: static, what is said of keys that are refused.
    """

    directory: KeyDirectory
    keys: Any
    present: Any
    given: Any
    now: Any
    epoch: Any
    eviction: Eviction
    return_old: bool = True
    check: Check = IGNORED


class Fresh(NamedTuple):
    """Initial rows of one table.

    Attributes:
        seed, keys: as in `jax_tt._sets.initial.initial_rows`.
        wanted: bool ``[n]``.
        distribution, features: static, as there.
        dtype: static; float32 rows are rounded to nearest even.
    """

    seed: Any
    keys: Any
    wanted: Any
    distribution: InitialRows
    features: int
    dtype: Any


class Reset(NamedTuple):
    """Initial rows in slots of one table.

    Attributes:
        rows: ``[capacity, features]``.
        seed, keys: as in `jax_tt._sets.initial.initial_rows`, ``[n]`` keys.
        slots: as in `jax_tt._sets.hash_reference.exchange`.
        distribution: static, as in `Fresh`.
    """

    rows: Any
    seed: Any
    keys: Any
    slots: Any
    distribution: InitialRows


class Exchange(NamedTuple):
    """An exchange of entries in the arrays of one table.

    Attributes:
        arrays, new, slots: as in `jax_tt._sets.hash_reference.exchange`; ``new`` in the types of the arrays.
        return_old: static, whether the old entries are returned; else there are none.
    """

    arrays: Sequence[Any]
    new: Sequence[Any]
    slots: Any
    return_old: bool
