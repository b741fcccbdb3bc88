"""Dumps: directories of keys with the entries of their rows, in parts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_tt._base.arguments import expect, mismatch
from jax_tt._base.progress import Progress
from jax_tt._formats.container import Container, read_container
from jax_tt._formats.output import Contents, errors_of, flush, places_of, resuming, unfinished
from jax_tt._formats.stored import FileError, MissingError, StoredArrays
from jax_tt._formats.team import Team

# The container that describes a dump, with the arrays that do not belong to single keys; the others are its parts.
_OTHER_RULE = "The state of another optimizer is left out by optimizer_state=False."
_ABOUT = "dump.safetensors"
_DUMP, _PART = "dump", "part of a dump"
DUMP = Contents("a dump", _ABOUT, re.compile(r"(dump|keys-\d+)\.safetensors"))
_OF_KEYS = {"key": np.dtype(np.uint64), "score": np.dtype(np.uint64), "touched": np.dtype(np.int32)}
# Parts that are written at the same time.
_WRITERS = 2

Part = Mapping[str, np.ndarray]


def write_dump(
    path: str | os.PathLike[str],
    parts: Sequence[Callable[[], Part] | None],
    rest: Mapping[str, Any],
    about: Mapping[str, Any],
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
        bar: makes a step with every part.
        overwrite: whether a dump of this name may be replaced.
        team: the processes that write the dump.
    """
    files = [f"keys-{k:05}.safetensors" for k in range(len(parts))]
    sums = np.zeros(len(files), np.uint32)
    # Also where another process has called `resuming`.
    errors = errors_of(os.fsdecode(path))
    with team.together(path), errors, contextlib.ExitStack() as stack:
        with team.together(path):
            place = unfinished(path)
            if team.leads:
                stack.enter_context(resuming(path, DUMP, overwrite=overwrite))
        with team.together(path):
            for k, checksum in _written(place, files, parts, bar):
                sums[k] = checksum
                if not team.leads:  # the other files are flushed at the end
                    flush(os.path.join(place, files[k]))
        sums = team.summed(sums)
        if team.leads:
            for name in {*os.listdir(place)} - {*files}:
                os.remove(os.path.join(place, name))
            whole = {**about, "files": dict(zip(files, map(int, sums), strict=True))}
            Container(_DUMP, rest, whole).write(os.path.join(place, _ABOUT))


def _written(
    place: str, files: Sequence[str], parts: Sequence[Callable[[], Part] | None], bar: Progress
) -> Iterator[tuple[int, int]]:
    """Writes parts; yields the number of each with its checksum."""
    with ThreadPoolExecutor(_WRITERS) as writers:
        written: collections.deque[Any] = collections.deque()

        def done() -> tuple[int, int]:
            number, future = written.popleft()
            checksum = future.result()
            bar.step()
            return number, checksum

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


def _write(path: str, arrays: Part) -> int:
    """Writes one part, unless it is there. Returns its checksum."""
    part = Container(_PART, arrays, {})
    if not part.is_at(path):
        part.write(f"{path}.new")
        os.replace(f"{path}.new", path)
    return part.checksum


