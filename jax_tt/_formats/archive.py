"""Members of zip archives, which are read only if their size is as declared and plausible."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator

from jax_tt._formats.stored import FileError

# Trained floats hardly compress; what shrinks this much beyond this size is made to fill the memory.
_LARGEST_RATIO = 200
_HARMLESS = 1 << 26


def is_bomb(compressed: int, size: int) -> bool:
    """Whether this number of bytes would expand implausibly."""
    return size > max(_HARMLESS, _LARGEST_RATIO * compressed)


@contextlib.contextmanager
def opened(path: str, kind: str) -> Iterator[zipfile.ZipFile]:
    """The archive; all errors are raised as a `FileError`."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FileError(f"{path}: is not a complete {kind} file ({error}).") from error


def member_bytes(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str) -> bytes:
    """The contents of a member, whose checksum is checked."""
    check_member(info, path)
    with archive.open(info) as file:
        data = file.read()
    if len(data) != info.file_size:
        raise FileError(f"{path}: {info.filename} has {len(data)} bytes, not {info.file_size}.")
    return data


def check_member(info: zipfile.ZipInfo, path: str) -> None:
    """Rejects a member that would expand implausibly."""
    if is_bomb(info.compress_size, info.file_size):
        raise FileError(
            f"{path}: {info.filename} would grow from {info.compress_size:,} to {info.file_size:,} bytes, as a zip "
            "bomb does; refused. Save the array uncompressed if it is meant."
        )
