"""Dumps: directories of keys with the entries of their rows, in parts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._formats.orbax_directory import read_orbax, write_orbax
from jax_tt._formats.output import Contents, errors_of, flush, places_of, resuming, unfinished
from jax_tt._formats.safetensors_file import read_safetensors, write_safetensors
from jax_tt._formats.stored import FileError, MissingError, StoredArrays
from jax_tt._formats.team import Team

# How the arrays of a part are written.
FORMATS = ("safetensors", "orbax")
_ABOUT, _REST, _VERSION = "about.json", "rest.safetensors", 3
DUMP = Contents(
    "a dump", _ABOUT, re.compile(r"about\.json|rest\.safetensors|keys-\d+\.(safetensors|orbax)")
)
_OF_KEYS = {"key": np.dtype(np.uint64), "score": np.dtype(np.uint64), "touched": np.dtype(np.int32)}
# Parts that are written at the same time.
_WRITERS = 2

Part = Mapping[str, np.ndarray]


def write_dump(
    path: str | os.PathLike[str],
    parts: Sequence[Callable[[], Part] | None],
    rest: Mapping[str, Any],
    about: Mapping[str, Any],
    kind: str,
    bar: Progress,
    *,
    overwrite: bool,
    team: Team,
) -> None:
    """Writes a dump to a directory, or goes on with one that was cut off.

    What an earlier call has written is compared with what would be written, and kept where it is the same.

    Args:
        path: of the directory, which is complete or absent.
        parts: functions that return keys, scores and last batches, with the entries of their rows; None for those that
            another process of the team writes.
        rest: arrays that do not belong to single keys; it is read after the last part.
        about: the description.
        kind: one of `FORMATS`.
        bar: makes a step with every part.
        overwrite: whether a dump of this name may be replaced.
        team: the processes that write the dump.
    """
    files = [f"keys-{k:05}.{kind}" for k in range(len(parts))]
    slots = ["slot"] if "sets" in about else []
    names = [*_OF_KEYS, *slots, *about["arrays"]]
    sums = np.zeros((len(files), len(names)), np.uint32)
    # Also where another process has called `resuming`.
    errors = errors_of(os.fsdecode(path))
    with team.together(path), errors, contextlib.ExitStack() as stack:
        with team.together(path):
            place = unfinished(path)
            if team.leads:
                stack.enter_context(resuming(path, DUMP, overwrite=overwrite))
        with team.together(path):
            for k, found in _written(place, files, parts, bar):
                sums[k] = [found[name] for name in names]
                if not team.leads:  # the other files are flushed at the end
                    flush(os.path.join(place, files[k]))
        sums = team.summed(sums)
        if team.leads:
            checksums = {
                file: dict(zip(names, map(int, row), strict=True))
                for file, row in zip(files, sums, strict=True)
            }
            others = {name: np.asarray(x) for name, x in rest.items()}
            checksums[_REST] = _write(os.path.join(place, _REST), others)
            for name in {*os.listdir(place)} - {*files, _REST}:
                _remove(os.path.join(place, name))
            whole = {"version": _VERSION, **about, "files": files, "checksums": checksums}
            whole["checksum"] = _sum_of_text(whole)
            Path(place, _ABOUT).write_text(json.dumps(whole, indent=2))


def _written(
    place: str, files: Sequence[str], parts: Sequence[Callable[[], Part] | None], bar: Progress
) -> Iterator[tuple[int, dict[str, int]]]:
    """Writes parts; yields the number of each with the checksums of its arrays."""
    with ThreadPoolExecutor(_WRITERS) as writers:
        written: collections.deque[Any] = collections.deque()

        def done() -> tuple[int, dict[str, int]]:
            number, future = written.popleft()
            sums = future.result()
            bar.step()
            return number, sums

        try:
            for number, part in enumerate(parts):
                if part is None:
                    continue
                if len(written) >= _WRITERS:  # no more than these are in memory
                    yield done()
                path = os.path.join(place, files[number])
                written.append((number, writers.submit(_write, path, part())))
            while written:
                yield done()
        except BaseException:
            writers.shutdown(cancel_futures=True)
            raise


@dataclasses.dataclass(frozen=True)
class Dump:
    """A dump in a directory.

    Attributes:
        path: of the directory.
        features: columns of a row.
        keys: the number of keys.
        files: the parts.
        arrays: the type of every array, by name.
        sets: how many sets the table had, how many slots each, and on how many devices; None for other tables. The
            parts have slots then.
        since, base: the dump before that the changes of a table of keys follow, and the digests of its table by name;
            None for dumps of whole tables.
        digests: of the table of keys, by name; None where the dump was written without them.
        checksums: of every array, by file and name; None where the dump was written without them.
    """

    path: str
    features: int
    keys: int
    files: list[str]
    arrays: dict[str, str]
    sets: tuple[int, int, int] | None
    since: str | None
    base: dict[str, int] | None
    digests: dict[str, int] | None
    checksums: dict[str, dict[str, int]] | None

    @property
    def devices(self) -> int:
        """The number of devices of the dumped table."""
        return 1 if self.sets is None else self.sets[2]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Dump:
        """Reads the description."""
        for name in places_of(path):
            with contextlib.suppress(FileNotFoundError):
                return cls._read_from(name)
        raise _incomplete(os.fsdecode(path), _ABOUT)

    @classmethod
    def _read_from(cls, name: str) -> Dump:
        try:
            about = json.loads(Path(name, _ABOUT).read_text())
            version = about["version"]
            if version not in (1, 2, _VERSION):
                raise FileError(
                    f"{name}: is of version {version}; expected at most {_VERSION}. Read it with the version of jax_tt "
                    "that wrote it."
                )
            # The first version wrote no checksums, and slots for one device alone, whose number it did not write.
            summed = version > 1 or "checksum" in about  # a version that has changed as well
            if summed and about.pop("checksum") != _sum_of_text(about):
                raise ValueError("its checksum differs")
            files = [str(file) for file in about["files"]]
            sizes = int(about["features"]), int(about["keys"])
            sets = since = base = None
            if "sets" in about:
                sets = int(about["sets"]), int(about["ways"]), int(about.get("devices", 1))
            if "sets" in about or "base" in about:
                since, base = about["since"], about.get("base")
            if since and base is None:
                raise FileError(
                    f"{name}: is a dump of changes of version {version}, which does not say what they follow; expected "
                    f"version {_VERSION}. Make a full dump of the table, and load that."
                )
            sums = about["checksums"] if version > 1 else None
            arrays, digests = dict(about["arrays"]), about.get("digests")
            return cls(name, *sizes, files, arrays, sets, since, base, digests, sums)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"{name}: {_ABOUT} cannot be read or is damaged ({error}).") from error

    def check(self, features: int, taken: list[str], *, exact: bool) -> None:
        """Raises unless there are entries of these arrays, and with ``exact`` of no others."""
        if self.features != features:
            raise FileError(
                f"{self.path}: has rows of {self.features} columns; expected {features}, as the table has."
            )
        given = list(self.arrays)
        if set(taken) != set(given) if exact else not set(taken) <= set(given):
            raise FileError(
                f"{self.path}: has {', '.join(given)}; expected {', '.join(taken)}. The state of another "
                "optimizer is left out by optimizer_state=False."
            )

    def rest(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads arrays that do not belong to single keys; names that the dump does not have are left out."""
        return {name: self._rest[name] for name in names if name in self._rest}

    @functools.cached_property
    def _rest(self) -> dict[str, np.ndarray]:
        stored = self._read(_REST)
        # All of them are compared with their checksums, so that damage is an error before it matters.
        return {name: self._array(_REST, stored, name) for name in stored.arrays}

    def parts(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, np.ndarray]]:
        """Reads keys, scores and last batches, slots if there are any, and entries of these shapes, file by file."""
        of_keys = _OF_KEYS if self.sets is None else _OF_KEYS | {"slot": np.dtype(np.int32)}
        for file in self.files:
            stored = self._read(file)
            arrays = {name: self._array(file, stored, name) for name in (*of_keys, *shapes)}
            lengths = {len(array) for array in arrays.values()}
            if len(lengths) != 1 or any(arrays[k].dtype != kind for k, kind in of_keys.items()):
                raise FileError(f"{stored.path}: its arrays do not belong to the same keys.")
            for name, expected in shapes.items():
                if (shape := arrays[name].shape[1:]) != expected:
                    raise FileError(
                        f"{stored.path}: {name} has entries of shape {shape}; expected {expected}, as in the table. "
                        "The state of another optimizer is left out by optimizer_state=False."
                    )
            yield arrays

    def _array(self, file: str, stored: StoredArrays, name: str) -> np.ndarray:
        array = np.asarray(stored[name].read())
        if self.checksums is not None and self.checksums[file].get(name) != _sum(array):
            self._check_still_there()
            raise FileError(
                f"{stored.path}: {name} is damaged, its checksum differs; load another copy of the dump."
            )
        return array

    def _read(self, file: str) -> StoredArrays:
        try:
            return _read(os.path.join(self.path, file))
        except FileNotFoundError:
            self._check_still_there()
            raise _incomplete(self.path, file) from None

    def _check_still_there(self) -> None:
        """Raises if another dump has taken the place of this one since it was opened."""
        with contextlib.suppress(FileNotFoundError):
            if self._read_from(self.path) == self:
                return
        raise FileError(f"{self.path}: was replaced or removed while it was read; read it again.")


