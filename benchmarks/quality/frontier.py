"""Bytes and recall of tables that are made from trained ones: what `jax_tt.compress` chooses, and others.

python -m benchmarks.quality.frontier --data FOLDER [--ratios 30 15 8 50 100] [--seeds 1] [--out FILE] [--help]

Every pair of small tables is finetuned to the scores of the dense pair that it was made from (`distill`), except those
that are made from rows by least squares. Finished points stay in the file, and the same command measures the missing
ones.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.quality import curve, data_sets, frontier_report, least_squares
from benchmarks.quality.distill import Small, distill
from benchmarks.quality.files import FOLDER, write_json
from benchmarks.quality.frontier_tables import METHODS, Source, of_bits
from examples.conditions import conditions
from examples.retrieval import data
from examples.retrieval.data import Interactions
from examples.retrieval.evaluate import Recall
from jax_tt.tables import QuantizedTable

RESULTS = FOLDER / "frontier_results.json"
RATES = (
    1e-3,
    3e-3,
)  # each method's is chosen at the first ratio, by the agreement with the teacher
EPOCHS = 6
TRAINED = "trained"
LEAST_SQUARES = "least_squares"
# Bits of a number while tables are trained.
BITS = {"dense": 32, "int8": 8, "int4": 4, LEAST_SQUARES: least_squares.BITS}
TEST_USERS = 10_000
AGREEMENT_USERS = 2_000


class Bench:
    """A data set with the trained tables of a seed, of a method of `curve`."""

    def __init__(
        self, name: str, interactions: Interactions, seed: int, folder: Path, trained: str
    ):
        self.name, self.data, self.seed, self.trained = name, interactions, seed, trained
        self.rows = self._teacher(folder, trained)
        self.counts = (
            np.bincount(interactions.train_users, minlength=interactions.num_users),
            np.bincount(interactions.train_items, minlength=interactions.num_items),
        )
        self._recall = Recall(interactions, 20, TEST_USERS)
        self._agreement = Recall(self._ranked_by_teacher(), 20)
        self.trained_recall = self.recall(self.rows)
        dense = trained == "dense"
        self.dense_recall = (
            self.trained_recall if dense else self.recall(self._teacher(folder, "dense"))
        )

    def recall(self, rows: Sequence[Any]) -> float:
        """recall@20 on test users."""
        return _measured(self._recall, rows)

    def agreement(self, rows: Sequence[Any]) -> float:
        """The share of the teacher's first 20 items that are among the first 20; needs no test items."""
        return _measured(self._agreement, rows)

    def _teacher(self, folder: Path, trained: str) -> tuple[np.ndarray, np.ndarray]:
        kind = "" if trained == "dense" else f"{trained}-"
        path = folder / f"{self.name}-{kind}{self.seed}.npz"
        if not path.exists() and trained == LEAST_SQUARES:
            width = curve.parse(["--data", str(folder)]).features
            users, items = least_squares.rows_in_turns(self.data, width, self.seed)
            np.savez(path, users=users, items=items)
        elif not path.exists():
            options = curve.parse(["--data", str(folder)])
            config = curve.config(options, trained, None, self.seed)
            curve.train_alone(config, self.data, folder / path.stem, save_rows=path)
        with np.load(path) as rows:
            return rows["users"], rows["items"]

    def _ranked_by_teacher(self) -> Interactions:
        users = np.random.default_rng(1).choice(
            self.data.num_users, min(AGREEMENT_USERS, self.data.num_users), replace=False
        )
        users = np.sort(users).astype(np.int32)
        scores = self.rows[0][users] @ self.rows[1].T
        begin, end = (
            np.searchsorted(self.data.train_users, users, side) for side in ("left", "right")
        )
        for row, first, last in zip(scores, begin, end, strict=True):
            row[self.data.train_items[first:last]] = -np.inf
        k = min(20, self.data.num_items)
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k].astype(np.int32)
        own = self.data
        return Interactions(
            own.train_users,
            own.train_items,
            np.repeat(users, k),
            best.ravel(),
            own.num_users,
            own.num_items,
        )


def _measured(recall: Recall, rows: Sequence[Any]) -> float:
    users, items = (np.asarray(own, np.float32) for own in rows)
    return recall(lambda ids: users[np.asarray(ids)], jnp.asarray(items))


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(argv)
    points: dict[str, Any] = {}
    if options.out.exists():
        points = json.loads(options.out.read_text())["points"]
    files = data_sets.data_sets(options.data)
    known = options.trained
    suffix = "" if known == "dense" else f", from {known}"
    for seed in range(options.seeds):
        for name in options.datasets or list(files):
            bench = None
            for ratio, method in _sizes(options):
                key = f"{name}: {method}, {ratio:g}x, seed {seed}{suffix}"
                if key in points:
                    continue
                bench = bench or Bench(name, data.load(*files[name]), seed, options.teachers, known)
                found = measure(bench, method, ratio, _rates(points, name, method, known))
                if found is None:
                    continue
                points[key] = found
                print(key, found, flush=True)
                write_json(options.out, {**conditions(), "points": points})
    print(frontier_report.table(list(points.values())))


