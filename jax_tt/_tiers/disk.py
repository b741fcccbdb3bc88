"""`DiskStore`: records by key in an LMDB environment, committed together."""

from __future__ import annotations

import collections
import fcntl
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jax_tt._requires import require
from jax_tt._tiers.key_filter import KeyFilter

# The largest size of the file, which takes address space but no disk space until it is used.
_MAP_BYTES = 1 << 42
_ABOUT = b"about"
_SAVED = b"saved"
# Calls of `put` whose records wait to be written, and keys that are read at once.
_PENDING, _CHUNK = 2, 1 << 16


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

    Everything written since the last `commit` is one transaction, which this process reads and which is gone if it
    dies. LMDB ties a transaction to a thread, so the store has its own, in which records are written while the caller
    goes on. If one fails, later calls raise its error, and nothing is committed any more.

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
        self._about = json.dumps(about, sort_keys=True).encode()
        self._lock = _locked(self.path)
        self._thread = ThreadPoolExecutor(1, "jax_tt_disk")
        self._pending: collections.deque[Future[None]] = collections.deque()
        self._failed = ""
        try:
            self._run(self._open)
        except BaseException:
            self._thread.shutdown()
            os.close(self._lock)
            raise

    def get(self, table: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether each of the keys uint64 ``[n]`` is there, and the records found, uint8 ``[found, size]``."""
        there = self._filters[table].may_hold(keys)
        if not there.any():
            self._check()
            return there, np.empty((0, self._sizes[table]), np.uint8)
        there[there], records = self._run(self._get, table, keys[there])
        return there, records

    def put(self, table: str, keys: np.ndarray, records: np.ndarray) -> None:
        """Writes records uint8 ``[n, size]`` of distinct keys; both arrays must not change afterwards."""
        self._check()
        self._wait(_PENDING - 1)
        self._filters[table].add(keys)
        self._pending.append(self._thread.submit(self._put, table, keys, records))

    def keys(self, table: str) -> np.ndarray:
        """The keys of all records of a table, uint64 in ascending order."""
        return self._run(lambda: np.concatenate([*self._keys(table), np.zeros(0, np.uint64)]))

    def saved(self) -> bytes | None:
        """What the last `commit` saved beside the records."""
        return self._run(lambda: self._write.get(_SAVED, db=self._others))

    def commit(self, saved: bytes) -> None:
        """Makes everything written so far permanent, together with ``saved``."""
        self._run(self._commit, saved)

    def count(self, table: str) -> int:
        """The number of records of a table."""
        return self._run(lambda: self._write.stat(self._records[table])["entries"])

    def close(self) -> None:
        """Closes the store without a commit."""
        if self._lock < 0:
            return
        self._thread.submit(self._close).result()
        self._thread.shutdown()
        os.close(self._lock)
        self._lock = -1

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        self._wait(0)
        self._check()
        return self._result(self._thread.submit(function, *args))

    def _check(self) -> None:
        """Raises if records can no longer be read and written."""
        if self._lock < 0:
            raise StoreError(f"{self.path}: the store is closed.")
        if self._failed:
            raise StoreError(self._failed)
        while self._pending and self._pending[0].done():
            self._wait(len(self._pending) - 1)

    def _wait(self, most: int) -> None:
        """Waits until at most so many writes are pending."""
        while len(self._pending) > most:
            self._result(self._pending[0])
            self._pending.popleft()

    def _result(self, found: Future[Any]) -> Any:
        try:
            return found.result()
        except self._lmdb.Error as error:
            self._failed = (
                f"{self.path}: {error}. The last committed state is intact; free space or make the directory writable "
                "and open the store again."
            )
            raise StoreError(self._failed) from error
        except Exception as error:  # of memory, for instance
            self._failed = f"{self.path}: {error!r}. Open the store again."
            raise

    def _open(self) -> None:
        self._environment = self._lmdb.open(
            str(self.path), map_size=_MAP_BYTES, max_dbs=1 + len(self._sizes)
        )
        self._write = self._environment.begin(write=True)
        try:
            self._others = self._environment.open_db(b"others", self._write)
            found = self._write.get(_ABOUT, db=self._others)
            if found is None:
                self._write.put(_ABOUT, self._about, db=self._others)
            elif found != self._about:
                raise StoreError(
                    f"{self.path}: holds records of {found.decode()}; expected {self._about.decode()}. Use another "
                    "directory, or the table that it was written with."
                )
            self._records = {
                name: self._environment.open_db(b"records/" + name.encode(), self._write)
                for name in self._sizes
            }
            self._filters = {name: self._read_filter(name) for name in self._sizes}
        except BaseException:
            self._close()
            raise

    def _read_filter(self, table: str) -> KeyFilter:
        held = KeyFilter()
        for keys in self._keys(table):
            held.add(keys)
        return held

    def _keys(self, table: str) -> Iterator[np.ndarray]:
        names = self._write.cursor(db=self._records[table]).iternext(keys=True, values=False)
        while part := b"".join(itertools.islice(names, _CHUNK)):
            yield np.frombuffer(part, ">u8").astype(np.uint64)

    def _get(self, table: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(keys)
        names = _names(keys[order])
        cursor = self._write.cursor(db=self._records[table])
        pairs = cursor.getmulti(names)
        found = np.zeros(len(keys), bool)
        if not pairs:
            return found, np.empty((0, self._sizes[table]), np.uint8)
        there = np.frombuffer(b"".join(name for name, _ in pairs), ">u8").astype(np.uint64)
        records = np.frombuffer(b"".join(value for _, value in pairs), np.uint8)
        # The pairs come in the order of the keys; back to that of the caller.
        places = np.searchsorted(keys[order], there)
        found[order[places]] = True
        return found, records.reshape(-1, self._sizes[table])[np.argsort(order[places])]

    def _put(self, table: str, keys: np.ndarray, records: np.ndarray) -> None:
        order = np.argsort(keys)
        values = (records[place].tobytes() for place in order)
        pairs = list(zip(_names(keys[order]), values, strict=True))
        self._write.cursor(db=self._records[table]).putmulti(pairs)

    def _commit(self, saved: bytes) -> None:
        self._write.put(_SAVED, saved, db=self._others)
        self._write.commit()
        self._write = self._environment.begin(write=True)

    def _close(self) -> None:
        self._write.abort()
        self._environment.close()


def _names(keys: np.ndarray) -> list[bytes]:
    """Keys as LMDB has them: big-endian, so that they are in numeric order."""
    flat = keys.astype(">u8").tobytes()
    return [flat[k : k + 8] for k in range(0, len(flat), 8)]


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
    except OSError as error:
        os.close(lock)
        raise StoreError(
            f"{path}: is open in another process or store; close that one, or use another directory."
        ) from error
    return lock
