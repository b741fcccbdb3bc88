"""The variants, what determines a run, and the command line.

This module does not import JAX, which the process that waits for the others does not need.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kind of table, as `tables.make_table` names it, and the way it is updated."""

    label: str
    table: str
    fused: bool


VARIANTS = {
    "dense_optax": Variant("dense + optax", "dense", fused=False),
    "dense_fused": Variant("dense fused", "dense", fused=True),
    "int8_fused": Variant("8 bits a number, fused", "int8", fused=True),
    "int4_fused": Variant("4 bits a number, fused", "int4", fused=True),
    "tt_optax": Variant("TT + optax", "tt", fused=False),
    "tt_fused": Variant("TT fused", "tt", fused=True),
    "tt2_fused": Variant("TT of two cores, fused", "tt2", fused=True),
    "tt_residual_fused": Variant("sum of TTs, fused", "tt_residual", fused=True),
    "low_rank": Variant("low rank", "low_rank", fused=True),
    "hashing": Variant("hashing", "hashing", fused=True),
    "quotient_remainder": Variant("quotient-remainder", "quotient_remainder", fused=True),
}
COMPARED = ("dense_optax", "dense_fused", "tt_optax", "tt_fused")
# Tables with a row for each id, whose size is determined by those of their numbers.
WHOLE = ("dense", "int8", "int4")
_NEED_RATIO = ("tt2_fused", "low_rank", "hashing", "quotient_remainder")

# Chosen on the last fifth of each user's train items (`--validation 0.2`), never on test items: those of "dense" by
# `curve --tune`, the same pair on Amazon-book and Video, which "int8" and "int4" have as well, those of "tt" and "tt2"
# with few runs on Amazon-book. The others are where `curve --tune` starts from.
# The learning rate is that of the first step, of Adam; it falls linearly to 0.
TUNED: dict[str, dict[str, float]] = {
    "dense": {"learning_rate": 9e-3, "l2": 0.2, "init_std": 0.01, "epochs": 30},
    "int8": {"learning_rate": 9e-3, "l2": 0.2, "init_std": 0.01, "epochs": 30},
    "int4": {"learning_rate": 9e-3, "l2": 0.2, "init_std": 0.01, "epochs": 30},
    "tt": {"learning_rate": 5e-3, "l2": 1e-3, "init_std": 0.03, "epochs": 30},
    "tt2": {"learning_rate": 5e-3, "l2": 1e-3, "init_std": 0.03, "epochs": 30},
    "low_rank": {"learning_rate": 3e-3, "l2": 3e-2, "init_std": 0.01, "epochs": 30},
    "hashing": {"learning_rate": 3e-3, "l2": 3e-2, "init_std": 0.01, "epochs": 30},
    "quotient_remainder": {"learning_rate": 3e-3, "l2": 3e-2, "init_std": 0.01, "epochs": 30},
}
# With `--start spectral`, where what has no entry cannot start. Those of "dense", "tt2" and "tt_residual"
# were chosen in the same way; "tt" has those of "tt2".
TUNED_SPECTRAL: dict[str, dict[str, float]] = {
    "dense": {"learning_rate": 9e-3, "l2": 0.2, "init_std": 0.25, "epochs": 30},
    "tt": {"learning_rate": 5e-4, "l2": 1e-3, "init_std": 0.25, "epochs": 30},
    "tt2": {"learning_rate": 5e-4, "l2": 1e-3, "init_std": 0.25, "epochs": 30},
    "tt_residual": {"learning_rate": 2e-3, "l2": 0.2, "init_std": 0.25, "epochs": 30},
    "low_rank": {"learning_rate": 3e-3, "l2": 3e-2, "init_std": 0.25, "epochs": 30},
}
# Where tables start from the rows of a trained dense table: so few epochs that what they hold is not lost to what the
# train items repeat. Chosen with few runs as the others; the start has its own length.
TUNED_TRAINED: dict[str, dict[str, float]] = {
    "tt_residual": {"learning_rate": 1e-3, "l2": 0.2, "init_std": 0.0, "epochs": 6},
    "low_rank": {"learning_rate": 1e-3, "l2": 0.2, "init_std": 0.0, "epochs": 6},
}
# Products have small gradients where their factors are small: they need some epochs before they begin to learn.
QUICK_EPOCHS = {
    "dense": 3,
    "int8": 3,
    "int4": 3,
    "tt": 8,
    "tt2": 3,
    "low_rank": 8,
    "hashing": 3,
    "quotient_remainder": 8,
}
OFFERED = tuple(name for name, variant in VARIANTS.items() if variant.table in TUNED)
TT_RANK = 16
ORDERS = ("none", "interactions", "counts", "start")
STARTS = ("random", "spectral")
QUICK = {"test_users": 10_000, "evaluate_every": 1}


