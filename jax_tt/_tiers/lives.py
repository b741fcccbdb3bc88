"""`Lives`: when the keys of a table with tiers were requested, on the host; and which new keys are admitted."""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_tt._directories.admission import Admission, AdmitAfter
from jax_tt._directories.initial import threefry
from jax_tt._directories.placing import words_of_keys
from jax_tt._tiers.key_index import KeyIndex

# Of a key: the number of the last batch that requested it, from 1, its requests, and the epoch of that batch.
LIFE = np.dtype(
    [("key", np.uint64), ("touched", np.int64), ("requests", np.uint32), ("epoch", np.int32)]
)


class TierView(NamedTuple):
    """What a condition for removal sees of every row of a table with tiers.

    Attributes:
        keys: uint64 ``[n]``.
        age: int64 ``[n]``, how many batches ago the last request was; 0 for the last batch.
        requests: uint32 ``[n]``, how often the key was requested since it came, also while it waited.
        epoch: int32 ``[n]``, the ``epoch`` of `Tiers.prefetch` with the last request.

    >>> import jax_tt, numpy as np
    >>> view = jax_tt.pipeline.TierView(*(np.array([number]) for number in (7, 1000, 2, 0)))
    >>> (view.age > 900) & (view.requests < 3)
    array([ True])
    """

    keys: np.ndarray
    age: np.ndarray
    requests: np.ndarray
    epoch: np.ndarray