def _incomplete(path: str, file: str) -> MissingError:
    return MissingError(f"{path}: is no complete dump of a table; it has no {file}.")


def _read(path: str) -> StoredArrays:
    if path.endswith(".orbax"):
        if not os.path.isdir(path):
            raise FileNotFoundError(path)
        return read_orbax(path)
    return read_safetensors(path)


def _write(path: str, arrays: Part) -> dict[str, int]:
    """Writes one part, unless it is there. Returns the checksums of its arrays."""
    sums = {name: _sum(array) for name, array in arrays.items()}
    if os.path.exists(path):
        with contextlib.suppress(FileError):
            if _same(_read(path), arrays):
                return sums
    new = path + ".new"
    for old in new, path:
        _remove(old)
    write = write_orbax if path.endswith(".orbax") else write_safetensors
    write(new, arrays, {})
    os.rename(new, path)
    return sums


def _sum(array: np.ndarray) -> int:
    shape = f"{array.dtype} {array.shape}".encode()
    return zlib.crc32(_bytes(array).data, zlib.crc32(shape))


def _sum_of_text(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _same(stored: StoredArrays, arrays: Part) -> bool:
    if stored.arrays.keys() != arrays.keys():
        return False
    for name, array in arrays.items():
        other = stored[name]
        if (other.shape, other.dtype) != (array.shape, array.dtype):
            return False
        # Bytes, since no NaN equals itself.
        if not np.array_equal(_bytes(other.read()), _bytes(array)):
            return False
    return True


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
