"""Interaction files: reading, splitting, and a small synthetic one for a machine without data.

Two layouts are understood, plain, .gz or .xz:

* "lists": one line per user, `user item item ...`; a second file of the same layout holds the test items;
* "pairs": one line per interaction, `user item`, in time order; each user's last item is the test item.

Ids are any non-negative integers below 2**63. They are renumbered 0, 1, 2, ... in increasing order, which keeps the
order of the file's ids: neighbouring ids share the digits of a tensor-train table, so the order matters there.
"""

import gzip
import lzma
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRAIN, TEST = "_train", "_test"


@dataclass(frozen=True)
class Interactions:
    """Train and test interactions with dense ids; every array is int32 and sorted by user.

    Attributes:
        train_users, train_items: [n] pairs, each once, in the order of the file within a user.
        test_users, test_items: [m] pairs, none of which is a train pair.
        num_users, num_items: ids lie below these.
    """

    train_users: np.ndarray
    train_items: np.ndarray
    test_users: np.ndarray
    test_items: np.ndarray
    num_users: int
    num_items: int

    def checksum(self) -> int:
        """A number that differs, almost surely, for other interactions."""
        arrays = (self.train_users, self.train_items, self.test_users, self.test_items)
        return zlib.crc32(b"".join(array.tobytes() for array in arrays))

    def __str__(self) -> str:
        return (
            f"{self.num_users:,} users, {self.num_items:,} items, {len(self.train_users):,} train "
            f"and {len(self.test_users):,} test interactions"
        )


def load(path: str | Path, test: str | Path | None = None, layout: str = "auto") -> Interactions:
    """Reads interactions.

    Args:
        path: a file, or a directory with one pair of files `<name>_train.*`, `<name>_test.*`.
        test: the file of test items; without one the last item of each user with two or more is the test item.
        layout: "lists", "pairs", or "auto": pairs if every line has exactly two ids.

    Raises:
        ValueError: a line is not made of integers, a user has no item, or the directory holds no single pair.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        if test is not None:
            raise ValueError(f"test: got {test} beside the directory {path}; give the train file.")
        path, test = _pair_in(path)
    users, items, layout = _read(path, layout)
    if test is None:
        users, items = _first_of_each(users, items)
        last = _last_of_each_user(users)
        train, held = (users[~last], items[~last]), (users[last], items[last])
    else:
        train, held = (users, items), _read(Path(test), layout)[:2]
    return _renumber(train, held)


def write_synthetic(
    path: str | Path, num_users: int = 2000, num_items: int = 800, groups: int = 20, seed: int = 0
) -> None:
    """Writes a pairs file in which users of a group mostly take items of that group, the popular ones more often."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(num_users), rng.integers(5, 25, num_users))
    likes = rng.random(len(users)) < 0.9
    group = np.where(likes, users % groups, rng.integers(0, groups, len(users)))
    rank = (num_items // groups * rng.random(len(users)) ** 2).astype(np.int64)
    order = rng.permutation(len(users))  # time mixes the users
    lines = np.stack([users, group * (num_items // groups) + rank], 1)[order]
    with _open(Path(path), "wt") as file:
        file.writelines(f"{user} {item}\n" for user, item in lines)


def _open(path: Path, mode: str):
    return {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)(path, mode)


def _pair_in(folder: Path) -> tuple[Path, Path]:
    pairs = [
        (train, test)
        for train in sorted(folder.glob(f"*{TRAIN}.*"))
        if (test := train.with_name(train.name.replace(TRAIN, TEST))).is_file()
    ]
    if len(pairs) != 1:
        raise ValueError(
            f"data: got the directory {folder} with {len(pairs)} pairs of files <name>{TRAIN}.*, <name>{TEST}.*; "
            f"expected one. Give the files themselves: --data TRAIN [--test TEST]."
        )
    return pairs[0]


def _read(path: Path, layout: str) -> tuple[np.ndarray, np.ndarray, str]:
    """All interactions of a file as users[n], items[n] (int64), and the layout it turned out to have."""
    if layout not in ("auto", "lists", "pairs"):
        raise ValueError(f"layout: got {layout!r}; expected 'auto', 'lists' or 'pairs'.")
    with _open(path, "rt") as file:
        lines = [words for line in file if (words := line.split())]
    for n, words in enumerate(lines, 1):
        if not all(word.isdecimal() and int(word) < 2**63 for word in words):
            raise ValueError(
                f"{path}: got {' '.join(words[:5])!r} in its non-empty line {n}; expected integers in [0, 2**63)."
            )
    ids = np.array([int(word) for words in lines for word in words], np.int64)
    length = np.array([len(words) for words in lines], np.int64)
    if layout == "auto":
        layout = "pairs" if np.all(length == 2) else "lists"
    if layout == "pairs" and not np.all(length == 2):
        bad = lines[int(np.argmax(length != 2))]
        raise ValueError(
            f"{path}: got the line {' '.join(bad[:5])!r}; expected 'user item' (layout='pairs')."
        )
    starts = np.cumsum(length) - length
    is_item = np.ones(len(ids), bool)
    is_item[starts] = False
    return np.repeat(ids[starts], length - 1), ids[is_item], layout


def _first_of_each(users: np.ndarray, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drops repeated pairs and sorts by user, keeping the order of the file within a user."""
    order = np.lexsort((np.arange(len(users)), items, users))
    u, i = users[order], items[order]
    fresh = np.ones(len(u), bool)
    fresh[1:] = (u[1:] != u[:-1]) | (i[1:] != i[:-1])
    kept = np.sort(order[fresh])
    kept = kept[np.argsort(users[kept], kind="stable")]
    return users[kept], items[kept]


def _last_of_each_user(users: np.ndarray) -> np.ndarray:
    """Marks the last entry of every user who has two or more; `users` is sorted."""
    last, first = np.diff(users, append=-1) != 0, np.diff(users, prepend=-1) != 0
    return last & ~first


def _renumber(
    train: tuple[np.ndarray, np.ndarray], held: tuple[np.ndarray, np.ndarray]
) -> Interactions:
    """Interactions with dense ids; test pairs that are train pairs are dropped, as they can never be recommended."""
    train, held = _first_of_each(*train), _first_of_each(*held)
    user_ids = np.unique(np.concatenate([train[0], held[0]]))
    item_ids = np.unique(np.concatenate([train[1], held[1]]))
    if len(train[0]) == 0:
        raise ValueError("data: got no train interactions; expected at least one.")
    users, items = np.searchsorted(user_ids, train[0]), np.searchsorted(item_ids, train[1])
    test_users, test_items = np.searchsorted(user_ids, held[0]), np.searchsorted(item_ids, held[1])
    pair = lambda u, i: u * len(item_ids) + i  # noqa: E731
    new = ~np.isin(pair(test_users, test_items), pair(users, items))
    users, items, test_users, test_items = (
        ids.astype(np.int32) for ids in (users, items, test_users[new], test_items[new])
    )
    return Interactions(users, items, test_users, test_items, len(user_ids), len(item_ids))