class Entries:
    """Entries of `LIFE` by key."""

    def __init__(self) -> None:
        self._places = KeyIndex()
        self._entries, self._emptied = np.zeros(64, LIFE), np.arange(64)[::-1].copy()
        self._depth = 64

    def __len__(self) -> int:
        return len(self._places)

    def get(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Entries of keys uint64 ``[n]``, 0 but for the key where there is none, and where there are any."""
        places = self._places.find(keys)
        found = np.zeros(len(keys), LIFE)
        found[places >= 0] = self._entries[places[places >= 0]]
        found["key"] = keys
        return found, places >= 0

    def set(self, entries: np.ndarray) -> None:
        """Sets the entries of distinct keys."""
        places = self._places.find(entries["key"])
        new = np.flatnonzero(places < 0)
        while self._depth < len(new):
            size = len(self._entries)
            self._entries = np.concatenate([self._entries, np.zeros(size, LIFE)])
            longer = np.zeros(2 * size, np.int64)
            longer[: self._depth] = self._emptied[: self._depth]
            longer[self._depth : self._depth + size] = np.arange(size, 2 * size)
            self._emptied, self._depth = longer, self._depth + size
        places[new] = self._emptied[self._depth - len(new) : self._depth]
        self._depth -= len(new)
        self._places.set(entries["key"][new], places[new])
        self._entries[places] = entries

    def erase(self, keys: np.ndarray) -> None:
        """Removes keys."""
        places = self._places.erase(keys)
        places = places[places >= 0]
        self._entries[places] = np.zeros((), LIFE)
        self._emptied[self._depth : self._depth + len(places)] = places
        self._depth += len(places)

    def all(self) -> np.ndarray:
        """All entries, in the order of keys."""
        return np.sort(self._entries[self._entries["touched"] > 0], order="key")


class _Past(NamedTuple):
    """Entries before a batch, of all keys that it changes, and which of them were there."""

    before: np.ndarray
    there: np.ndarray


class Lives:
    """The keys that have a row, and the keys that wait for admission, batch by batch.

    Batches are counted when they are prepared, ahead of the batch that the device is at; `forget_staged` takes the
    counts of batches back that were not loaded, and `loaded` returns the entries without them.

    Args:
        admission: which new keys get a row; None for all.
        most: keys that wait at most, unless the admission says it. Beyond, the keys are forgotten whose last request is
            longest ago, an eighth of them at a time.
        seed: of the table, uint32 ``[2]``.
    """

    def __init__(self, admission: Admission | None, most: int, seed: np.ndarray):
        self._admission, self._seed = admission, seed
        self._most = (isinstance(admission, AdmitAfter) and admission.waiting) or most
        # Of rows, and of keys that wait.
        self._kept = Entries(), Entries()
        self.clock = 0
        # By batch that was prepared and not loaded, the oldest first, for both of these.
        self._staged: collections.deque[tuple[_Past, _Past]] = collections.deque()
        self._guard = threading.Lock()

    def request(self, keys: np.ndarray, epoch: int) -> np.ndarray:
        """Counts the keys uint64 ``[n]`` of a batch; returns those in ascending order that get no row."""
        distinct, counts = np.unique(keys, return_counts=True)
        with self._guard:
            self.clock += 1
            rows, waiting = self._kept
            before, there = rows.get(distinct)
            found = before.copy()
            waited, waits = waiting.get(distinct)
            requests = np.where(there, found["requests"], waited["requests"]).astype(np.int64)
            found["touched"], found["epoch"] = self.clock, epoch
            found["requests"] = np.minimum(requests + counts, 2**32 - 1)
            admitted = there | self._admitted(found)
            left = ~admitted if isinstance(self._admission, AdmitAfter) else np.zeros_like(there)
            old = self._oldest(int(np.count_nonzero(left & ~waits)), distinct)
            changed = np.concatenate([waited, old])
            known = np.concatenate([waits, np.ones(len(old), bool)])
            pasts = _Past(before[admitted], there[admitted]), _Past(changed, known)
            self._staged.append(pasts)
            rows.set(found[admitted])
            waiting.erase(np.concatenate([old["key"], distinct[admitted & waits]]))
            waiting.set(found[left])
        return distinct[~admitted]

    def load(self) -> None:
        """Notes that the oldest batch that was prepared has been loaded."""
        with self._guard:
            self._staged.popleft()

    def forget_staged(self) -> None:
        """Takes back all batches that were not loaded."""
        with self._guard:
            while self._staged:
                pasts = self._staged.pop()
                for kept, past in zip(self._kept, pasts, strict=True):
                    kept.erase(past.before["key"][~past.there])
                    kept.set(past.before[past.there])
                self.clock -= 1

    def loaded(self) -> tuple[int, np.ndarray, np.ndarray]:
        """The number of loaded batches, and the entries after them of rows and of keys that wait, in order of keys."""
        with self._guard:
            entries = []
            for k, kept in enumerate(self._kept):
                pasts = [pasts[k] for pasts in self._staged]
                before = np.concatenate([np.zeros(0, LIFE), *(past.before for past in pasts)])
                there = np.concatenate([np.zeros(0, bool), *(past.there for past in pasts)])
                # The oldest batch knows what was loaded.
                keys, first = np.unique(before["key"], return_index=True)
                now = kept.all()
                now = now[~np.isin(now["key"], keys)]
                entries.append(
                    np.sort(np.concatenate([now, before[first[there[first]]]]), order="key")
                )
            return self.clock - len(self._staged), entries[0], entries[1]

    def view(self) -> TierView:
        """The rows after the loaded batches."""
        clock, rows, _ = self.loaded()
        return TierView(rows["key"], clock - rows["touched"], rows["requests"], rows["epoch"])

    def clear(self) -> None:
        """Forgets everything."""
        self._kept, self.clock = (Entries(), Entries()), 0

    def put(self, clock: int, rows: np.ndarray, waiting: np.ndarray) -> None:
        """Sets entries; the number of batches is the larger one."""
        self.clock = max(self.clock, clock)
        for kept, entries in zip(self._kept, (rows, waiting), strict=True):
            kept.set(entries)
        self._kept[1].erase(rows["key"])

    def remove(self, keys: np.ndarray) -> None:
        """Removes the rows of keys."""
        self._kept[0].erase(keys)

    def _admitted(self, entries: np.ndarray) -> np.ndarray:
        """Which keys get a row if they have none."""
        if self._admission is None:
            return np.ones(len(entries), bool)
        if isinstance(self._admission, AdmitAfter):
            return entries["requests"] >= self._admission.requests
        words = words_of_keys(entries["key"])
        now, one = jnp.uint32(self.clock & 0xFFFFFFFF), jnp.uint32(1)
        first, second = threefry(*self._seed, now, one)
        bits, _ = threefry(first, second, words[:, 0], words[:, 1])
        return np.asarray(bits) <= max(int(self._admission.probability * 2**32) - 1, 0)

    def _oldest(self, more: int, keys: np.ndarray) -> np.ndarray:
        """The entries of waiting keys to forget where so many come; not of the batch itself."""
        waiting = self._kept[1]
        excess = len(waiting) + more - self._most
        if not more or excess <= 0:
            return np.zeros(0, LIFE)
        entries = waiting.all()
        entries = np.sort(entries[~np.isin(entries["key"], keys)], order=["touched", "key"])
        return entries[: max(excess, self._most // 8)]
