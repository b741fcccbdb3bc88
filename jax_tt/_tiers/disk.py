"""`DiskStore`: records by key in an LMDB environment, committed together."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jax_tt._requires import require
from jax_tt._tiers.record_log import BLOCK_BYTES, RecordLog

# The largest size of the file, which takes address space but no disk space until it is used.
_MAP_BYTES = 1 << 42
_ABOUT = b"about"
_SAVED = b"saved"
_BLOCKS = b"blocks"
# Of what is in the directory.
_VERSION = 2
# Blocks that wait to be written, and those of a transaction, which stay in memory until it is committed.
_PENDING, _TOGETHER = 16, 16


class StoreError(Exception):
    """A store cannot be opened, read or written.

    >>> import jax_tt, tempfile
    >>> table = jax_tt.dense_table(64, 8, optimizer=jax_tt.optimizers.SGD(0.1))
    >>> collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    >>> sizes, path = {"item": jax_tt.Tier(host_rows=64)}, tempfile.mkdtemp()
    >>> with jax_tt.Tiers(collection, sizes, path=path) as tiers:
    ...     try:
    ...         jax_tt.Tiers(collection, sizes, path=path)
    ...     except jax_tt.StoreError as error:
    ...         print(str(error).partition(": ")[2].partition(";")[0])
    is open in another process or store
    """


class DiskStore:
    """Records of several tables by 64-bit key, in one directory.

    Records are stored in blocks, see `RecordLog`; a block is one value of LMDB and does not move. What was written
    after the last `commit` is gone if the process dies. LMDB ties a transaction to a thread, so the store has its own,
    in which blocks are written while the caller goes on. If one fails, later calls raise its error, and nothing is
    committed any more.

    Args:
        path: directory, which is created if it does not exist.
        sizes: bytes of a record, by table.
        about: what the records are; a store is opened again only with the same description.

    Raises:
        StoreError: the directory cannot be written, another process or store has it open, or it holds other records.
    """

    def __init__(self, path: str | os.PathLike[str], sizes: Mapping[str, int], about: Any):
        self._lmdb: Any = require("lmdb", "a tier on disk", "disk")
        self.path, self._sizes = Path(path), dict(sizes)
        described = {"about": about, "bytes of a block": BLOCK_BYTES, "version": _VERSION}
        self._about = json.dumps(described, sort_keys=True).encode()
        self._lock = _locked(self.path)
        self._thread = ThreadPoolExecutor(1, "jax_tt_disk")
        self._pending: collections.deque[Future[None]] = collections.deque()
        self._failed = ""
        # Held by whoever hands work to the thread; reading records needs only the other one, which guards the logs:
        # their blocks move to the memory of LMDB once they are committed.
        self._writing, self._guard = threading.Lock(), threading.Lock()
        # Blocks of the present transaction, and all that are in the file but not in the last committed state.
        self._written: list[tuple[str, int]] = []
        self._stored: set[tuple[str, int]] = set()
        try:
            self._run(self._open)
        except BaseException:
            self._thread.shutdown()
            _unlock(self._lock)
            raise

    def get(
        self, table: str, keys: np.ndarray, take: Callable[[np.ndarray, np.ndarray], None]
    ) -> np.ndarray:
        """Finds the records of keys uint64 ``[n]``; returns whether each of them is there, bool ``[n]``.

        ``take`` is called with the addresses of the records found and the positions of their keys.
        """
        with self._guard:
            self._check()
            found = self._logs[table].find(keys)
            there = found != 0
            if there.any():
                take(found[there], np.flatnonzero(there))
        return there

    def put(self, table: str, keys: np.ndarray, records: np.ndarray) -> None:
        """Writes records of distinct keys, given by their addresses."""
        with self._writing:
            self._check()
            with self._whole():
                step = _TOGETHER * self._logs[table].rows
                for first in range(0, len(keys), step):
                    part = slice(first, first + step)
                    with self._guard:
                        full = self._logs[table].append(keys[part], records[part])
                    self._write_blocks(table, full)

    def keys(self, table: str) -> np.ndarray:
        """The keys of all records of a table, uint64 in ascending order."""
        with self._guard:
            self._check()
            return self._logs[table].keys()

    def saved(self) -> bytes | None:
        """What the last `commit` saved beside the records."""
        with self._writing:
            return self._run(lambda: self._value(_SAVED))

    def commit(self, saved: bytes) -> None:
        """Makes everything written so far permanent, together with ``saved``."""
        with self._writing:
            self._check()
            with self._whole():
                for table, log in self._logs.items():
                    with self._guard:
                        last = log.seal()
                    self._write_blocks(table, last)
                self._run(self._commit, saved)

    def close(self) -> None:
        """Closes the store without a commit."""
        with self._writing:
            if self._lock < 0:
                return
            with self._guard:  # whoever reads a record has read it
                lock, self._lock = self._lock, -1
            try:
                self._thread.submit(self._close).result()
            finally:
                try:
                    self._thread.shutdown()
                finally:  # an interrupt must not leave the directory locked
                    _unlock(lock)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What is interrupted in here has not handed on all blocks, so that nothing may be committed after it."""
        try:
            yield
        except BaseException as error:
            self._failed = self._failed or self._advice(error)
            raise

    def _write_blocks(self, table: str, numbers: list[int]) -> None:
        for number in numbers:
            self._wait(_PENDING - 1)
            self._pending.append(
                self._thread.submit(self._noting, self._write_block, table, number)
            )

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        self._wait(0)
        self._check()
        return self._thread.submit(self._noting, function, *args).result()

    def _check(self) -> None:
        """Raises if records can no longer be read and written."""
        if self._lock < 0:
            raise StoreError(f"{self.path}: the store is closed.")
        if self._failed:
            raise StoreError(self._failed)

    def _wait(self, most: int) -> None:
        """Waits until at most so many writes are pending."""
        while len(self._pending) > most:
            self._pending[0].result()
            self._pending.popleft()

    def _advice(self, error: BaseException) -> str:
        return f"{self.path}: {error!r}. Open the store again."

    # What follows runs in the thread of the store.

    def _noting(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function; if it fails, later calls raise its error."""
        try:
            return function(*args)
        except self._lmdb.Error as error:
            self._failed = (
                f"{self.path}: {error}. The last committed state is intact; free space or make the directory writable "
                "and open the store again."
            )
            raise StoreError(self._failed) from error
        except Exception as error:  # of memory, for instance
            self._failed = self._advice(error)
            raise

    def _open(self) -> None:
        try:
            self._environment = self._lmdb.open(
                str(self.path), map_size=_MAP_BYTES, max_dbs=1 + len(self._sizes)
            )
        except (self._lmdb.InvalidError, self._lmdb.CorruptedError) as error:
            raise StoreError(
                f"{self.path}: {error}; the directory is damaged, or another program wrote it. Use a copy of it."
            ) from error
        self._begin()
        try:
            self._others = self._environment.open_db(b"others", self._write)
            found = self._value(_ABOUT)
            if found is None:
                self._write.put(_ABOUT, self._about, db=self._others)
            elif found != self._about:
                raise StoreError(
                    f"{self.path}: holds records of {found.decode()}; expected {self._about.decode()}. Use another "
                    "directory, or the table that it was written with."
                )
            self._records = {
                name: self._environment.open_db(b"blocks/" + name.encode(), self._write)
                for name in self._sizes
            }
            blocks = json.loads(self._value(_BLOCKS) or b"{}")
            self._logs = {
                name: self._read_log(name, size, *blocks.get(name, (0, 0)))
                for name, size in self._sizes.items()
            }
        except BaseException:
            self._close()
            raise

    def _read_log(self, table: str, size: int, end: int, count: int) -> RecordLog:
        """The blocks of the last commit, so many below ``end``; those that were written later are removed."""
        # A smaller value would move with others.
        log = RecordLog(size, self._environment.stat()["psize"], BLOCK_BYTES)
        numbers = [_number(name) for name, _ in self._write.cursor(db=self._records[table])]
        for number in numbers:
            if number >= end:
                self._write.delete(_name(number), db=self._records[table])
        saved = [number for number in numbers if number < end]
        if len(saved) != count:
            raise StoreError(
                f"{self.path}: {len(saved)} of {count} saved blocks of {table!r} are there; the directory is damaged. "
                "Use a copy of it."
            )
        # Now the others are no longer of this transaction.
        for number in saved:
            try:
                log.restore(number, self._block(table, number))
            except ValueError as error:
                raise StoreError(
                    f"{self.path}: block {number} of {table!r} is damaged: {error}. Use a copy of the directory."
                ) from error
        return log

    def _write_block(self, table: str, number: int) -> None:
        with self._guard:
            block = self._logs[table].block(number)
        self._write.put(_name(number), block, db=self._records[table])
        self._written.append((table, number))
        self._stored.add((table, number))
        if len(self._written) == _TOGETHER:
            # Nothing that the last committed state has.
            self._drop(self._stored.__contains__)
            self._end()

    def _commit(self, saved: bytes) -> None:
        self._drop(lambda block: True)
        blocks = {table: (log.end, log.stored) for table, log in self._logs.items()}
        self._write.put(_SAVED, saved, db=self._others)
        self._write.put(_BLOCKS, json.dumps(blocks).encode(), db=self._others)
        self._end()
        self._stored.clear()

    def _drop(self, among: Callable[[tuple[str, int]], bool]) -> None:
        """Deletes the blocks among some that are no longer needed."""
        gone = set()
        for table, log in self._logs.items():
            with self._guard:
                numbers = log.take_dropped(lambda number, table=table: among((table, number)))
            for number in numbers:
                self._write.delete(_name(number), db=self._records[table])
            gone.update((table, number) for number in numbers)
        self._stored -= gone
        self._written = [block for block in self._written if block not in gone]

    def _end(self) -> None:
        """Commits the transaction. Its blocks are in the file then, and their memory can be used again."""
        self._write.commit()
        self._begin()
        with self._guard:
            for table, number in self._written:
                self._logs[table].settle(number, self._block(table, number))
        self._written = []

    def _begin(self) -> None:
        self._write = self._environment.begin(write=True, buffers=True)

    def _value(self, name: bytes) -> bytes | None:
        found = self._write.get(name, db=self._others)
        return None if found is None else bytes(found)

    def _block(self, table: str, number: int) -> np.ndarray:
        return np.frombuffer(self._write.get(_name(number), db=self._records[table]), np.uint8)

    def _close(self) -> None:
        self._write.abort()
        self._environment.close()


def _name(number: int) -> bytes:
    """The key of a block, big-endian, so that blocks are in the order of their numbers."""
    return struct.pack(">Q", number)


def _number(name: Any) -> int:
    return struct.unpack(">Q", name)[0]


def _locked(path: Path) -> int:
    """The descriptor of a lock of the directory; LMDB itself would wait for the other writer."""
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