@dataclasses.dataclass(frozen=True)
class Dump:
    """A dump in a directory.

    Attributes:
        path: of the directory.
        features: columns of a row.
        keys: the number of keys.
        files: the parts, with the checksum of each.
        arrays: the type of every array, by name.
        sets: how many sets the table had, how many slots each, and on how many devices; None for other tables. The
            parts have slots then.
        since, base: the dump before that the changes of a table of keys follow, and the digests of its table by name;
            None for dumps of whole tables.
        digests: of the table of keys, by name; None for a dense table.
        stored: the description, and the arrays that do not belong to single keys.
    """

    path: str
    features: int
    keys: int
    files: dict[str, int]
    arrays: dict[str, str]
    sets: tuple[int, int, int] | None
    since: str | None
    base: dict[str, int] | None
    digests: dict[str, int] | None
    stored: StoredArrays

    @property
    def devices(self) -> int:
        """The number of devices of the dumped table."""
        return 1 if self.sets is None else self.sets[2]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Dump:
        """Reads the description."""
        for name in places_of(path):
            if os.path.exists(os.path.join(name, "about.json")):
                raise FileError(
                    f"{name}: is a dump of an earlier version, which describes it in about.json; expected "
                    f"{_ABOUT}. Load it with that version, and write the state with jax_tt.files.save_arrays, "
                    "whose files this version maps."
                )
            with contextlib.suppress(FileNotFoundError):
                return cls._read_from(name)
        raise _incomplete(os.fsdecode(path), _ABOUT)

    @classmethod
    def _read_from(cls, name: str) -> Dump:
        stored = read_container(os.path.join(name, _ABOUT), _DUMP)
        about = stored.notes
        try:
            sets = None
            if "sets" in about:
                sets = int(about["sets"]), int(about["ways"]), int(about["devices"])
            files = {str(file): int(checksum) for file, checksum in about["files"].items()}
            return cls(
                name,
                int(about["features"]),
                int(about["keys"]),
                files,
                dict(about["arrays"]),
                sets,
                about["since"],
                about.get("base"),
                about.get("digests"),
                stored,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{stored.path}: its description is damaged ({error!r}).") from error

    def check(self, features: int, taken: list[str], *, exact: bool) -> None:
        """Raises unless there are entries of these arrays, and with ``exact`` of no others."""
        got, expected = f"rows of {self.features} columns", f"{features}, as the table has"
        expect(self.features == features, self.path, got, expected, error=FileError)
        given = list(self.arrays)
        if set(taken) != set(given) if exact else not set(taken) <= set(given):
            raise mismatch(self.path, ", ".join(given), ", ".join(taken), _OTHER_RULE, FileError)

    def rest(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads arrays that do not belong to single keys; names that the dump does not have are left out."""
        return {name: self._rest[name] for name in names if name in self._rest}

    @functools.cached_property
    def _rest(self) -> dict[str, np.ndarray]:
        # All of them are compared with their checksums, so that damage is an error before it matters.
        return {name: self._array(self.stored, name) for name in self.stored.arrays}

    def parts(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, np.ndarray]]:
        """Reads keys, scores and last batches, slots if there are any, and entries of these shapes, file by file."""
        of_keys = _OF_KEYS if self.sets is None else _OF_KEYS | {"slot": np.dtype(np.int32)}
        for file in self.files:
            stored = self._part(file)
            arrays = {name: self._array(stored, name) for name in (*of_keys, *shapes)}
            lengths = {len(array) for array in arrays.values()}
            if len(lengths) != 1 or any(arrays[k].dtype != kind for k, kind in of_keys.items()):
                raise FileError(f"{stored.path}: its arrays do not belong to the same keys.")
            for name, expected in shapes.items():
                if (shape := arrays[name].shape[1:]) != expected:
                    got = f"{name} with entries of shape {shape}"
                    raise mismatch(stored.path, got, expected, _OTHER_RULE, FileError)
            yield arrays

    def _array(self, stored: StoredArrays, name: str) -> np.ndarray:
        try:
            return np.asarray(stored[name].read())
        except FileError:
            self._check_still_there()
            raise

    def _part(self, file: str) -> StoredArrays:
        try:
            stored = read_container(os.path.join(self.path, file), _PART)
        except FileNotFoundError:
            self._check_still_there()
            raise _incomplete(self.path, file) from None
        if stored.checksum != self.files[file]:
            self._check_still_there()
            raise FileError(
                f"{stored.path}: is of another dump, its checksum differs; load another copy of the dump."
            )
        return stored

    def _check_still_there(self) -> None:
        """Raises if another dump has taken the place of this one since it was opened."""
        with contextlib.suppress(FileNotFoundError):
            try:
                if self._read_from(self.path).stored.checksum == self.stored.checksum:
                    return
            except FileError:  # it is damaged
                return
        raise FileError(f"{self.path}: was replaced or removed while it was read; read it again.")


def _incomplete(path: str, file: str) -> MissingError:
    return MissingError(f"{path}: is no complete dump of a table; it has no {file}.")
