"""What dumps of tables of all kinds have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jax_tt._base.arguments import as_positive
from jax_tt._base.progress import Progress
from jax_tt._formats.dump import DUMP, write_dump
from jax_tt._formats.output import check_output
from jax_tt._formats.team import Team


class Loaded(NamedTuple):
    """What `load_dump` did.

    Attributes:
        rows: number of rows that were loaded.
        others: keys of the dump that are no row of a dense table; 0 for hash tables, which take any key.
        evicted: keys that a hash table had or the dump brought, and that are not in it: those that found no room, and
            those that have left it, as a dump of changes says.
        forgotten: keys that waited for admission, and whose counts found no room.

    >>> import jax_tt
    >>> jax_tt.files.Loaded(rows=5).evicted
    0
    """

    rows: int
    others: int = 0
    evicted: int = 0
    forgotten: int = 0


class Content(NamedTuple):
    """What is written of a table.

    Attributes:
        features: columns of a row.
        of_keys: for every key uint64 ``[n]``, by the names ``key``, ``score``, ``touched`` and, of hash tables,
            ``slot``.
        dtypes: the type of every array of rows, by name.
        entries: returns the rows of these arrays for a range of the keys, by name.
        rest: arrays that do not belong to single keys; read after the last row.
        about: what the description says beside sizes and types.
        processes: the process that writes each key, in ascending order; None for one that writes all.
    """

    features: int
    of_keys: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]
    entries: Callable[[slice], Mapping[str, np.ndarray]]
    rest: Mapping[str, Any]
    about: Mapping[str, Any]
    processes: np.ndarray | None = None


class Target(NamedTuple):
    """Where and how a dump is written; the fields are arguments of `files.dump`."""

    path: str | os.PathLike[str]
    rows_per_file: int
    progress: bool
    overwrite: bool

    def check(self, *others: str | os.PathLike[str]) -> None:
        """Raises unless a dump can be written there that is none of the others."""
        as_positive("rows_per_file", self.rows_per_file)
        check_output(
            self.path, overwrite=self.overwrite, directory=True, contents=DUMP, others=list(others)
        )

    def write(self, content: Content, team: Team | None = None) -> int:
        """Writes a dump, with all processes of a team. Returns the number of keys."""
        team, count = team or Team(), len(content.of_keys["key"])
        parts = [
            partial(_part, content, rows) if team.writes(process) else None
            for process, rows in _ranges(content.processes, count, self.rows_per_file)
        ]
        about = {"features": content.features, "arrays": dict(content.dtypes), **content.about}
        with Progress(self.progress, "dump", sum(part is not None for part in parts)) as bar:
            write_dump(
                self.path,
                parts,
                content.rest,
                {**about, "keys": count},
                bar,
                overwrite=self.overwrite,
                team=team,
            )
        return count


def _part(content: Content, rows: slice) -> dict[str, np.ndarray]:
    of_keys = {name: np.ascontiguousarray(array[rows]) for name, array in content.of_keys.items()}
    return {**of_keys, **content.entries(rows)}


def _ranges(
    processes: np.ndarray | None, count: int, size: int
) -> Iterator[tuple[int | None, slice]]:
    """The ranges of keys of all files, with the process that writes each."""
    if processes is None:
        runs: list[tuple[int | None, int]] = [(None, count)]
    else:
        last = np.unique(processes)
        runs = list(zip(last.tolist(), np.searchsorted(processes, last, "right"), strict=True))
    stop = 0
    for process, end in runs:
        start, stop = stop, int(end)
        for first in range(start, stop, size):
            yield process, slice(first, min(first + size, stop))
