"""`DiskStore`: records by key in a file of blocks, committed together."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jax_tt._base.arguments import mismatch
from jax_tt._formats.team import Team
from jax_tt._tiers.block_file import BlockFile, Extent
from jax_tt._tiers.map_reader import MapReader, UnreadableError
from jax_tt._tiers.record_log import BLOCK_BYTES, DamagedBlockError, RecordLog
from jax_tt._tiers.store_index import (
    Block,
    Committed,
    DamagedIndexError,
    StoreIndex,
    Tree,
)

# Blocks that wait to be written, and blocks that are handed on together.
_PENDING, _TOGETHER = 16, 16


class StoreError(Exception):
    """A store cannot be opened, read or written.

    >>> import jax_tt, tempfile
    >>> table = jax_tt.dense_table(64, 8, optimizer=jax_tt.optimizers.SGD(0.1), takes_slots=True)
    >>> collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    >>> sizes, path = {"item": jax_tt.Tier(host_rows=64)}, tempfile.mkdtemp()
    >>> with jax_tt.Tiers(collection, sizes, path=path) as tiers:
    ...     try:
    ...         jax_tt.Tiers(collection, sizes, path=path)
    ...     except jax_tt.files.StoreError as error:
    ...         print(str(error).partition(": ")[2].partition(";")[0])
    is open in another process or store
    """


class UnwrittenError(StoreError):
    """Something could not be written. Nothing is lost, and the call may be repeated once it can."""


class DiskStore:
    """Records of several tables by 64-bit key, in one directory.

    Records are stored in blocks, see `RecordLog`; a block is a part of one file and does not move. Which blocks belong
    to the last commit is in another, small file, which is replaced as a whole. Records written after the last `commit`
    are gone if the process dies. All bytes have checksums, which are compared when the store is opened and whenever
    records are read. Blocks are written in a thread of the store while the caller goes on. One that cannot be written,
    since the disk is full, stays in memory: records can be read, and `put`, `erase` and `commit` write it first, or
    raise an `UnwrittenError` before they do anything that a repeated call would not do. After other errors every call
    raises, and nothing is committed until the store is opened again.

    The stores of several processes commit together. Each writes its index beside the last one, and none replaces its
    own before all have written theirs. So if one dies, all of them open the last commit, or all the one after it.

    Args:
        path: directory, which is created if it does not exist.
        sizes: bytes of a record, by table.
        about: description of the records; a store is opened again only with the same one.
        team: the processes that open stores and commit together, each in a directory of its own; None for one alone.

    Raises:
        StoreError: the directory cannot be written, another process or store has it open, or it holds other records.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sizes: Mapping[str, int],
        about: Any,
        team: Team | None = None,
    ):
        self.path, self._sizes, self._team = Path(path), dict(sizes), team or Team()
        described = {"about": about, "bytes of a block": BLOCK_BYTES, "bytes of a record": sizes}
        self._index = StoreIndex(self.path, described)
        self._lock = -1
        self._thread = ThreadPoolExecutor(1, "jax_tt_disk")
        self._pending: collections.deque[Future[None]] = collections.deque()
        self._failed = ""
        # Blocks that could not be written, with the error.
        self._unwritten: dict[tuple[str, int], OSError] = {}
        # Held by whoever hands work to the thread; reading records needs only the other one, which guards the logs:
        # their blocks move to the memory of the file once they are written.
        self._writing, self._guard = threading.Lock(), threading.Lock()
        # Where blocks are in the file, and which of them the last committed state has.
        self._extents: dict[tuple[str, int], Extent] = {}
        self._saved: set[tuple[str, int]] = set()
        self._file: Any = None
        # Of the last commit.
        self._number = 0
        try:
            with self._together():
                self._lock = _locked(self.path)
            if not self._team.alone:
                self._settle()
            with self._together():
                self._open()
        except BaseException:
            self._thread.shutdown()
            if self._file is not None:
                self._file.close()
            if self._lock >= 0:
                _unlock(self._lock)
            raise

    def get(
        self, table: str, keys: np.ndarray, take: Callable[[np.ndarray, np.ndarray], None]
    ) -> np.ndarray:
        """Finds the records of keys uint64 ``[n]``; returns whether each of them is there, bool ``[n]``.

        ``take`` is called with the addresses of the records on disk and the positions of their keys.
        """
        with self._guard, self._intact():
            self._check()
            places = self._logs[table].find(keys)
            there = places >= 0
            positions = np.flatnonzero(there)
            for part, records in self._logs[table].read(places[there]):
                take(records, positions[part])
        return there

    def put(self, table: str, keys: np.ndarray, records: np.ndarray) -> None:
        """Writes records of distinct keys, given by their addresses."""
        with self._writing:
            self._check()
            with self._whole(), self._intact():
                step = _TOGETHER * self._logs[table].rows
                for first in range(0, len(keys), step):
                    self._resume()
                    part = slice(first, first + step)
                    with self._guard:
                        full = self._logs[table].append(keys[part], records[part])
                    self._write_blocks(table, full)

    def erase(self, table: str, keys: np.ndarray) -> None:
        """Removes the records of distinct keys."""
        with self._writing:
            self._check()
            with self._whole(), self._intact():
                step = _TOGETHER * self._logs[table].rows
                for first in range(0, len(keys), step):
                    self._resume()
                    with self._guard:
                        full = self._logs[table].erase(keys[first : first + step])
                    self._write_blocks(table, full)

    def keys(self, table: str) -> np.ndarray:
        """The keys of all records of a table, uint64 in ascending order."""
        with self._guard, self._intact():
            self._check()
            return self._logs[table].keys()

    def saved(self) -> Tree | None:
        """The other arrays of the last `commit`; None before the first one."""
        with self._guard, self._readable():
            self._check()
            last = self._index.last()
            return last.saved if last.number else None

    def commit(self, saved: Tree) -> None:
        """Makes everything written so far permanent, together with other arrays."""
        with self._writing:
            # Where another process cannot write, this one may repeat the call as well.
            with self._together(), self._whole(), self._intact():
                self._check()
                self._resume()
                for table, log in self._logs.items():
                    with self._guard:
                        last = log.seal()
                    self._write_blocks(table, last)
                self._wait(0)
                self._resume()
                self._check()
                blocks = self._thread.submit(self._noting, self._prepare, saved).result()
            with self._whole(), self._intact(), self._together():
                self._thread.submit(self._noting, self._publish, blocks).result()

    def close(self) -> None:
        """Closes the store without a commit."""
        with self._writing:
            if self._lock < 0:
                return
            with self._guard:  # whoever reads a record has read it
                lock, self._lock = self._lock, -1
            try:
                self._thread.submit(self._file.close).result()
            finally:
                try:
                    self._thread.shutdown()
                finally:  # an interrupt must not leave the directory locked
                    _unlock(lock)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return self._team.together(self.path, StoreError)

    def _settle(self) -> None:
        """Completes the commit that was prepared last, if every process has prepared it, or drops it."""
        with self._together(), self._readable():
            here = self._committed().number, self._index.prepared()
        numbers = self._team.of_each(np.array(here, np.uint32))
        common = numbers.max(axis=1).min()
        lacks = (numbers != common).all(axis=1)
        if lacks.any():
            own = f"save {int(numbers[lacks, 0][0])} in {self._team.named(lacks)}"
            fix = "Use copies of the directories of all processes that were made at one time."
            raise mismatch(self.path, f"{own}, {common} in others", "the same", fix, StoreError)
        with self._together(), self._readable():
            if here[0] < common:
                self._index.publish()
            else:
                self._index.drop()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """After an interrupt in here not all blocks were handed on, so that nothing may be committed any more."""
        try:
            yield
        except UnwrittenError:
            raise
        except BaseException as error:
            self._failed = self._failed or self._advice(error)
            raise

    @contextlib.contextmanager
    def _intact(self) -> Iterator[None]:
        """Raises a `StoreError` for damaged bytes."""
        try:
            yield
        except (DamagedBlockError, DamagedIndexError, UnreadableError) as error:
            raise StoreError(
                f"{self.path}: is damaged, {error}. Use a copy of the directory."
            ) from error

    def _write_blocks(self, table: str, numbers: list[int]) -> None:
        for number in numbers:
            self._wait(_PENDING - 1)
            self._pending.append(
                self._thread.submit(self._noting, self._write_block, table, number)
            )

    def _check(self) -> None:
        """Raises if records can no longer be read and written."""
        if self._lock < 0:
            raise StoreError(f"{self.path}: the store is closed.")
        if self._failed:
            raise StoreError(self._failed)

    def _resume(self) -> None:
        """Writes the blocks that could not be written."""
        if not self._unwritten:
            return
        self._wait(0)
        for name in list(self._unwritten):
            self._thread.submit(self._noting, self._write_block, *name).result()
            if error := self._unwritten.get(name):
                raise self._unwritten_error(error) from error

    def _unwritten_error(self, error: OSError) -> UnwrittenError:
        """What to say where something cannot be written, and what is true of the last commit."""
        try:
            number = self._index.last().number
            there = number == self._number and self._file.is_at(self.path / "blocks")
        except (OSError, DamagedIndexError):
            there = False
        if there:
            advice = (
                "The last committed state is intact, and nothing is lost; free space or make the directory writable, "
                "and call this again."
            )
        else:
            advice = (
                "The directory has been removed or replaced, and the last committed state with it; rows can still be "
                "read here: write them to a dump, and open the store in another directory."
            )
        return UnwrittenError(f"{self.path}: {error.strerror}. {advice}")

    def _wait(self, most: int) -> None:
        """Waits until at most so many writes are pending."""
        while len(self._pending) > most:
            self._pending[0].result()
            self._pending.popleft()

    def _advice(self, error: BaseException) -> str:
        what = str(error) if isinstance(error, StoreError) else f"{self.path}: {error!r}."
        return f"{what} Open the store again."

    def _open(self) -> None:
        """Reads the blocks of the last commit; the room of later ones is free."""
        with self._readable():
            committed = self._committed()
            self._number = committed.number
            file = self._file = BlockFile(self.path / "blocks", committed.extents)
            reader = MapReader()
            self._logs = {
                table: RecordLog(size, BlockFile.UNIT, reader, BLOCK_BYTES)
                for table, size in self._sizes.items()
            }
            for table, number, offset, length, head in committed.blocks:
                extent = self._extents[table, number] = Extent(offset, length)
                self._saved.add((table, number))
                self._logs[table].restore(number, file.memory(extent), head)
            for table, end in committed.ends.items():
                self._logs[table].skip_to(end)
            for table, keys in committed.gone.items():
                self._logs[table].erase(keys)

    def _committed(self) -> Committed:
        """The last commit, of these records."""
        if self._index.is_of_earlier_version():
            raise StoreError(
                f"{self.path}: holds records of an earlier version, which have no checksums or another index; expected "
                "an empty directory. With that version, write them to a dump (Tiers.dump), load it into a table, and "
                "write its state with jax_tt.files.save_arrays, whose files this version maps."
            )
        committed = self._index.read()
        if committed.other is not None:
            raise StoreError(
                f"{self.path}: holds other records: {committed.other}. Use another directory, or describe the tables "
                "as they were."
            )
        return committed

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Raises a `StoreError` for a directory that is damaged, or cannot be read or written."""
        try:
            with self._intact():
                yield
        except OSError as error:
            raise StoreError(
                f"{self.path}: {error.strerror}; expected a directory that can be written."
            ) from error

    # What follows runs in the thread of the store.

    def _noting(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function; if it fails, later calls raise its error."""
        try:
            return function(*args)
        except UnwrittenError:
            raise
        except OSError as error:  # what was written before may not be on the disk either
            self._failed = f"{self.path}: {error.strerror}. Open the store again."
            raise StoreError(self._failed) from error
        except Exception as error:  # of memory, for instance
            self._failed = self._advice(error)
            raise

    def _write_block(self, table: str, number: int) -> None:
        with self._guard:
            block = self._logs[table].block(number)
        self._drop()
        try:
            extent, memory = self._file.write(block)
        except OSError as error:
            self._unwritten[table, number] = error
            return
        self._unwritten.pop((table, number), None)
        self._extents[table, number] = extent
        with self._guard:
            self._logs[table].settle(number, memory)

    def _prepare(self, saved: Tree) -> list[Block]:
        """Writes the next commit beside the last one; returns its blocks."""
        blocks, ends, erased = [], {}, {}
        for table, log in self._logs.items():
            with self._guard:
                gone = {(table, number) for number in log.dropped}
                ends[table], erased[table] = log.end, log.gone()
                blocks += [
                    (*name, *extent, log.head(name[1]))
                    for name, extent in self._extents.items()
                    if name[0] == table and name not in gone
                ]
        self._file.sync()
        try:
            if not self._file.is_at(self.path / "blocks"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._index.prepare(sorted(blocks), ends, erased, saved, self._number + 1)
        except OSError as error:
            raise self._unwritten_error(error) from error
        if not self._team.alone:
            self._index.sync()  # other processes rely on it
        return blocks

    def _publish(self, blocks: list[Block]) -> None:
        self._index.publish()
        self._number += 1
        self._saved = {(table, number) for table, number, *_ in blocks}
        self._drop()

    def _drop(self) -> None:
        """Frees the room of written blocks that are no longer needed, and that the last committed state lacks."""
        there = self._extents.keys() - self._saved
        for table, log in self._logs.items():
            with self._guard:
                numbers = log.take_dropped(lambda number, table=table: (table, number) in there)
            for number in numbers:
                self._file.free(self._extents.pop((table, number)))


def _locked(path: Path) -> int:
    """Locks the directory and returns the descriptor of the lock; a second writer would damage the files."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / "in_use", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror}; expected a directory that can be created and written."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StoreError(
            f"{path}: is open in another process or store; close that one, or use another directory."
        ) from error
    except OSError as error:
        os.close(lock)
        raise StoreError(
            f"{path}: cannot be locked: {error.strerror}; use a directory of a local file system."
        ) from error
    return lock


def _unlock(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # processes that were forked have the descriptor too
    os.close(lock)
