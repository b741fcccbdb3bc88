"""`KeyDirectory`: which keys have a row, and their scores; and what is said of keys without one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base import reports
from jax_tt._base.reports import MissingKeyWarning as MissingKeyWarning

# What the score of a key is: nothing; the last batch that requested it; its requests; the same two within epochs, which
# are given; or a number that is given with the batch.
POLICIES = ("none", "lru", "lfu", "epoch_lru", "epoch_lfu", "custom")
# Those with epochs, and the policy within an epoch.
WITHIN_EPOCHS = {"epoch_lru": "lru", "epoch_lfu": "lfu"}

# The native ops have a bit for every way of a set.
MAX_WAYS = 64

# What `Insertion.counts` holds. `hits` and `requests` are positions of the batch, the others distinct keys.
COUNTERS: tuple[str, ...] = (
    "requests",
    "hits",
    "unique",
    "unique_hits",
    "inserted",
    "evicted",
    "refused",
)


class Eviction(NamedTuple):
    """Which keys make room for new ones.

    Attributes:
        policy: one of `POLICIES`; nothing is evicted under ``"none"``.
        min_age: how many batches ago the last one of an evicted key is, at least 1.
    """

    policy: str
    min_age: int = 1

    @property
    def counts_requests(self) -> bool:
        """Whether the score of a key depends on how often it was requested."""
        return WITHIN_EPOCHS.get(self.policy, self.policy) == "lfu"


# Of keys that wait for admission: their scores are the last batch and the requests.
OF_WAITING = Eviction("epoch_lfu")


class KeyDirectory(NamedTuple):
    """The keys of a table with ``sets * ways`` rows; slot ``s * ways + w`` is way w of set s.

    A key is in one of the two sets that it hashes to. All 64-bit words are two uint32 words, the high one first. An
    empty slot is one with ``touched`` 0, and is 0 in all arrays, so that no value of a key is reserved.

    Attributes:
        keys: uint32 ``[sets, 2, ways]``.
        scores: uint32 ``[sets, 2, ways]``; the keys with the lowest ones are evicted.
        touched: int32 ``[sets, ways]``, the number of the last batch that requested the key, from 1.
    """

    keys: Any
    scores: Any
    touched: Any

    @property
    def sets(self) -> int:
        return self.touched.shape[0]

    @property
    def ways(self) -> int:
        return self.touched.shape[1]

    @property
    def capacity(self) -> int:
        """The number of slots."""
        return self.sets * self.ways


class Insertion(NamedTuple):
    """What an insertion did; ``n`` is the size of the batch. New keys come in ascending order of slots.

    Attributes:
        slots: int32 ``[n]``, the slots of the keys that were inserted, then ``capacity`` for the rest.
        keys: uint32 ``[n, 2]``, the keys that were inserted.
        old_keys: uint32 ``[n, 2]``, the keys that were there before.
        old_scores: uint32 ``[n, 2]``, their scores.
        old_touched: int32 ``[n]``, their last batch; 0 where the slot was empty.
        counts: int32 ``[len(COUNTERS)]``.
        found: int32 ``[n]``, what `find` gives after the insertion: the slot of every position of the batch, or -1.
    """

    slots: Any
    keys: Any
    old_keys: Any
    old_scores: Any
    old_touched: Any
    counts: Any
    found: Any


def init_directory(sets: int, ways: int) -> KeyDirectory:
    """An empty directory."""
    return KeyDirectory(
        keys=jnp.zeros((sets, 2, ways), jnp.uint32),
        scores=jnp.zeros((sets, 2, ways), jnp.uint32),
        touched=jnp.zeros((sets, ways), jnp.int32),
    )


# The names of the arrays in a state: of keys that have a row, and of keys that wait for admission.
KEYS = tuple(f"hash_{field}" for field in KeyDirectory._fields)
WAITING = tuple(f"hash_waiting_{field}" for field in KeyDirectory._fields)
CLOCK, SEED, TOTALS = "hash_clock", "hash_seed", "hash_totals"


def directory_of(state: Mapping[str, Any], names: tuple[str, ...] = KEYS) -> KeyDirectory:
    """The keys that have a row, or with the names `WAITING` the keys that wait for admission."""
    return KeyDirectory(*(state[name] for name in names))


def named_directory(directory: KeyDirectory, names: tuple[str, ...] = KEYS) -> dict[str, Any]:
    """The arrays of a directory by their names in a state."""
    return dict(zip(names, directory, strict=True))


SAFE_CHECKS = ("error", "warn", "ignore")


class Check(NamedTuple):
    """What to do about keys without a row.

    Attributes:
        mode: one of `SAFE_CHECKS`.
        message: what to say, with ``{count}`` in it.
    """

    mode: str
    message: str = ""


SILENT = Check("ignore")


def check_count(check: Check, count: jax.Array) -> None:
    """Warns or raises on the host where a count, an integer scalar, is not 0.

    A program with a host callback is dispatched more slowly, so the native ops of the CPU do it themselves.
    """
    if check.mode != "ignore":
        _tell_if_any(check, count)


# Eager calls find the program again by the check.
@partial(jax.jit, static_argnums=0)
def _tell_if_any(check: Check, count: jax.Array) -> None:
    tell = partial(_tell, check)
    lax.cond(count > 0, partial(jax.debug.callback, tell), lambda _: None, count)


def _tell(check: Check, count: Any) -> None:
    if not count:  # under vmap, both branches of the condition run
        return
    if check.mode == "error":
        raise ValueError(check.message.replace("{count}", str(int(count))))
    reports.report_missing(check.message, int(count))
