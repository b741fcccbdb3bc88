"""Outputs that are complete or absent, and never overwrite inputs or existing files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_tt._formats.stored import ExistsError, FileError, MissingError, in_words

# What errors advise; the command line has another name for it.
OVERWRITE = "overwrite=True"


class Contents(NamedTuple):
    """What a directory holds that may be replaced; anything else there belongs to somebody.

    Attributes:
        name: what it is.
        mark: a file that it always has.
        files: the names of all files that it may have.
    """

    name: str
    mark: str
    files: re.Pattern[str]


CHECKPOINT = Contents(
    "an orbax checkpoint",
    "_METADATA",
    re.compile(
        r"_METADATA|_CHECKPOINT_METADATA|_sharding|array_metadatas|commit_success\.txt|d|manifest\.ocdbt|"
        r"ocdbt\.process_.*"
    ),
)


def check_output(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    directory: bool = False,
    contents: Contents = CHECKPOINT,
    others: Sequence[str | os.PathLike[str]] = (),
) -> None:
    """Refuses an output that could not be written, or whose writing would lose something, before the work begins.

    Args:
        path: of the output.
        overwrite: whether it may exist.
        directory: whether it is a directory, of ``contents``, or a file.
        contents: what a directory must hold to be replaced.
        others: what is read, and other outputs.

    Raises:
        FileError: it is, holds or lies in one of the others, by identity and not by name; it exists, and may not or is
            of another kind; its folder is missing or cannot be written to.
    """
    name = os.fsdecode(path)
    if not name or "\0" in name:
        raise FileError(f"got {name!r} for the name of an output; expected a path.")
    target = os.path.realpath(name)
    places = _places(target)
    for other in map(os.fsdecode, others):
        beside = _places(os.path.realpath(other))
        if places[0] == beside[0]:
            how = "is the same file as"
        elif places[0] in beside:
            how = "is a directory that holds"
        elif beside[0] in places:
            how = "lies in"
        else:
            continue
        raise FileError(
            f"{name}: {how} {other}, which would be lost or changed; expected another place for the output."
        )
    with errors_of(name):
        _check_target(name, target, overwrite, contents if directory else None)
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            raise MissingError(f"{name}: there is no directory {folder}; make it, or name another.")
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str], *, overwrite: bool, directory: bool = False
) -> Iterator[str]:
    """A name to write to, on the same file system; what is there at the end takes the place of the output at once.

    Whatever ends the work before that, Ctrl-C included, leaves the old output as it was and nothing beside it. The
    output is checked as by `check_output`, before the work and after it.
    """
    check_output(path, overwrite=overwrite, directory=directory)
    name = os.fsdecode(path)
    target = os.path.realpath(name)
    folder = os.path.dirname(target)
    with (
        errors_of(name),
        tempfile.TemporaryDirectory(
            ".unfinished", ".jax_tt_", folder, ignore_cleanup_errors=True
        ) as place,
    ):
        new = os.path.join(place, "new")
        yield new
        if not directory:
            _keep_mode(new, target)
        flush(new)
        if directory:
            _swap(new, target, overwrite=overwrite)
        elif overwrite:
            os.replace(new, target)
        else:
            _move_to_free_name(new, target)
        _flush_directory(folder)


@contextlib.contextmanager
def resuming(path: str | os.PathLike[str], contents: Contents, *, overwrite: bool) -> Iterator[str]:
    """A directory to write to, which takes the name of the output at the end.

    What ends the work before that leaves what has been written, and the old output as it was; the next call for the
    same output gets the same directory, and may keep what is there. Only one call at a time may write an output.
    """
    check_output(path, overwrite=overwrite, directory=True, contents=contents)
    name = os.fsdecode(path)
    folder, last = os.path.split(os.path.realpath(name))
    place = unfinished(name)
    with errors_of(name):
        os.makedirs(place, exist_ok=True)
        lock = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                yield place
            except BaseException:
                with contextlib.suppress(OSError):  # unless something has been written
                    os.rmdir(place)
                raise
            flush(place)
            _swap(place, os.path.join(folder, last), overwrite=overwrite)
        finally:
            os.close(lock)


def unfinished(path: str | os.PathLike[str]) -> str:
    """The directory that `resuming` returns, where another process has called it."""
    folder, last = os.path.split(os.path.realpath(os.fsdecode(path)))
    return os.path.join(folder, f".jax_tt_{last}.unfinished")


def places_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Where to look for a directory of this name, in this order; what is first there is complete.

    A directory that another one replaces has a second name for a moment, which it keeps if the call is cut off then.
    """
    name = os.fsdecode(path)
    # The new one may have come after the first look.
    return name, _aside(os.path.realpath(name)), name


