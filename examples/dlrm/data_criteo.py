"""Streamed reader of the Criteo click logs (Kaggle and Terabyte), plain or gzip-compressed.

A line holds 40 columns separated by tabs: the label, 13 counts (possibly negative or missing) and
26 categorical values of 8 hexadecimal digits (possibly missing). Nothing is read ahead and nothing
is kept: memory does not grow with the file, and a position in the stream is a file and a byte. A
resumed run seeks there (in a .gz file by decompressing up to it).
"""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from examples.dlrm.batch import NUM_DENSE, Batch, Position

NUM_CATEGORICAL = 26
COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL

# Distinct values of each categorical column in the Kaggle training file.
KAGGLE_SIZES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True)
class CriteoClicks:
    """A Criteo log as a stream of batches, in the order of the file.

    Training reads the lines in order, once. Evaluation reads the `evaluation_examples` lines that
    follow: examples that the model has not seen at that time. With `evaluation_path`
    it reads that file instead (as the Terabyte protocol does with its last day).

    Args:
      path: a file (.gz is decompressed), or a folder, all of whose files are read in natural order
        (day_2 before day_10).
      table_sizes: rows of each of the 26 tables. A value is hashed into 1 .. size - 1; row 0 stands
        for a missing one.
      batch_size: examples a step.
      evaluation_examples: size of the held-out set; a last batch that is not full is left out.
      evaluation_path: a file or folder to evaluate on, or None.
    """

    path: Path
    table_sizes: tuple[int, ...]
    batch_size: int
    evaluation_examples: int
    evaluation_path: Path | None = None
    start: Position = (0, 0)

    def __post_init__(self) -> None:
        if len(self.table_sizes) != NUM_CATEGORICAL or min(self.table_sizes) < 2:
            raise ValueError(
                f"table_sizes: got {len(self.table_sizes)} sizes {self.table_sizes}, expected "
                f"{NUM_CATEGORICAL} of at least 2 rows, one for each categorical column"
            )
        for path in (self.path, self.evaluation_path):
            if path is not None:
                _files(path)

    def stream(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Full batches from the position (file, byte) to the end of the last file."""
        return self._batches(_files(self.path), position)

    def evaluation(self, position: Position) -> Iterator[Batch]:
        """The held-out batches when training stands at `position`."""
        if self.evaluation_path is None:
            batches = self.stream(position)
        else:
            batches = self._batches(_files(self.evaluation_path), self.start)
        for _, (batch, _) in zip(
            range(max(1, self.evaluation_examples // self.batch_size)), batches, strict=False
        ):
            yield batch

    def best_scores(self, batch: Batch) -> None:
        """Unknown for real clicks."""
        del batch

    def _batches(self, files: list[Path], position: Position) -> Iterator[tuple[Batch, Position]]:
        rows: list[list[bytes]] = []
        for row, after in _rows(files, position):
            rows.append(row)
            if len(rows) == self.batch_size:
                yield self._parse(rows), after
                rows = []

    def _parse(self, rows: list[list[bytes]]) -> Batch:
        label = np.array([row[0] for row in rows]).astype(np.float32)
        counts = np.array(
            [value or b"0" for row in rows for value in row[1 : 1 + NUM_DENSE]]
        ).astype(np.float32)
        dense = np.log1p(np.maximum(counts, 0.0)).reshape(len(rows), NUM_DENSE)
        fields = [value for row in rows for value in row[1 + NUM_DENSE :]]
        # Eight digits a value, so that all of them decode in one call.
        values = np.frombuffer(
            bytes.fromhex(b"".join([v or b"00000000" for v in fields]).decode()), ">u4"
        )
        present = np.array([bool(v) for v in fields])
        sizes = np.array(self.table_sizes, np.uint64)
        hashed = _mix(values.reshape(len(rows), -1)) % (sizes - 1) + 1
        ids = np.where(present.reshape(len(rows), -1), hashed, 0)
        return Batch(dense, ids.astype(np.int32), label)


def parse_table_sizes(text: str) -> tuple[int, ...]:
    """Table sizes of a Criteo log from the command line.

    One size for all columns, 26 sizes, or "kaggle": the number of distinct values of each column.
    "kaggle:1000000" is the same with no table larger than that.

    >>> parse_table_sizes("kaggle:1000")[:4]
    (1000, 583, 1000, 1000)
    """
    name, _, cap = text.partition(":")
    if name == "kaggle":
        return tuple(min(size, int(cap)) if cap else size for size in KAGGLE_SIZES)
    sizes = tuple(int(size) for size in text.split(","))
    return sizes * NUM_CATEGORICAL if len(sizes) == 1 else sizes


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(
            f"data: {path} does not exist; expected a Criteo TSV file (or .gz), or a folder of them"
        )

    def natural(file: Path) -> list[tuple[str, int]]:
        return [(text, int(part or -1)) for text, part in re.findall(r"(\D*)(\d*)", file.name)]

    files = sorted((file for file in path.iterdir() if file.is_file()), key=natural)
    if not files:
        raise FileNotFoundError(
            f"data: the folder {path} is empty; expected Criteo TSV files (or .gz)"
        )
    return files


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if compressed else path.open("rb")  # type: ignore[return-value]


def _rows(files: list[Path], position: Position) -> Iterator[tuple[list[bytes], Position]]:
    """The columns of each line from `position` on, with the position behind the line."""
    first, offset = position
    for number in range(first, len(files)):
        with _open(files[number]) as file:
            file.seek(offset)
            for line in file:
                row = line.rstrip(b"\r\n").split(b"\t")
                _check(row, files[number], offset)
                offset += len(line)
                yield row, (number, offset)
        offset = 0


def _check(row: list[bytes], path: Path, offset: int) -> None:
    if len(row) != COLUMNS:
        hint = (
            "; the test files of the Kaggle challenge have no label"
            if len(row) == COLUMNS - 1
            else ""
        )
        raise ValueError(
            f"data: {path} at byte {offset} has {len(row)} columns, expected {COLUMNS}{hint}"
        )
    if row[0] not in (b"0", b"1"):
        raise ValueError(f"data: {path} at byte {offset} has the label {row[0]!r}, expected 0 or 1")
    for value in row[1 + NUM_DENSE :]:
        if len(value) not in (0, 8):
            raise ValueError(
                f"data: {path} at byte {offset} has the categorical value {value!r}, "
                "expected 8 hexadecimal digits"
            )


def _mix(values: np.ndarray) -> np.ndarray:
    """Mixes the bits, so that remainders by any size spread evenly (finaliser of splitmix64)."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
