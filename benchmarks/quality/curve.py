"""How small can a table be? Trains matrix factorisation with tables of many sizes, and compares recall.

python -m benchmarks.quality.curve --data FOLDER [--seeds 3] [--ratios 10 50] [--tune] [--out FOLDER] [--help]

Every point is a separate run. Finished ones are stored in OUT/curve_results.json, and a run that was stopped continues
from its last checkpoint, so the same command may be started again at any time, or later with more seeds or ratios.
"""

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.quality import curve_report, data_sets, settings
from benchmarks.quality.files import write_json
from benchmarks.quality.settings import VARIANTS, Config
from benchmarks.quality.sizes import check_fits, split_ratio
from benchmarks.quality.train import train
from examples.conditions import conditions
from examples.retrieval import data
from examples.retrieval.data import Interactions
from examples.retrieval.settings import TT_RANK

RESULTS = "curve_results.json"
HELD_OUT = 0.2  # of each user's train items, to tune on
# All pairs are tried for every method alike, dense tables too, with the seed 0 and the first of the ratios. Learning
# rates are those of settings.py times these.
GRID = {"learning_rate": (1.0, 3.0), "l2": (3e-2, 0.2, 0.6)}


@dataclass(frozen=True)
class Method:
    """A line in the picture.

    Attributes:
        variant: kind of table, see `settings.VARIANTS`.
        order: of the ids, see `orders.make_order`.
        start: see `starts.make_start`; or a method whose trained rows are used, with the same seed.
        dtype: storage type of the table.
    """

    variant: str
    order: str = "none"
    start: str = "random"
    dtype: str = "float32"


METHODS = {
    "dense": Method("dense_fused"),
    "dense_spectral": Method("dense_fused", start="spectral"),
    "int8": Method("int8_fused"),
    "int4": Method("int4_fused"),
    "tt_residual": Method("tt_residual_fused", "start", "dense", "bfloat16"),
    "tt_residual_spectral": Method("tt_residual_fused", "start", "dense_spectral", "bfloat16"),
    "tt_residual_scratch": Method("tt_residual_fused", "start", "spectral", "bfloat16"),
    "tt2_spectral": Method("tt2_fused", "start", "spectral"),
    "tt2_order": Method("tt2_fused", "interactions"),
    "tt_order": Method("tt_fused", "interactions"),
    "tt": Method("tt_fused"),
    "low_rank": Method("low_rank", dtype="bfloat16"),
    "low_rank_spectral": Method("low_rank", start="spectral", dtype="bfloat16"),
    "low_rank_trained": Method("low_rank", start="dense", dtype="bfloat16"),
    "low_rank_trained_spectral": Method("low_rank", start="dense_spectral", dtype="bfloat16"),
    "quotient_remainder": Method("quotient_remainder", dtype="bfloat16"),
    "hashing": Method("hashing", dtype="bfloat16"),
}


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        data_set: name.
        method: one of `METHODS`.
        config: settings of the run; their `ratio` is None for dense tables.
        tuning: it is measured on a part of the train items that the run does not see, not on test items.
        teacher: the run whose rows this one starts from.
    """

    data_set: str
    method: str
    config: Config
    tuning: bool = False
    teacher: "Point | None" = None

    @property
    def name(self) -> str:
        """Unique for every combination of settings."""
        c = self.config
        determined = json.dumps(asdict(c), sort_keys=True)
        if self.teacher is not None:
            determined += self.teacher.name
        digest = hashlib.sha256(determined.encode()).hexdigest()[:8]
        size = "" if c.ratio is None else f"-{c.ratio:g}x"
        tuning = "-tuning" if self.tuning else ""
        return f"{self.data_set}-{self.method}{size}-seed{c.seed}{tuning}-{digest}"


# Their rows are kept.
_TEACHERS = {method.start for method in METHODS.values()} & METHODS.keys()


class Results:
    """Finished points by name, in a file that is always complete, even if the process is killed.

    Args:
        folder: of the file and of the runs that are not finished.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.path = folder / RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        self.points: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.points = json.loads(self.path.read_text())["points"]

    def get(self, point: Point, interactions: Interactions) -> dict[str, Any]:
        """The results of a point, which is trained now if necessary."""
        found = self.points.get(point.name)
        if found is None:
            found = self.points[point.name] = self._train(point, interactions)
            write_json(self.path, {**conditions(), "points": self.points})
            shutil.rmtree(self._run(point))
        return found

    def _train(self, point: Point, interactions: Interactions) -> dict[str, Any]:
        result = train_alone(
            point.config,
            interactions,
            self._run(point),
            trained=None if point.teacher is None else self._rows(point.teacher, interactions),
            save_rows=self._rows_file(point) if point.method in _TEACHERS else None,
        )
        kept = ("recall", "test_users", "parameters", "bytes", "order_bytes", "config")
        return {
            "data_set": point.data_set,
            "method": point.method,
            "tuning": point.tuning,
            "data": str(interactions),
            **{name: result[name] for name in kept},
        }

    def _rows(self, point: Point, interactions: Interactions) -> dict[str, np.ndarray]:
        """The trained rows of a point, which is trained again if their file was deleted."""
        if not self._rows_file(point).exists():
            self.points.pop(point.name, None)
            self.get(point, interactions)
        with np.load(self._rows_file(point)) as rows:
            return dict(rows)

    def _rows_file(self, point: Point) -> Path:
        return self._folder / "rows" / f"{point.name}.npz"

    def _run(self, point: Point) -> Path:
        return self._folder / "points" / point.name


