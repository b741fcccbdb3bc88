"""How fast do tables learn? Recall after every epoch, dense and TT from scratch, on several data sets.

python -m benchmarks.quality.learning --data FOLDER [--out FILE] [--picture FILE] [--help]

In addition to the data sets of the folder, a synthetic one of groups is used (`data.write_synthetic`). No table starts
from another run. Finished runs stay in the file, and the same command trains the missing ones.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.quality import curve, curve_report, data_sets
from benchmarks.quality.files import FOLDER, write_json
from benchmarks.quality.settings import Config
from examples.conditions import conditions
from examples.retrieval import data
from examples.retrieval.data import Interactions

METHODS = ("dense", "tt_residual_scratch", "tt2_order", "tt")
RATIO = 10.0
RESULTS = FOLDER / "learning_results.json"
_GROUPS = {"num_users": 20_000, "num_items": 8_000, "groups": 100}


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(argv)
    runs: dict[str, Any] = {}
    if options.out.exists():
        runs = json.loads(options.out.read_text())["runs"]
    for name, interactions in sets(options.data):
        for method in METHODS:
            run = f"{name}: {method}"
            if run in runs:
                continue
            config = config_of(method, options.epochs)
            tqdm.write(f"{run}, {interactions}")
            recall = recall_by_epoch(config, interactions)
            runs[run] = {
                "data_set": name,
                "method": method,
                "recall": recall,
                "config": asdict(config),
            }
            write_json(options.out, {**conditions(), "runs": runs})
    rows = list(runs.values())
    print(table(rows))
    picture(options.picture, rows)


def sets(folder: Path) -> Sequence[tuple[str, Interactions]]:
    """The data sets of a folder, and one of groups."""
    found = [(name, data.load(*files)) for name, files in data_sets.data_sets(folder).items()]
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "groups.txt.gz"
        data.write_synthetic(path, **_GROUPS)
        return [*found, ("groups", data.load(path))]


def config_of(method: str, epochs: int | None) -> Config:
    """The settings of `curve` without tuning, at its 10 times; "tt" has the rank of settings.py."""
    argv = ["--data", ".", *(["--epochs", str(epochs)] if epochs else [])]
    ratio = RATIO if method.startswith(("tt2", "tt_residual")) else None
    return curve.config(curve.parse(argv), method, ratio, seed=0)


def recall_by_epoch(config: Config, interactions: Interactions) -> list[list[float]]:
    """[epoch, recall@20 on up to 10,000 test users] before training and after every epoch."""
    with tempfile.TemporaryDirectory() as workdir:
        result = curve.train_alone(
            config,
            interactions,
            Path(workdir) / "run",
            test_users=10_000,
            evaluate_every=1,
            evaluate_start=True,
        )
    return result["recall_curve"]


def epochs_to(recall: Sequence[Sequence[float]], goal: float) -> int | None:
    """The first epoch whose recall is at least this."""
    return next((int(epoch) for epoch, value in recall if value >= goal), None)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: when each method reaches half of the final recall of the dense table."""
    dense = {row["data_set"]: row["recall"][-1][1] for row in rows if row["method"] == "dense"}
    lines = ["| data | tables | epochs to half of dense | at the end |", "|---|---|---|---|"]
    for row in rows:
        epochs = epochs_to(row["recall"], dense[row["data_set"]] / 2)
        shown = "never" if epochs is None else str(epochs)
        label = curve_report.LABELS[row["method"]]
        lines.append(f"| {row['data_set']} | {label} | {shown} | {row['recall'][-1][1]:.4f} |")
    return "\n".join(lines)


def picture(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The same as a PNG: one panel per data set; the dotted line is half of the final dense recall."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["data_set"] for row in rows))
    figure, axes = plt.subplots(
        len(names),
        1,
        figsize=(curve_report.WIDTH, 3.2 * len(names)),
        squeeze=False,
        layout="constrained",
    )
    for axis, name in zip(axes.flat, names, strict=True):
        for row in (row for row in rows if row["data_set"] == name):
            epochs, recall = zip(*row["recall"], strict=True)
            colour, marker = curve_report.STYLES[row["method"]]
            label = curve_report.LABELS[row["method"]]
            axis.plot(epochs, recall, color=colour, marker=marker, markersize=4, label=label)
            if row["method"] == "dense":
                axis.axhline(recall[-1] / 2, color=colour, linestyle=":", linewidth=1)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("epoch")
        axis.set_ylabel("recall@20")
        axis.set_title(name)
    lines = axes.flat[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower left", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.learning",
        description="Recall after every epoch for dense and TT tables that are trained from scratch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        help="folder of interaction files, see data_sets.data_sets",
    )
    add("--out", type=Path, default=RESULTS, help="results")
    add("--picture", type=Path, default=Path("demo_output/learning.png"))
    add("--epochs", type=int, help="default: those of settings.py")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
