"""`StoreIndex`: the blocks of the last commit of a store, in a file that is replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_tt._tiers.block_file import Extent
from jax_tt._tiers.row_bytes import checksum

_BEGIN, _VERSION = b"jax_tt store\n", 5
# The table, the number, the offset, the length and the checksum of a block.
Block = tuple[str, int, int, int, int]


class DamagedIndexError(Exception):
    """The file is not one that was written."""


class Committed(NamedTuple):
    """The last commit.

    Attributes:
        blocks: in ascending order.
        ends: the number of the next block, by table.
        gone: keys uint64 that were removed, whose records in the blocks do not count, by table.
        saved: other bytes; None before the first commit.
        number: of the commit, from 1; 0 before the first one.
        other: how the description of the records differs from the expected one, if it does.
    """

    blocks: list[Block]
    ends: dict[str, int]
    gone: dict[str, np.ndarray]
    saved: bytes | None
    number: int = 0
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
        self.about = json.dumps({**about, "version": _VERSION}, sort_keys=True)

    def read(self) -> Committed:
        """Reads the last commit; of a new store, writes and reads an empty one.

        Raises:
            DamagedIndexError: the file is damaged, or it is missing although there are blocks.
            OSError: the file cannot be read.
        """
        if not (self._path / "index").exists():
            if (self._path / "blocks").exists():
                raise DamagedIndexError("its index is missing")
            self.prepare([], {}, {}, None, 0)
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
        data = (self._path / name).read_bytes()
        if not data.startswith(_BEGIN):
            raise DamagedIndexError(
                "or another program wrote it: its index begins with other bytes"
            )
        begin = len(_BEGIN)
        expected, rest = int.from_bytes(data[begin : begin + 8], "little"), data[begin + 8 :]
        if checksum(rest) != expected:
            raise DamagedIndexError("its index does not have its checksum")
        size = int.from_bytes(rest[:8], "little")
        about, end = json.loads(rest[8 : 8 + size]), 8 + size
        if about["about"] != self.about:
            differences = _differences(json.loads(about["about"]), json.loads(self.about))
            return Committed([], {}, {}, None, other="; ".join(differences))
        gone = {}
        for table, count in about["gone"].items():
            gone[table] = np.frombuffer(rest, np.uint64, count, end)
            end += 8 * count
        blocks = [tuple(block) for block in about["blocks"]]
        saved = rest[end:] if about["saved"] else None
        return Committed(blocks, about["ends"], gone, saved, about.get("number", 0))

    def prepare(
        self,
        blocks: Sequence[Block],
        ends: dict[str, int],
        gone: dict[str, np.ndarray],
        saved: bytes | None,
        number: int,
    ) -> None:
        """Writes the commit of this number beside the last one, which remains.

        Raises:
            OSError: the file cannot be written.
        """
        about = {"about": self.about, "blocks": blocks, "ends": ends, "saved": saved is not None}
        about["number"] = number
        about["gone"] = {table: len(keys) for table, keys in gone.items()}
        described = json.dumps(about).encode()
        keys = b"".join(keys.tobytes() for keys in gone.values())
        rest = len(described).to_bytes(8, "little") + described + keys + (saved or b"")
        new = self._path / "index.new"
        try:
            with open(new, "wb") as file:
                file.write(_BEGIN + checksum(rest).to_bytes(8, "little") + rest)
                file.flush()
                os.fsync(file.fileno())
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
