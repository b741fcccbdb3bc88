"""`StoreIndex`: the blocks of the last commit of a store, in a file that is replaced as a whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_tt._formats.container import Container, Place, in_places, named, read_container
from jax_tt._formats.output import flush
from jax_tt._formats.stored import FileError
from jax_tt._tiers.block_file import Extent

_KIND, _VERSION = "store", 6
# What the index of an earlier version begins with.
_EARLIER = b"jax_tt store"
# The table, the number, the offset, the length and the checksum of a block.
Block = tuple[str, int, int, int, int]
# Arrays by names, which may stand in mappings of other names.
Tree = Mapping[str, Any]


class DamagedIndexError(Exception):
    """The file is not one that was written."""


class Committed(NamedTuple):
    """The last commit.

    Attributes:
        blocks: in ascending order.
        ends: the number of the next block, by table.
        gone: keys uint64 that were removed, whose records in the blocks do not count, by table.
        number: of the commit, from 1; 0 before the first one.
        saved: other arrays.
        other: how the description of the records differs from the expected one, if it does.
    """

    blocks: list[Block]
    ends: dict[str, int]
    gone: dict[str, np.ndarray]
    number: int
    saved: Tree
    other: str | None = None

    @property
    def extents(self) -> list[Extent]:
        return [Extent(offset, length) for _, _, offset, length, _ in self.blocks]


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """What differs in two descriptions, by the names of their entries."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        if there != here:
            yield f"{name}: got {_described(here)}, and {_described(there)} was written"
        return
    for key in sorted(there.keys() | here.keys()):
        yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)


def _described(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


class StoreIndex:
    """The file of a store that says which blocks belong to it.

    Args:
        path: of the directory.
        about: description of the records.
    """

    def __init__(self, path: Path, about: Any):
        self._path = path
        # As it is read.
        self._about = json.loads(json.dumps({**about, "version": _VERSION}))

    def is_of_earlier_version(self) -> bool:
        """Whether an earlier version of this package wrote the directory.

        Raises:
            OSError: a file cannot be read.
        """
        if (self._path / "data.mdb").exists():
            return True
        with contextlib.suppress(FileNotFoundError), open(self._path / "index", "rb") as file:
            return file.read(len(_EARLIER)) == _EARLIER
        return False

    def read(self) -> Committed:
        """Reads the last commit; of a new store, writes and reads an empty one.

        Raises:
            DamagedIndexError: the file is damaged, or it is missing although there are blocks.
            OSError: the file cannot be read.
        """
        if not (self._path / "index").exists():
            if (self._path / "blocks").exists():
                raise DamagedIndexError("its index is missing")
            self.prepare([], {}, {}, {}, 0)
            self.publish()
        return self.last()

    def prepared(self) -> int:
        """The number of the commit that was prepared last; 0 if it is not complete, or there is none."""
        try:
            return self._read("index.new").number
        except (FileNotFoundError, DamagedIndexError):
            return 0

    def last(self) -> Committed:
        """Reads the last commit, which must be there."""
        return self._read("index")

    def _read(self, name: str) -> Committed:
        try:
            stored = read_container(str(self._path / name), _KIND)
            about = stored.notes
            if about["about"] != self._about:
                differences = "; ".join(_differences(about["about"], self._about))
                return Committed([], {}, {}, 0, {}, differences)
            tree = in_places(stored, lambda name: stored[name].read())
        except FileError as error:
            raise DamagedIndexError(
                f"or another program wrote it: {str(error).removesuffix('.')}"
            ) from error
        blocks, gone, saved = (tree.get(part, {}) for part in ("blocks", "gone", "saved"))
        each = [(table, *numbers) for table in blocks for numbers in blocks[table].tolist()]
        return Committed(each, about["ends"], gone, about["number"], saved)

    def prepare(
        self,
        blocks: Sequence[Block],
        ends: dict[str, int],
        gone: dict[str, np.ndarray],
        saved: Tree,
        number: int,
    ) -> None:
        """Writes the commit of this number beside the last one, which remains; its blocks are in ascending order.

        Raises:
            OSError: the file cannot be written.
        """
        of_table = {
            table: np.array([block[1:] for block in some], np.uint64)
            for table, some in itertools.groupby(blocks, key=lambda block: block[0])
        }
        arrays, places = named(_leaves({"blocks": of_table, "gone": gone, "saved": saved}))
        notes = {"about": self._about, "ends": ends, "number": number, **places}
        new = self._path / "index.new"
        try:
            Container(_KIND, arrays, notes).write(str(new))
            flush(str(new))
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise

    def publish(self) -> None:
        """Makes the commit that was prepared the last one; whatever happens, the last one is the old or the new one.

        Raises:
            OSError: the file cannot be renamed.
        """
        os.replace(self._path / "index.new", self._path / "index")
        self.sync()

    def drop(self) -> None:
        """Removes the commit that was prepared.

        Raises:
            OSError: the file cannot be removed.
        """
        (self._path / "index.new").unlink(missing_ok=True)
        self.sync()

    def sync(self) -> None:
        """Waits until the names of the files are on the disk."""
        directory = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _leaves(tree: Tree, place: Place = ()) -> Iterable[tuple[Place, Any]]:
    for name, inner in tree.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, (*place, name))
        else:
            yield (*place, name), inner