def train_alone(*arguments: Any, **options: Any) -> dict[str, Any]:
    """`train` in a separate process: the compiled programs of hundreds of points would fill the memory of one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train, *arguments, **options).result()


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(argv)
    results = Results(options.out)
    files = data_sets.data_sets(options.data)
    chosen = options.datasets or list(files)
    if unknown := [name for name in chosen if name not in files]:
        raise SystemExit(f"--datasets: got {unknown}; expected some of {list(files)}")
    rows: list[dict[str, Any]] = []
    for name in chosen:
        rows += measure(name, data.load(*files[name]), options, results)
    text = curve_report.table(rows)
    (options.out / "curve.md").write_text(text + "\n")
    curve_report.picture(options.out / "curve.png", rows)
    print(f"\n{text}\n\nPicture: {options.out / 'curve.png'}")


def measure(
    name: str, interactions: Interactions, options: argparse.Namespace, results: Results
) -> list[dict[str, Any]]:
    """The results of all points of a data set; trains those that are missing."""
    sizes = [
        (method, ratio)
        for method in options.methods
        for ratio in ([None] if _is_whole(method) else options.ratios)
        if _fits(name, interactions, method, ratio, options.features)
    ]
    if options.tune:
        held = data_sets.hold_out(interactions, HELD_OUT)
        tuned = _tune(name, held, sizes, options, results)
    else:
        tuned = {method: {} for method in METHODS}
    points = [
        _point(name, method, ratio, seed, options, tuned)
        for seed in range(options.seeds)
        for method, ratio in sizes
    ]
    return list(_finish(f"{name}: points", points, interactions, results))


def _is_whole(method: str) -> bool:
    return VARIANTS[METHODS[method].variant].table in settings.WHOLE


def _point(
    name: str,
    method: str,
    ratio: float | None,
    seed: int,
    options: argparse.Namespace,
    tuned: dict[str, dict[str, float]],
    *,
    tuning: bool = False,
    **changes: Any,
) -> Point:
    settled = replace(config(options, method, ratio, seed), **{**tuned[method], **changes})
    start = METHODS[method].start
    teacher = None
    if start in METHODS:
        teacher = _point(name, start, None, seed, options, tuned, tuning=tuning)
    return Point(name, method, settled, tuning, teacher)


def config(options: argparse.Namespace, method: str, ratio: float | None, seed: int) -> Config:
    """The settings of a point that is not tuned."""
    chosen = METHODS[method]
    tuned: dict[str, Any] = dict(settings.tuned_for(VARIANTS[chosen.variant].table, chosen.start))
    if options.epochs is not None:
        tuned["epochs"] = options.epochs
    return Config(
        variant=chosen.variant,
        features=options.features,
        tt_rank=TT_RANK,
        loss="softmax",
        batch_size=options.batch_size,
        negatives=options.negatives,
        seed=seed,
        order=chosen.order,
        ratio=ratio,
        start=chosen.start,
        dtype=chosen.dtype,
        **tuned,
    )


def _tune(
    name: str,
    held: Interactions,
    sizes: Sequence[tuple[str, float | None]],
    options: argparse.Namespace,
    results: Results,
) -> dict[str, dict[str, float]]:
    """The best pair of `GRID` of each method, by recall on held-out train items; those of teachers first."""
    teachers = {METHODS[method].start for method, _ in sizes} & METHODS.keys()
    first = dict(reversed(sizes)) | dict.fromkeys(teachers)
    best: dict[str, dict[str, Any]] = {}
    # A teacher stands before those that it teaches.
    for method in sorted(first, key=list(METHODS).index):
        ratio = first[method]
        base = config(options, method, ratio, seed=0).learning_rate
        points = [
            _point(
                name, method, ratio, 0, options, {**best, method: {}},
                tuning=True, learning_rate=base * factor, l2=l2,
            )
            for factor in GRID["learning_rate"]
            for l2 in GRID["l2"]
        ]  # fmt: skip
        found = _finish(f"{name}: tuning {method}", points, held, results)
        row = max(found, key=lambda row: row["recall"])
        best[method] = {setting: row["config"][setting] for setting in GRID}
    return best


def _finish(
    label: str, points: Sequence[Point], interactions: Interactions, results: Results
) -> Iterable[dict[str, Any]]:
    with tqdm(points, desc=label, unit="point", position=1) as bar:
        for point in bar:
            bar.set_postfix_str(point.name)
            yield results.get(point, interactions)


def _fits(
    name: str, interactions: Interactions, method: str, ratio: float | None, features: int
) -> bool:
    """Whether such small tables exist; prints the reason if not."""
    chosen = METHODS[method]
    kind = VARIANTS[chosen.variant].table
    sizes = interactions.num_users, interactions.num_items
    try:
        for rows, own in zip(sizes, split_ratio(kind, sizes, features, ratio), strict=True):
            check_fits(kind, rows, features, own, chosen.dtype)
    except ValueError as error:
        print(f"{name}: leaves {method} out: {error}")
        return False
    return True


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.curve",
        description="Recall against bytes for dense tables and for tables compressed in several ways.",
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
    add("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    add("--ratios", nargs="+", type=float, default=[10.0, 50.0], help="dense bytes / bytes")
    add("--seeds", type=int, default=3, help="runs of each point, with the seeds 0, 1, ...")
    add("--tune", action="store_true", help="choose learning rate and l2 of every method, see GRID")
    add("--out", type=Path, default=Path("demo_output/curve"), help="results, table, picture")
    add("--epochs", type=int, help="default: those of settings.py")
    add("--features", type=int, default=64, help="columns of the tables")
    add("--batch-size", type=int, default=2048)
    add("--negatives", type=int, default=256, help="random items shared by a batch")
    options = parser.parse_args(argv)
    for name in ("seeds", "epochs", "features", "batch_size", "negatives"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: got {value}; expected at least 1")
    for ratio in options.ratios:
        if not ratio > 1:
            parser.error(f"--ratios: got {ratio}; expected numbers above 1")
    return options


if __name__ == "__main__":
    main()