@dataclass(frozen=True)
class Config:
    """All that determines the final parameters, together with the data."""

    variant: str
    features: int
    tt_rank: int
    loss: str
    batch_size: int
    negatives: int
    learning_rate: float
    l2: float
    init_std: float
    epochs: int
    seed: int
    order: str = "none"
    ratio: float | None = None
    start: str = "random"
    dtype: str = "float32"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.retrieval.main",
        description="Trains matrix factorisation with dense and TT tables on an interaction file and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        help="interaction file, or a directory with one <name>_train.* and <name>_test.*",
    )
    add(
        "--test",
        type=Path,
        help="file of test items; without it each user's last item is the test item",
    )
    add(
        "--layout",
        choices=("auto", "lists", "pairs"),
        default="auto",
        help="of the files, see data.py",
    )
    add(
        "--validation",
        type=float,
        default=0.0,
        help="evaluate on this last part of each user's train items instead (for tuning)",
    )
    add(
        "--variants",
        default=",".join(COMPARED),
        help=f"comma-separated, some of {', '.join(OFFERED)}",
    )
    add(
        "--workdir",
        type=Path,
        default=Path("demo_output/retrieval"),
        help="checkpoints, table, picture",
    )
    add(
        "--fresh",
        action="store_true",
        help="delete earlier runs in the workdir instead of continuing them",
    )
    add("--quick", action="store_true", help="a few epochs, 10,000 test users")
    add("--features", type=int, default=64, help="columns of the tables")
    add("--tt-rank", type=int, default=TT_RANK, help="rank of the TT tables")
    add(
        "--ratio",
        type=float,
        help="dense bytes over bytes of each compressed table; TT tables without it have --tt-rank",
    )
    add(
        "--order",
        choices=ORDERS,
        default="none",
        help="of the ids of TT tables, from the train interactions, see orders.py",
    )
    add("--start", choices=STARTS, default="random", help="of the tables, see starts.py")
    add("--loss", choices=("softmax", "bpr"), default="softmax", help="see model.py")
    add("--batch-size", type=int, default=2048)
    add("--negatives", type=int, default=256, help="random items shared by a batch (softmax)")
    add(
        "--learning-rate",
        type=float,
        help="default: tuned for each kind of table, as --l2, --init-std, --epochs",
    )
    add("--l2", type=float)
    add("--init-std", type=float, help="standard deviation of the initial table entries")
    add("--epochs", type=int)
    add("--seed", type=int, default=0)
    add("--k", type=int, default=20, help="length of the ranked list")
    add(
        "--evaluate-every",
        type=int,
        help="epochs between points of the recall curve, 0: none; default 5",
    )
    add("--test-users", type=int, help="evaluate on so many random test users instead of all")
    add("--worker", choices=OFFERED, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.variants = options.variants.split(",")
    for name in options.variants:
        if name not in VARIANTS:
            parser.error(f"--variants: got {name!r}; expected some of {', '.join(OFFERED)}")
        if name not in OFFERED:
            parser.error(
                f"--variants: got {name}, which starts from the rows of a trained table, as curve.py gives it; "
                f"expected some of {', '.join(OFFERED)}"
            )
        if name in _NEED_RATIO and options.ratio is None:
            parser.error(f"--ratio: got none; expected one, as {name} has no size of its own")
        if options.start == "random" and options.order == "start":
            parser.error(
                "--order: got start with random rows, which have none; add --start spectral"
            )
        if options.start == "spectral" and VARIANTS[name].table not in TUNED_SPECTRAL:
            parser.error(f"--start: got spectral for {name}, which has no rows to start from")
    if options.ratio is not None and not options.ratio > 1:
        parser.error(f"--ratio: got {options.ratio}; expected a number above 1")
    for name in ("features", "tt_rank", "batch_size", "negatives", "k"):
        if getattr(options, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')}: got {getattr(options, name)}; expected at least 1"
            )
    if not 0.0 <= options.validation < 1.0:
        parser.error(f"--validation: got {options.validation}; expected a fraction below 1")
    defaults = QUICK if options.quick else {"evaluate_every": 5}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def tuned_for(kind: str, start: str) -> dict[str, float]:
    """The tuned settings for a kind of table and a start."""
    starts = {"random": TUNED, "spectral": TUNED_SPECTRAL}
    return starts.get(start, TUNED_TRAINED)[kind]


def config(options: argparse.Namespace, variant: str) -> Config:
    """The settings of one variant."""
    kind = VARIANTS[variant].table
    quick = {"epochs": QUICK_EPOCHS[kind]} if options.quick else {}
    tuned: dict[str, Any] = tuned_for(kind, options.start) | quick
    chosen = {name: getattr(options, name) for name in tuned if getattr(options, name) is not None}
    same = ("features", "tt_rank", "loss", "batch_size", "negatives", "seed")
    return Config(
        variant=variant,
        order=options.order if kind in ("tt", "tt2") else "none",
        start=options.start,
        ratio=None if kind in WHOLE else options.ratio,
        **{name: getattr(options, name) for name in same},
        **{**tuned, **chosen},
    )