def _aside(target: str) -> str:
    folder, last = os.path.split(target)
    return os.path.join(folder, f".jax_tt_{last}.replaced")


def _check_target(name: str, target: str, overwrite: bool, contents: Contents | None) -> None:
    """Whether a directory of such contents, or a file, may be put there."""
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if contents is not None and not overwrite and os.path.lexists(_aside(target)):
            raise ExistsError(
                f"{name}: exists as {_aside(target)}, since a call that replaced it was cut off; expected a new name, "
                f"or {OVERWRITE} to replace it."
            ) from None
        return
    if not overwrite:
        raise _exists(name)
    if contents is None:
        if not stat.S_ISREG(mode):
            raise FileError(f"{name}: is no regular file; only such a file is replaced.")
        return
    held = os.listdir(target) if stat.S_ISDIR(mode) else [""]
    foreign = [one for one in held if not contents.files.fullmatch(one)]
    if foreign or (held and contents.mark not in held):
        raise FileError(
            f"{name}: is not {contents.name}, or holds other files as well; only a directory with nothing but "
            f"{contents.name} in it is replaced. Name a new one."
        )


@contextlib.contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Raises a `FileError` for what goes wrong while an output is written."""
    try:
        yield
    except FileError:
        raise
    except FileExistsError as error:
        raise _exists(name) from error
    except BlockingIOError as error:
        raise FileError(
            f"{name}: is being written by another call; wait for it, or name another output."
        ) from error
    except OSError as error:
        raise in_words(error, name, "cannot be written") from error


def _exists(name: str) -> FileError:
    return ExistsError(f"{name}: exists; expected a new name, or {OVERWRITE} to replace it.")


def _places(path: str) -> list[object]:
    """Identities of a path without links, and of all the directories that it is in."""
    identities: list[object] = []
    for place in (Path(path), *Path(path).parents):
        try:
            known = os.stat(place)
            identities.append((known.st_dev, known.st_ino))
        except OSError:
            identities.append(str(place))
    return identities


def _keep_mode(new: str, target: str) -> None:
    """Gives a new file the permissions of the one that it replaces."""
    if not os.path.exists(target):
        return
    mode = stat.S_IMODE(os.stat(target).st_mode)
    if stat.S_IMODE(os.stat(new).st_mode) != mode:
        os.chmod(new, mode)


def _swap(new: str, target: str, *, overwrite: bool) -> None:
    """Gives a new directory its name. At any moment, one of `places_of` is the old one or the new one, complete."""
    old = _aside(target)
    try:
        if overwrite and os.path.lexists(target):
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        os.rename(new, target)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            os.rename(old, target)
        raise
    _flush_directory(os.path.dirname(target))
    if overwrite and os.path.lexists(old):
        # Readers do not look there: whoever removes the new directory has removed the old one, too.
        removed = f"{old}.removed"
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(old, removed)
        shutil.rmtree(removed, ignore_errors=True)


def _move_to_free_name(new: str, target: str) -> None:
    """A rename that replaces nothing, which only a link does: two programs may write the same new name."""
    try:
        os.link(new, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise
        os.replace(new, target)


def flush(path: str) -> None:
    """Flushes a file, or all files in a directory, to disk."""
    if os.path.isdir(path):
        for place, _, files in os.walk(path):
            for file in files:
                flush(os.path.join(place, file))
            _flush_directory(place)
        return
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _flush_directory(path: str) -> None:
    # Not every file system can; the files themselves are on the disk by then.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
