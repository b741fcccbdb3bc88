"""Files that users name: interactions, lines ``context id id ...``, vectors, and orders of ids."""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import expect, mismatch
from jax_tt._base.progress import Progress
from jax_tt._files.tables import only_name
from jax_tt._formats.mapped import open_arrays
from jax_tt._formats.numpy_file import write_npz
from jax_tt._formats.stored import FileError, whole_file
from jax_tt._ids.id_order import IdOrder

Pairs = tuple[np.ndarray, np.ndarray]

_ARRAYS = (".npy", ".npz")
_BLOCK = 1 << 22  # bytes
_LONGEST_LINE = 1 << 28
_DIGITS = 18  # that int64 holds for certain
_BLANK = np.zeros(256, bool)
_BLANK[list(b" \t\r\n,")] = True
# An id or context beyond this and beyond so many times the interactions is taken for a mistake.
_LARGE = 1 << 24
_SPARSE = 1000


class Interactions:
    """Interactions of a file, read anew by every call.

    Args:
        path: text as above, plain, ``.gz`` or ``.xz``; or ``.npy`` or ``.npz`` of integers ``[n, 2]``.
        column: of the ids: 1, those after the first of a line; 0, the first, the others being its contexts.
        name: array of an ``.npz`` file.
        progress: show a bar.
    """

    def __init__(self, path: str, column: int, name: str | None, progress: bool):
        self.path, self._swap, self._progress = whole_file(path), column == 0, progress
        self._pairs: np.ndarray | None = None
        if Path(path).suffix.lower() in _ARRAYS:
            self._pairs = read_integers(path, name, 2)
            if self._pairs.shape[1] != 2:
                raise FileError(f"{path}: holds {self._pairs.shape}; expected pairs [n, 2].")
            if self._pairs.size and self._pairs.min() < 0:
                raise FileError(f"{path}: holds {self._pairs.min()}; expected ids of at least 0.")

    def __call__(self) -> Iterator[Pairs]:
        """Contexts and ids, both int64 ``[n]``."""
        if self._pairs is not None:
            yield self._turned(
                (self._pairs[:, 0].astype(np.int64), self._pairs[:, 1].astype(np.int64))
            )
            return
        line = 1
        for block in self._blocks():
            yield self._turned(_parsed(block, line, self.path))
            line += block.count(b"\n")

    def counts(self) -> np.ndarray:
        """How often each id occurs, int64 ``[largest + 1]``."""
        counts, largest, total = np.zeros(0, np.int64), -1, 0
        for contexts, ids in self():
            if not len(ids):
                continue
            total += len(ids)
            largest = max(largest, int(contexts.max()))
            self._check_dense("id", int(ids.max()), total)
            fresh = np.bincount(ids)
            if len(fresh) < len(counts):
                fresh, counts = counts, fresh
            fresh[: len(counts)] += counts
            counts = fresh
        if not total:
            expected = "lines such as `user item item`"
            raise mismatch(self.path, "no interactions", expected, error=FileError)
        self._check_dense("context", largest, total)
        return counts

    def _check_dense(self, what: str, largest: int, total: int) -> None:
        if largest > max(_LARGE, _SPARSE * max(total, 1)):
            got = f"the {what} {largest}, but only {total:,} interactions up to there"
            expected = "numbers near 0, whose largest sets the memory"
            raise mismatch(self.path, got, expected, "Renumber them from 0.", FileError)

    def _turned(self, pairs: Pairs) -> Pairs:
        contexts, ids = pairs
        return (ids, contexts) if self._swap else pairs

    def _blocks(self) -> Iterator[bytes]:
        """Whole lines."""
        rest, read = b"", 0
        size = os.path.getsize(self.path)
        bar = Progress(self._progress, "reading", size, unit="B", unit_scale=True, leave=False)
        with open(self.path, "rb") as raw, bar:
            file = _decompressed(raw, self.path)
            while True:
                try:
                    data = file.read(_BLOCK)
                except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
                    raise FileError(f"{self.path}: is damaged or cut short ({error}).") from error
                bar.step(raw.tell() - read)
                read = raw.tell()
                if not data:
                    break
                cut = data.rfind(b"\n") + 1
                if not cut:
                    rest += data
                    if len(rest) > _LONGEST_LINE:
                        raise FileError(f"{self.path}: has a line of over {_LONGEST_LINE:,} bytes.")
                    continue
                yield rest + data[:cut]
                rest = data[cut:]
        if rest:
            yield rest


