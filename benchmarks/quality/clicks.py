"""AUC and bytes of small tables: what `jax_tt.compress` makes of trained ones, and such that are trained from scratch.

python -m benchmarks.quality.clicks [--ratios 4 8 16 32 100 300 1000] [--seeds 1] [--out FILE] [--help]

Finished points stay in the file, and the same command measures the missing ones.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from benchmarks.quality import clicks_report
from benchmarks.quality.files import FOLDER
from examples.dlrm.batch import Batch, ClickData, Position
from examples.dlrm.config import Config
from examples.dlrm.create import ClickModel, create
from examples.dlrm.embeddings import CollectedTables
from examples.dlrm.learner import start
from examples.dlrm.train import evaluate, open_data, table_arrays, train

RESULTS = FOLDER / "clicks_results.json"
# Smaller than those of the default, as every point takes a search among tables.
TABLES = "50000,20000,10000,2000,100"
# The last batches that the dense model is trained on, on which small tables are compared with it.
METRIC_BATCHES = 2


class Trained:
    """A model with dense tables after training, and how often it has seen each id."""

    def __init__(self, config: Config, data: ClickData):
        self.learner, self.values = start(config, "dense_fused", data)
        self.position: Position = data.start
        self.counts = [np.zeros(rows, np.int64) for rows in data.table_sizes]
        self.seen: list[Batch] = []
        for batch, position in _first(data, config.steps):
            self.values, _ = self.learner.step(self.values, batch)
            self.position = position
            for counts, ids in zip(self.counts, batch.ids.T, strict=True):
                counts += np.bincount(ids, minlength=len(counts))
            self.seen = [*self.seen, batch][-METRIC_BATCHES:]
        own = _by_feature(self.learner.merge(self.values)[0])
        self.tables = [np.asarray(table.embedding[...]) for table in own]
        self.logits = self.predict({})

    def with_rows(self, rows: dict[int, Any]) -> list[jax.Array]:
        """The values with other rows in some tables."""
        model, optimizer = self.learner.merge(self.values)
        own = _by_feature(model)
        for t, changed in rows.items():
            own[t].embedding[...] = jnp.asarray(changed)
        return jax.tree.leaves(nnx.state((model, optimizer)))

    def predict(self, rows: dict[int, Any]) -> np.ndarray:
        """Log-odds of the last batches that were seen, with other rows in some tables."""
        values = self.with_rows(rows)
        return np.concatenate([self.learner.predict(values, batch) for batch in self.seen])


def _by_feature(model: ClickModel) -> list[Any]:
    """The dense tables of a model, in the order of the features."""
    assert isinstance(model.tables, CollectedTables)
    tables = model.tables.collection.tables
    return [tables[place.table] for place in model.tables.places]


def _first(data: ClickData, steps: int) -> Iterator[tuple[Batch, Position]]:
    for _, one in zip(range(steps), data.stream(data.start), strict=False):
        yield one


def compressed(known: Trained, ratio: float) -> tuple[list[np.ndarray], int, list[str]] | None:
    """Rows of all tables as `compress` makes them, their bytes, and what they are; None if no tables are that small.

    Tables take bytes in proportion to the sums of the roots of the counts of their rows; small tables are made first,
    and what they leave goes to the others.
    """
    weights = [np.sqrt(counts.astype(np.float64)) for counts in known.counts]
    left = int(sum(rows.nbytes for rows in known.tables) / ratio)
    shares = np.array([own.sum() for own in weights])
    rows, details, total = list(known.tables), ["dense"] * len(shares), 0
    for t in sorted(range(len(shares)), key=lambda t: len(rows[t])):
        budget = int(left * shares[t] / shares.sum())
        shares[t] = 0.0
        if budget < known.tables[t].nbytes:

            def metric(table: jax_tt.Table, state: dict[str, jax.Array], t: int = t) -> float:
                own = known.predict(
                    {t: jax.jit(jax_tt.tables.to_dense, static_argnums=0)(table, state)}
                )
                return -float(np.mean((own - known.logits) ** 2))

            try:
                found = jax_tt.compress(
                    known.tables[t],
                    max_bytes=budget,
                    metric=metric,
                    weights=weights[t],
                    progress=False,
                )
            except ValueError as error:
                print(f"leaves {ratio:g}x out: {error}", flush=True)
                return None
            rows[t] = np.asarray(jax_tt.tables.to_dense(found.table, found.state), np.float32)
            details[t] = f"{found.chosen.kind}, {found.chosen.detail}"
            used = found.chosen.nbytes
        else:
            used = known.tables[t].nbytes
        left, total = left - used, total + used
    return rows, total, details


def cached(config: Config, budget: int) -> Config | None:
    """Settings of a tensor train for the rows of all but the smallest tables, with the largest cache that fits.

    None if there is no room without one.
    """
    sizes = config.table_sizes

    def with_cache(share: float) -> Config:
        return dataclasses.replace(config, cache=share, tt_min_rows=1000)

    def nbytes(share: float) -> int:
        own = with_cache(share)
        model = nnx.eval_shape(lambda: create(own, "tt_fused", sizes))
        return sum(
            int(np.prod(x.shape)) * x.dtype.itemsize for _, x in table_arrays(nnx.state(model))
        )

    if nbytes(0.0) > budget:
        return None
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if nbytes(middle) <= budget else (low, middle)
    return with_cache(low)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(argv)
    points: dict[str, Any] = {}
    config = Config(tables=options.tables, steps=options.steps)
    settings = json.loads(json.dumps(dataclasses.asdict(config)))  # as a file has them
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if before["config"] != settings:
            raise SystemExit(
                f"--out: {options.out} has points of other settings; expected a new file, or the same command."
            )
        points = before["points"]
    for seed in range(options.seeds):
        for key, found in _measured(dataclasses.replace(config, seed=seed), options, points):
            points[key] = found
            print(key, found, flush=True)
            text = json.dumps({"config": settings, "points": points}, indent=1)
            options.out.write_text(text + "\n")
    print(clicks_report.table(list(points.values())))


def _measured(
    config: Config, options: argparse.Namespace, known_points: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The points of a seed that are missing."""
    wanted = [("dense", 1.0), ("int8", 1.0)]
    wanted += [(way, ratio) for ratio in options.ratios for way in ("compress", "cache")]
    data, dense = open_data(config), None
    for way, ratio in wanted:
        key = f"{way}, {ratio:g}x, seed {config.seed}"
        if key in known_points:
            continue
        began = time.perf_counter()
        details: list[str] = []
        if way in ("dense", "compress"):
            dense = dense or Trained(config, data)
            made = (dense.tables, 0, details) if way == "dense" else compressed(dense, ratio)
            if made is None:
                continue
            rows, nbytes, details = made
            scores = evaluate(
                dense.learner, dense.with_rows(dict(enumerate(rows))), data, dense.position
            )
            auc, best = scores.auc, scores.best_auc
            nbytes = nbytes or sum(own.nbytes for own in rows)
        else:
            total = sum(config.table_sizes) * config.features * 4
            own = config if way == "int8" else cached(config, int(total / ratio))
            if own is None:
                print(f"leaves {key} out: the smallest tables take more", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                result = train(
                    dataclasses.replace(own, out=folder),
                    "int8_fused" if way == "int8" else "tt_fused",
                )
            auc, best, nbytes = result.auc, result.best_auc, result.table_bytes
        yield (
            key,
            {
                "way": way,
                "ratio": ratio,
                "seed": config.seed,
                "bytes": nbytes,
                "auc": auc,
                "best_auc": best,
                "tables": details,
                "seconds": time.perf_counter() - began,
            },
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.clicks",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--ratios", nargs="+", type=float, default=[4.0, 8.0, 16.0, 32.0, 100.0, 300.0, 1000.0])
    add("--seeds", type=int, default=1)
    add("--tables", default=TABLES, help="rows of the tables of the synthetic log")
    add("--steps", type=int, default=Config().steps)
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
