"""Digests of rows, by which dumps tell what has changed since an earlier one."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.words import mix, mix_wide
from jax_tt._formats.dump import Dump
from jax_tt._formats.stored import FileError
from jax_tt._jax.on_host import on_host
from jax_tt._table.state import State

# Among the arrays that do not belong to single keys: all keys of the table with a digest each, and in a dump of changes
# their slots, so that a table that follows loses the keys that have left, and has the others where they are.
HELD, _SLOTS = ("held_keys", "held_digests"), "held_slots"

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
    return dict(zip(HELD, (entries["key"], joined_digests(*digests.values())), strict=True))


def changes_since(
    base: Dump, held: dict[str, np.ndarray], entries: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The keys of a table that a dump does not have as they are, and what a dump of these says of all keys.

    ``held`` is `held_by` of the table. Raises a `FileError` for a dump that does not say what it holds.
    """
    before = base.rest(HELD)
    if base.digests is None or len(before) < len(HELD):
        raise FileError(
            f"{base.path}: does not say what state of a hash table it holds, so that changes since then are unknown; "
            "make a full dump."
        )
    (keys, digests), (old_keys, old_digests) = (
        [arrays[name] for name in HELD] for arrays in (held, before)
    )
    _, here, there = np.intersect1d(keys, old_keys, assume_unique=True, return_indices=True)
    changed = np.ones(len(keys), bool)
    changed[here] = digests[here] != old_digests[there]
    return entries[changed], {**held, _SLOTS: entries["slot"]}


def staying(dump: Dump, entries: np.ndarray, *, same_sets: bool) -> np.ndarray:
    """The keys of a table that stay where a dump of changes is loaded; in the same sets, with the slots of the dump."""
    given = dump.rest((HELD[0], _SLOTS))
    _, here, there = np.intersect1d(
        entries["key"], given[HELD[0]], assume_unique=True, return_indices=True
    )
    kept = entries[here]
    if same_sets and _SLOTS in given:
        kept["slot"] = given[_SLOTS][there]
    return kept


def check_follows(
    dump: Dump,
    label: str,
    digests: Digests,
    held: np.ndarray,
    new: np.ndarray,
    *,
    without: tuple[str, ...] = (),
) -> None:
    """Raises unless a table becomes the dumped one where a dump of changes is loaded into it.

    Args:
        dump: of changes.
        label: of the table.
        digests: `digests_of` the table.
        held, new: keys uint64 of the table and of the files of the dump.
        without: names of digests that may differ from the state that the changes follow.
    """
    base, sums = dump.base or {}, summed(digests)
    differs = [
        name
        for name, total in sums.items()
        if name not in without and base.get(name, total) != total
    ]
    if differs and not _same_beside(dump, digests, held, new):
        raise ValueError(
            f"{label}state: got {len(held)} keys in another state than the one that {dump.path} is a dump "
            f"of changes of ({', '.join(differs)} differ); expected the state of {dump.since}. Load this one into a "
            "table without keys, and then the dumps of changes in their order; or make a full dump."
        )


def _same_beside(dump: Dump, digests: Digests, held: np.ndarray, new: np.ndarray) -> bool:
    """Whether a table has all keys beside ``new`` as they were dumped, so that later changes may be there already."""
    there = dump.rest(HELD)
    if len(there) < len(HELD) or (dump.digests or {}).keys() != digests.keys():
        return False
    keys, expected = (there[name] for name in HELD)
    kept = ~np.isin(keys, new)
    _, here, of_dump = np.intersect1d(held, keys[kept], assume_unique=True, return_indices=True)
    same = joined_digests(*digests.values())[here] == expected[kept][of_dump]
    return len(here) == np.count_nonzero(kept) and bool(same.all())


def row_digests(array: jax.Array) -> np.ndarray:
    """A number for every row of an array ``[N, ...]`` that changes with any of its bits, uint64 ``[N]``."""
    high, low = (on_host(words).astype(np.uint64) for words in _summed(array))
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
