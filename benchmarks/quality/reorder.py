"""Reorders the tables of a model during its training, and measures the effect.

python -m benchmarks.quality.reorder --data TRAIN_FILE_OR_DIRECTORY [--at 10] [--out FILE] [--help]

TT tables are trained for some epochs with the original order of ids. Then one copy of the model continues unchanged,
and another one is first reordered by the train interactions.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

from flax import nnx
from tqdm import tqdm

from benchmarks.quality.files import write_json
from examples.conditions import conditions
from examples.retrieval import data, settings
from examples.retrieval.data import Interactions
from examples.retrieval.evaluate import Recall
from examples.retrieval.model import make_model, make_order, steps_per_epoch
from examples.retrieval.settings import TUNED, Config
from examples.retrieval.train import EpochLoop, Training, evaluate


def compare(config: Config, interactions: Interactions, at: int) -> dict[str, Any]:
    """Recall@20 of both ways, and how far rows are moved.

    Args:
        config: of fused TT tables without an order.
        at: epochs before the tables are reordered.
    """
    recall = Recall(interactions, 20, None)
    epochs, steps = range(1, config.epochs + 1), steps_per_epoch(config, interactions)
    with tqdm(total=(2 * config.epochs - at) * steps, unit="step") as bar:

        def train(training: Training, some: range) -> Training:
            graphdef, state = nnx.split(training)
            loop = EpochLoop(config, interactions, graphdef)
            for epoch in some:
                state = loop(state, epoch, bar)[0]
            return nnx.merge(graphdef, state)

        def measure(training: Training) -> float:
            return evaluate(training.model, recall)

        model = make_model(config, interactions)
        training = train(Training(config, interactions, model), epochs[:at])
        moved = copy.deepcopy(training)
        result: dict[str, Any] = {"at": at, "epochs": config.epochs, "before": measure(training)}
        for ids, table in (("users", moved.model.users), ("items", moved.model.items)):
            order = make_order("interactions", interactions, ids, table.tt_shape)
            found = table.reorder(order)
            result[f"{ids}_error"] = found.relative_error
        result["right_after"] = measure(moved)
        result["reordered"] = measure(train(moved, epochs[at:]))
        result["as_it_was"] = measure(train(training, epochs[at:]))
    return result


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parse(argv)
    interactions = data.load(options.data)
    epochs = {} if options.epochs is None else {"epochs": options.epochs}
    config = Config(
        variant="tt_fused",
        features=options.features,
        tt_rank=options.tt_rank,
        batch_size=options.batch_size,
        negatives=256,
        seed=options.seed,
        **{**TUNED["tt"], **epochs},
    )
    result = compare(config, interactions, options.at)
    figures = {"data": str(interactions), **conditions(), **result}
    if options.out is not None:
        write_json(options.out, figures)
    print(json.dumps(figures, indent=1))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.reorder",
        description="Reorders TT tables in the middle of training; compares with training on as they are.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="interaction file, or a directory with one pair")
    add("--at", type=int, default=10, help="epochs before the tables are reordered")
    add("--epochs", type=int, help=f"of all; default {TUNED['tt']['epochs']}")
    add("--features", type=int, default=64, help="columns of the tables")
    add("--tt-rank", type=int, default=settings.TT_RANK, help="rank of the tables")
    add("--batch-size", type=int, default=2048)
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="file of results, JSON")
    options = parser.parse_args(argv)
    total = TUNED["tt"]["epochs"] if options.epochs is None else options.epochs
    if not 0 < options.at < total:
        parser.error(f"--at: got {options.at}; expected a number between 0 and the {total} epochs")
    return options


if __name__ == "__main__":
    main()
