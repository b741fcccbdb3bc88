"""Which keys have room in sets, of which each key may be in two: the most valuable ones.

Keys that have room together are the independent sets of a matroid. So it is well defined which ones stay: key by key in
order of falling value, each that has room beside those before it, whatever they move between their sets for that. No
choice has more keys, and none has a more valuable key in place of one of these.

The keys are not tried one by one. A maximum flow distributes all of them. Where sets are left with too many, as many of
the least valuable keys as are too many are taken out, and the keys that have room after all are put back, the most
valuable ones first. Both take flows of ever fewer keys, as most of these guesses are right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_NEVER = np.int32(2**31 - 1)


class Keys(NamedTuple):
    """Keys in order of falling value.

    Attributes:
        home, other: int64 ``[n]``, the two sets of every key; they may be the same. It is in the first one.
        holds: bool ``[n]``, the keys that go to the other one only where keys that are not marked cannot make room.
    """

    home: np.ndarray
    other: np.ndarray
    holds: np.ndarray

    def of(self, chosen: np.ndarray) -> Keys:
        return Keys(*(array[chosen] for array in self))


def most_valuable(keys: Keys, sets: int, ways: int) -> np.ndarray:
    """A set for every key that stays, and -1 for the others, where so many sets have room for so many keys each."""
    keys = balanced(keys, sets, ways)
    found = keys.home.copy()
    too_many = np.bincount(found, minlength=sets) > ways
    # Keys that are too many may go to their other set in place of keys there, and so on: all of those sets are full.
    crowded = _distances(keys.other, keys.home, too_many) < _NEVER
    (here,) = np.nonzero(crowded[found])
    if len(here):
        found[here] = _without_excess(keys.of(here), crowded, ways)
    return found


def balanced(keys: Keys, sets: int, ways: int) -> Keys:
    """The keys in sets such that as few as possible are too many for their set.

    This is a maximum flow, by pushes to sets that are nearer to free slots: keys of sets with too many of them move to
    their other set, of which keys may have to move in turn.
    """
    home, other, holds = keys.home.copy(), keys.other.copy(), keys.holds
    while True:
        excess = np.bincount(home, minlength=sets) - ways
        distance = _distances(home, other, excess < 0, excess > 0)
        (moving,) = np.nonzero((excess[home] > 0) & (distance[other] < distance[home]))
        if not len(moving):
            return Keys(home, other, holds)
        moving = moving[np.lexsort((holds[moving], home[moving]))]
        moving = moving[rank(home[moving]) < excess[home[moving]]]
        home[moving], other[moving] = other[moving], home[moving]


def rank(groups: np.ndarray) -> np.ndarray:
    """How many entries before each one are of the same group; the groups are in order."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def _distances(
    home: np.ndarray, other: np.ndarray, free: np.ndarray, wanted: np.ndarray | None = None
) -> np.ndarray:
    """How many keys have to move for a set to get a free slot; `_NEVER` where none can.

    Where some sets are ``wanted``, those that are farther away than all of them are `_NEVER`, too.
    """
    distance, step = np.where(free, np.int32(0), _NEVER), 0
    while wanted is None or (distance[wanted] == _NEVER).any():
        far = distance[home] == _NEVER
        home, other = home[far], other[far]
        reached = home[distance[other] == step]
        if not len(reached):
            break
        step += 1
        distance[reached] = step
    return distance


def _without_excess(keys: Keys, chosen: np.ndarray, ways: int) -> np.ndarray:
    """`most_valuable` of keys that are in chosen sets, may be in no others, and are too many for them."""
    keys, sets = _renumbered(keys, chosen)
    group = _groups(keys, sets.size)
    excess = np.bincount(group[keys.home], minlength=sets.size)
    excess -= ways * np.bincount(group, minlength=sets.size)
    last = _first_of_groups(group[keys.home][::-1], excess)[::-1]
    found = np.full(last.size, -1)
    found[~last] = most_valuable(keys.of(~last), sets.size, ways)
    found = _with_what_has_room(keys, found, np.flatnonzero(last), sets.size, ways)
    return np.where(found < 0, -1, sets[found])


def _with_what_has_room(
    keys: Keys, found: np.ndarray, waiting: np.ndarray, sets: int, ways: int
) -> np.ndarray:
    """Adds those of the waiting keys that have room; they are less valuable than the keys that they compete with."""
    while True:
        home = np.where(found < 0, keys.home, found)
        now = Keys(home, keys.home + keys.other - home, keys.holds)
        there = found >= 0
        load = np.bincount(home[there], minlength=sets)
        leads = _distances(home[there], now.other[there], load < ways) < _NEVER
        # What comes to no free slot now never does, and full sets whose keys come to none stay as they are.
        waiting = waiting[leads[now.home[waiting]] | leads[now.other[waiting]]]
        if not len(waiting):
            return found
        now = now._replace(
            home=np.where(leads[now.home], now.home, now.other),
            other=np.where(leads[now.other], now.other, now.home),
        )
        (there,) = np.nonzero(there & leads[home])
        part, numbers = _renumbered(now.of(np.concatenate([there, waiting])), leads)
        group = _groups(part, numbers.size)
        of_key = group[part.home]
        room = ways * np.bincount(group, minlength=numbers.size)
        room -= np.bincount(of_key[: len(there)], minlength=numbers.size)
        tried = _first_of_groups(of_key[len(there) :], room)
        chosen = np.append(np.ones(len(there), bool), tried)
        some = np.concatenate([there, waiting[tried]])
        order = np.argsort(some)
        after = most_valuable(part.of(np.flatnonzero(chosen)[order]), numbers.size, ways)
        found[some[order]] = np.where(after < 0, -1, numbers[after])
        waiting = waiting[~tried]


def _renumbered(keys: Keys, chosen: np.ndarray) -> tuple[Keys, np.ndarray]:
    """The keys of chosen sets with the numbers that these have among themselves, and their own numbers."""
    number = np.cumsum(chosen) - 1
    home, other = number[keys.home], number[keys.other]
    return keys._replace(home=home, other=other), np.flatnonzero(chosen)


def _groups(keys: Keys, sets: int) -> np.ndarray:
    """The group of every set, int64 ``[sets]``: sets that keys may move between are of the same one."""
    group = np.arange(sets)
    while True:
        ends = group[keys.home], group[keys.other]
        low = np.minimum(*ends)
        if (low == np.maximum(*ends)).all():
            return group
        after = group.copy()
        for end in ends:
            np.minimum.at(after, end, low)
        while (after != after[after]).any():
            after = after[after]
        group = after


def _first_of_groups(groups: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which entries are among the first of their group, as many as its count, bool ``[n]``."""
    order = np.argsort(groups, kind="stable")
    first = np.empty(groups.size, bool)
    first[order] = rank(groups[order]) < counts[groups[order]]
    return first