def _sizes(options: argparse.Namespace) -> list[tuple[float, str]]:
    """Ratios with methods; tables as they were trained have just one ratio."""
    made = [method for method in options.methods if method != TRAINED]
    return [(ratio, method) for ratio in options.ratios for method in made] + [
        (1.0, TRAINED) for method in options.methods if method == TRAINED
    ]


def measure(
    bench: Bench, method: str, ratio: float, rates: Sequence[float]
) -> dict[str, Any] | None:
    """A point of the file; None if no such tables are that small."""
    began = time.perf_counter()
    of_point = {
        "data_set": bench.name,
        "method": method,
        "ratio": ratio,
        "seed": bench.seed,
        "dense_bytes": sum(rows.nbytes for rows in bench.rows),
        "dense_recall": bench.dense_recall,
        "trained": bench.trained,
        "trained_recall": bench.trained_recall,
    }
    if method == TRAINED:
        bits = BITS[bench.trained]
        sizes = [
            rows.nbytes if bits == 32 else QuantizedTable(len(rows), rows.shape[1], bits).nbytes
            for rows in bench.rows
        ]
        return {**of_point, "recall": bench.trained_recall, "bytes": sum(sizes)}
    made = tables(bench, method, ratio)
    if made is None:
        return None
    nbytes = sum(one.nbytes for one in made)
    start = bench.recall([one.dense() for one in made])
    of_point |= {"bytes": nbytes, "recall_before": start}
    of_point |= {"users": made[0].detail, "items": made[1].detail}
    if (
        bench.trained == LEAST_SQUARES
    ):  # on held-out train items, finetuning did not help both data sets
        return {**of_point, "recall": start, "seconds": time.perf_counter() - began}
    tried = {}
    for rate in rates:
        params = distill(
            made, bench.rows, bench.data, learning_rate=rate, epochs=EPOCHS, seed=bench.seed
        )
        rows = [one.dense(own) for one, own in zip(made, params, strict=True)]
        tried[rate] = bench.agreement(rows), rows
    rate = max(tried, key=lambda rate: tried[rate][0])
    return {
        **of_point,
        "recall": bench.recall(tried[rate][1]),
        "agreement": tried[rate][0],
        "learning_rate": rate,
        "seconds": time.perf_counter() - began,
    }


def tables(bench: Bench, method: str, ratio: float) -> tuple[Small, Small] | None:
    """Tables of users and of items, which together are at least so much smaller than the dense ones.

    Tables take bytes in proportion to the roots of the counts of their rows, or of the mean count where all rows take
    as many; what the table of items leaves goes to the users.
    """
    total = int(sum(rows.nbytes for rows in bench.rows) / ratio)
    if method == "rounding":  # to the most bits with which both tables fit
        for bits in (8, 4, 3, 2):
            users, items = (of_bits(rows, bits) for rows in bench.rows)
            if users.nbytes + items.nbytes <= total:
                return users, items
        print(f"{bench.name}: leaves {method} at {ratio:g}x out: 2 bits take more", flush=True)
        return None
    # With few bits a number, rows of tables of the library that differ in their counts may differ in bytes.
    differ = method == "auto" and ratio > 32 / 3
    shares = [
        np.sqrt(own).sum() if differ else len(own) * np.sqrt(own.mean()) for own in bench.counts
    ]
    budget = int(total * shares[1] / sum(shares))
    try:
        items = METHODS[method](_source(bench, 1), budget)
        users = METHODS[method](_source(bench, 0), total - items.nbytes)
    except ValueError as error:
        print(f"{bench.name}: leaves {method} at {ratio:g}x out: {error}", flush=True)
        return None
    return users, items


def _source(bench: Bench, side: int) -> Source:
    def metric(rows: np.ndarray) -> float:
        pair = [rows, bench.rows[1]] if side == 0 else [bench.rows[0], rows]
        return bench.agreement(pair)

    weights = np.sqrt(bench.counts[side].astype(np.float64))
    return Source(bench.rows[side], weights, metric, bench.seed)


def _rates(points: dict[str, Any], name: str, method: str, trained: str) -> Sequence[float]:
    known = [
        one["learning_rate"]
        for one in points.values()
        if (one["data_set"], one["method"], one.get("trained", "dense")) == (name, method, trained)
        and "learning_rate" in one
    ]
    return known[:1] or RATES


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.frontier",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        help="folder of interaction files, see data_sets.data_sets",
    )
    add("--datasets", nargs="+", help="names of data sets; all of the folder without it")
    add(
        "--methods",
        nargs="+",
        choices=[*METHODS, "rounding", TRAINED],
        default=[*METHODS, "rounding"],
        help="ways to make small tables; trained: those that they are made from",
    )
    add("--ratios", nargs="+", type=float, default=[30.0, 15.0, 8.0, 50.0, 100.0])
    add("--seeds", type=int, default=1)
    add(
        "--trained",
        choices=tuple(BITS),
        default="dense",
        help="tables that small ones are made from",
    )
    add("--teachers", type=Path, default=Path("demo_output/teachers"), help="their rows")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
