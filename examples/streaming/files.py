"""Interaction files as a stream of clicks: ids are any strings, hashed to 64 bits.

Two layouts are understood, plain, .gz or .xz, words separated by white space:

* "pairs": one line per interaction, `user item`, in the order of time;
* "lists": one line per user, `user item item ...`, in the user's order. There are no times, so the interactions of each
  user are spread evenly over the stream: the k-th of n comes at (k + u) / n, with a random u for each user.

Files have no items that were shown and not clicked. Half of every batch are interactions, and the other half the same
users with random items of that time, each of those that occur within 50 batches before and after with the same
probability.
"""

import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import jax_tt
from examples.streaming.clicks import Clicks

# Batches before and after, whose items may be those that are not clicked.
_NEAR = 50


class Interactions:
    """The stream of a file.

    Args:
        path: of the file.
        batch_size: examples of a batch, an even number; half of them are interactions.
        seed: of the items that were not clicked, and of the order of lists.
        steps: at most so many batches; None for all.

    Raises:
        ValueError: a line has less than two words, or there are less interactions than one batch needs.
    """

    def __init__(self, path: Path, batch_size: int, seed: int = 0, steps: int | None = None):
        if batch_size % 2:
            raise ValueError(f"batch_size: got {batch_size}; expected an even number.")
        users, items = _read(path, seed)
        self._half, self._seed = batch_size // 2, seed
        self.steps = min(len(users) // self._half, steps or len(users))
        if not self.steps:
            raise ValueError(
                f"{path}: got {len(users)} interactions; expected at least {self._half}, half of a batch."
            )
        # The kind of an id is a part of it, so that user "7" and item "7" are different ids.
        last = self.steps * self._half
        self._users = jax_tt.dynamic.hash_ids("user", users[:last])
        self._items = jax_tt.dynamic.hash_ids("item", items[:last])

    def batches(self, first: int = 0) -> Iterator[Clicks]:
        return (self.batch(step) for step in range(first, self.steps))

    def batch(self, step: int) -> Clicks:
        """The batch of one step."""
        own = slice(step * self._half, (step + 1) * self._half)
        users, items = self._users[own], self._items[own]
        first, last = max(0, step - _NEAR) * self._half, (step + 1 + _NEAR) * self._half
        draw = np.random.default_rng([self._seed, step])
        others = draw.choice(np.unique(self._items[first:last]), self._half)
        ids = {"user": np.tile(users, 2), "item": np.concatenate([items, others])}
        return Clicks(ids, np.repeat([1, 0], self._half).astype(np.float32), None)


def _read(path: Path, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Users and items of all interactions in their order, arrays of strings."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rt") as file:
        lines = [words for line in file if (words := line.split())]
    for number, words in enumerate(lines, 1):
        if len(words) < 2:
            raise ValueError(
                f"{path}: got {' '.join(words)!r} in its non-empty line {number}; expected 'user item ...'."
            )
    counts = np.array([len(words) - 1 for words in lines], np.int64)
    users = np.repeat(np.array([words[0] for words in lines], object), counts)
    items = np.array([word for words in lines for word in words[1:]], object)
    if np.all(counts == 1):
        return users, items
    place = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.random.default_rng(seed).random(len(lines))
    order = np.argsort((place + np.repeat(start, counts)) / np.repeat(counts, counts))
    return users[order], items[order]