def _decompressed(raw: Any, path: str) -> Any:
    suffix = Path(path).suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    return lzma.LZMAFile(raw) if suffix == ".xz" else raw


def _parsed(block: bytes, line: int, path: str) -> Pairs:
    """Pairs of the first number of a line with each of the others."""
    text = np.frombuffer(block, np.uint8)
    blank = _BLANK[text]
    odd = ~blank & ((text < ord("0")) | (text > ord("9")))
    if odd.any():
        at = int(np.argmax(odd))
        first, last = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
        shown = block[first : len(block) if last < 0 else last][:60]
        line += block.count(b"\n", 0, at)
        shown = shown.decode("utf-8", "replace")
        header = " Leave out the header." if line == 1 and not any(map(str.isdigit, shown)) else ""
        raise FileError(
            f"{path}: line {line} is {shown!r}; expected integers >= 0 separated by blanks or commas, "
            f"`context id id ...`.{header}"
        )
    edge = np.diff(~blank, prepend=False, append=False)
    starts, ends = np.flatnonzero(edge).reshape(-1, 2).T
    lengths = ends - starts
    most = lengths.max(initial=0)
    expect(
        most <= _DIGITS, path, f"a number of {most} digits", f"at most {_DIGITS}", error=FileError
    )
    values = np.zeros(len(starts), np.int64)
    for place in range(int(lengths.max(initial=0))):
        longer = lengths > place
        values[longer] = 10 * values[longer] + (text[starts[longer] + place] - ord("0"))
    lines = np.cumsum(text == ord("\n"))[starts]
    first = np.diff(lines, prepend=-1) != 0
    owner = np.flatnonzero(first)[np.cumsum(first) - 1]
    return values[owner[~first]], values[~first]


def read_integers(path: str, name: str | None, ndim: int) -> np.ndarray:
    """Integers with this number of dimensions."""
    array = _read(path, name, ndim, f"array of {ndim} dimensions")
    if array.dtype.kind not in "iu":
        raise FileError(f"{path}: holds {array.dtype}; expected integers.")
    return array


def read_numbers(path: str, name: str | None = None) -> np.ndarray:
    """A vector of real numbers."""
    array = _read(path, name, 1, "vector")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "iu"):
        raise FileError(f"{path}: holds {array.dtype}; expected numbers.")
    return array


def read_order(path: str) -> tuple[IdOrder, tuple[int, ...] | None]:
    """An order and the row factors that it was made for, as `write_order` wrote them; or only an order."""
    stored = open_arrays(path)
    rows = np.asarray(stored["rows"].read())
    factors = stored.arrays.get("row_factors")
    try:
        order = IdOrder(rows)
        p = None if factors is None else tuple(int(x) for x in np.asarray(factors.read()))
    except (ValueError, TypeError) as error:
        raise FileError(f"{path}: is no order of ids: {error}") from error
    return order, p


def write_order(
    path: str, order: IdOrder, row_factors: tuple[int, ...] | None, overwrite: bool
) -> None:
    """An ``.npz`` file that `IdOrder.load` reads, with the row factors beside it."""
    arrays = {"rows": np.asarray(order.rows)}
    if row_factors is not None:
        arrays["row_factors"] = np.array(row_factors)
    write_npz(path, arrays, overwrite=overwrite)


def _read(path: str, name: str | None, ndim: int, what: str) -> np.ndarray:
    stored = open_arrays(path)
    array = stored[name if name is not None else only_name(stored, ndim, what)]
    got = f"an array of shape {array.shape}"
    expect(len(array.shape) == ndim, path, got, f"{ndim} dimensions", error=FileError)
    return np.asarray(array.by_rows())
