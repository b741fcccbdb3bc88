"""`Processes`: the processes over whose devices tables with tiers are sharded, and the rows that each of them keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_tt._base.arguments import mismatch
from jax_tt._base.words import mix_wide
from jax_tt._formats.stored import FileError
from jax_tt._formats.team import Team
from jax_tt._table.wrapper import is_sharded
from jax_tt._tiers.device_rows import on_device
from jax_tt._tiers.disk import StoreError
from jax_tt._tiers.places import rounded_up

# Words that are added at once.
_CHUNK = 1 << 20


class Processes(Team):
    """A row that is not on a device is kept by the process that a hash of its key says.

    All processes make the same calls in the same order, each in its main thread.
    """

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> Processes:
        """The processes of tables with tiers.

        Raises:
            ValueError: the tables are on devices of different processes.
        """
        devices = {
            k: set(table.mesh.devices.flat) for k, table in tables.items() if is_sharded(table)
        }
        processes = {
            name: {device.process_index for device in devices.get(name, ())}
            or {jax.process_index()}
            for name in tables
        }
        (first, expected), *others = processes.items()
        for name, given in others:
            if given != expected:
                own = f"{first!r} on devices of the processes {sorted(expected)}"
                got = f"{own}, and {name!r} on devices of {sorted(given)}"
                fix = "Shard both over one mesh, or give each its Tiers."
                raise mismatch("tiers", got, "the same processes", fix)
        return cls(set().union(*devices.values()))

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """What is done in it waits for no other process: its programs run on one device of this one."""
        if self.alone:
            return contextlib.nullcontext()
        here = [one for one in self._devices if one.process_index == jax.process_index()]
        return on_device(here[0])

    @contextlib.contextmanager
    def together(self, path: Any, kind: type[Exception] = FileError) -> Iterator[None]:
        with super().together(path, kind), self.apart():
            yield

    def owners(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of the processes that keep the rows of keys uint64 ``[n]``."""
        if self.alone:
            return np.zeros(len(keys), np.int64)
        return (mix_wide(keys) % np.uint64(self.count)).astype(np.int64)

    def numbered(self, numbers: np.ndarray) -> np.ndarray:
        """`jax.process_index` of processes, by their numbers here."""
        return np.array(self._processes or [jax.process_index()])[numbers]

    def owns(self, keys: np.ndarray) -> np.ndarray:
        """Whether this process keeps the row of each key, bool ``[n]``."""
        return self.owners(keys) == self.number

    def merged(self, array: np.ndarray) -> np.ndarray:
        """The array of which each process has some entries, bit for bit, and zeros in place of all others."""
        if self.alone:
            return array
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        words = np.zeros(-(-len(data) // 4), np.uint32)
        words.view(np.uint8)[: len(data)] = data
        for first in range(0, len(words), _CHUNK):
            part = words[first : first + _CHUNK]
            given = np.zeros(rounded_up(len(part), 64), np.uint32)
            given[: len(part)] = part
            part[:] = self.summed(given)[: len(part)]
        return words.view(np.uint8)[: len(data)].view(array.dtype).reshape(array.shape)

    def joined(self, array: np.ndarray) -> np.ndarray:
        """The entries ``[n, ...]`` of all processes, one process after the other."""
        if self.alone:
            return array
        counts = self.of_each(np.array([len(array)], np.uint32))[:, 0].astype(np.int64)
        first = int(counts[: self.number].sum())
        whole = np.zeros((int(counts.sum()), *array.shape[1:]), array.dtype)
        whole[first : first + len(array)] = array
        return self.merged(whole)

    def total(self, counts: Sequence[int]) -> list[int]:
        """The sum over all processes of each count, of 64 bits."""
        if self.alone:
            return list(counts)
        words = self.of_each(np.array(counts, np.uint64).view(np.uint32))
        return np.ascontiguousarray(words).view(np.uint64).sum(axis=0).tolist()

    def directory(self, path: Path) -> Path:
        """The directory of this process within the one of tiers.

        Raises:
            StoreError: another number of processes has written there, or others of them on this disk.
        """
        parts = [name.name.rpartition("-of-")[2] for name in path.glob("process-*-of-*")]
        written = {int(count) for count in parts if count.isdigit()}
        if (path / "index").exists():
            written.add(1)
        if other := written - {self.count}:
            raise StoreError(
                f"{path}: was written by {min(other)} processes; expected {self.count}, as many as the devices of the "
                f"tables belong to. Start {min(other)}, or write a dump there (Tiers.dump), and read it with "
                "Tiers.load_dump, which takes any number of processes, into another directory."
            )
        if self.alone:
            return path
        own = path / f"process-{self.number}-of-{self.count}"
        there = [file.parent for file in path.glob("process-*-of-*/blocks") if file.stat().st_size]
        if there and not (own / "index").exists():
            raise StoreError(
                f"{own}: is missing, and {there[0].name} is there; expected the directory of this process. Start the "
                "processes on the hosts where they were, or move the directories."
            )
        return own
