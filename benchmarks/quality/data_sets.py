"""Folders of interaction files, and train items that are held out to choose settings."""

from pathlib import Path

import numpy as np

from examples.retrieval.data import TEST, TRAIN, Interactions


def data_sets(folder: Path) -> dict[str, tuple[Path, Path | None]]:
    """The data sets of a folder by name: (train file, test file or None).

    `<name>_train.*` with `<name>_test.*` is one with a given split; every other text file is a log of pairs in time
    order, of which `load` leaves out each user's last item.

    Raises:
        ValueError: there is none.
    """
    files = sorted(path for path in folder.glob("*") if _is_text(path))
    found: dict[str, tuple[Path, Path | None]] = {}
    for path in files:
        name = path.name.split(".")[0]
        if name.endswith(TRAIN):
            test = path.with_name(path.name.replace(TRAIN, TEST))
            found[name.removesuffix(TRAIN)] = (path, test if test in files else None)
        elif path.with_name(path.name.replace(TEST, TRAIN)) not in files or TEST not in name:
            found[name] = (path, None)
    if not found:
        raise ValueError(
            f"data: got the folder {folder} without a file .txt, .txt.gz or .txt.xz; expected interaction files."
        )
    return found


def hold_out(data: Interactions, fraction: float, seed: int = 0) -> Interactions:
    """Replaces the test set by the last part of each user's train items, to tune on without seeing the test set.

    Files list a user's items in time order or close to it, and test items come last: random ones would be easier. The
    part is rounded up or down at random, so that it is right on average for users with few items.
    """
    users, items = data.train_users, data.train_items
    length = np.bincount(users, minlength=data.num_users)
    place = np.arange(len(users)) - (np.cumsum(length) - length)[users]
    part = np.floor(fraction * length + np.random.default_rng(seed).random(len(length)))
    held = place >= (length - part)[users]
    return Interactions(
        users[~held], items[~held], users[held], items[held], data.num_users, data.num_items
    )


def _is_text(path: Path) -> bool:
    return ".txt" in (path.suffix, path.with_suffix("").suffix) and path.is_file()
