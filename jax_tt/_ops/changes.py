"""Digests of rows, by which dumps tell what has changed since an earlier one."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.words import mix, mix_wide
from jax_tt._formats.dump import Dump
from jax_tt._formats.stored import FileError
from jax_tt._table.types import State

# Among the arrays that do not belong to single keys: all keys of the table with a digest each, and keys that have left.
_HELD, LEFT = ("held_keys", "held_digests"), "left_keys"

Digests = dict[str, np.ndarray]


def digests_of(entries: np.ndarray, state: State, names: Iterable[str]) -> Digests:
    """Digests uint64 ``[n]`` of every key with its score and last batch, and of its rows of the arrays ``names``."""
    keys, slots = entries["key"], entries["slot"]
    digests = {"keys": joined_digests(keys, entries["score"], entries["touched"])}
    for name in names:
        # A table of another type holds other values, which are not compared.
        rows = row_digests(state[name])[slots]
        digests[f"{name} {state[name].dtype}"] = joined_digests(keys, rows)
    return digests


def summed(digests: Digests) -> dict[str, int]:
    """The digests of all keys as one number by name, whatever slots they are in."""
    return {name: int(numbers.sum(dtype=np.uint64)) for name, numbers in digests.items()}


def held_by(entries: np.ndarray, digests: Digests) -> dict[str, np.ndarray]:
    """What a dump says of all keys of its table, for dumps of changes that follow it."""
    return dict(zip(_HELD, (entries["key"], joined_digests(*digests.values())), strict=True))


def changed_since(base: Dump, held: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Which keys of a table a dump does not have as they are, bool ``[n]``, and the keys that have left the table.

    ``held`` is `held_by` of the table. Raises a `FileError` for a dump that does not say what it holds.
    """
    before = base.rest(_HELD)
    if base.digests is None or len(before) < len(_HELD):
        raise FileError(
            f"{base.path}: does not say what state of a hash table it holds, so that changes since then are unknown; "
            "make a full dump."
        )
    (keys, digests), (old_keys, old_digests) = (
        [arrays[name] for name in _HELD] for arrays in (held, before)
    )
    _, here, there = np.intersect1d(keys, old_keys, assume_unique=True, return_indices=True)
    changed = np.ones(len(keys), bool)
    changed[here] = digests[here] != old_digests[there]
    return changed, np.delete(old_keys, there)


def check_base(dump: Dump, label: str, digests: Digests) -> None:
    """Raises unless a dump of changes follows the state of a table with these digests."""
    base = dump.base or {}
    differs = [name for name, total in summed(digests).items() if base.get(name, total) != total]
    if differs:
        raise ValueError(
            f"{label}state: got {len(digests['keys'])} keys in another state than the one that {dump.path} is a dump "
            f"of changes of ({', '.join(differs)} differ); expected the state of {dump.since}. Load this one into a "
            "table without keys, and then the dumps of changes in their order; or make a full dump."
        )


def row_digests(array: jax.Array) -> np.ndarray:
    """A number for every row of an array ``[N, ...]`` that changes with any of its bits, uint64 ``[N]``."""
    high, low = (np.asarray(words).astype(np.uint64) for words in _summed(array))
    return high << np.uint64(32) | low


def joined_digests(*digests: np.ndarray) -> np.ndarray:
    """One number in place of several, uint64 ``[N]``; their order counts."""
    joined = np.zeros(digests[0].shape, np.uint64)
    for one in digests:
        joined = mix_wide(joined + one.astype(np.uint64))
    return joined


@jax.jit
def _summed(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two sums uint32 ``[N]`` of the words of every row, mixed, times odd numbers that belong to their places."""
    bits = jax.lax.bitcast_convert_type(array, f"uint{min(8 * array.dtype.itemsize, 32)}")
    places = np.arange(np.prod(bits.shape[1:], dtype=int), dtype=np.uint32)
    salt, first, second = (
        (mix(np.uint32(3) * places + np.uint32(k)) | np.uint32(1)).reshape(1, *bits.shape[1:])
        for k in range(3)
    )
    words, zero = mix(bits.astype(jnp.uint32) ^ salt), np.uint32(0)
    return jax.lax.reduce(
        (words * first, words * second),
        (zero, zero),
        lambda x, y: (x[0] + y[0], x[1] + y[1]),
        tuple(range(1, bits.ndim)),
    )
