"""The variants, what determines a run, and the command line.

This module does not import JAX, which the process that waits for the others does not need.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kind of table, and whether its update is fused into the backward pass."""

    label: str
    table: str
    fused: bool


VARIANTS = {
    "dense_optax": Variant("dense + optax", "dense", fused=False),
    "dense_fused": Variant("dense fused", "dense", fused=True),
    "tt_optax": Variant("TT + optax", "tt", fused=False),
    "tt_fused": Variant("TT fused", "tt", fused=True),
}
# Chosen on the last fifth of each user's train items, never on test items. The learning rate is
# that of the first step of Adam; it decreases linearly to 0.
TUNED: dict[str, dict[str, float]] = {
    "dense": {"learning_rate": 9e-3, "l2": 0.2, "init_std": 0.01, "epochs": 30},
    "tt": {"learning_rate": 5e-3, "l2": 1e-3, "init_std": 0.03, "epochs": 30},
}
# Products have small gradients where their factors are small: they need some epochs before they begin to learn.
QUICK_EPOCHS = {"dense": 3, "tt": 8}
TT_RANK = 16
ORDERS = ("none", "interactions", "counts")


@dataclass(frozen=True)
class Config:
    """All that determines the final parameters, together with the data."""

    variant: str
    features: int
    tt_rank: int
    batch_size: int
    negatives: int
    learning_rate: float
    l2: float
    init_std: float
    epochs: int
    seed: int
    order: str = "none"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.retrieval.main",
        description="Trains matrix factorisation with dense and TT tables on an interaction file and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="interactions, see data.py: a file or a directory")
    add("--test", type=Path, help="test items; without it the last item of each user")
    add("--layout", choices=("auto", "lists", "pairs"), default="auto", help="of the files")
    add("--variants", default=",".join(VARIANTS), help="comma-separated")
    add("--workdir", type=Path, default=Path("demo_output/retrieval"), help="of all outputs")
    add("--fresh", action="store_true", help="delete earlier runs in the workdir")
    add("--quick", action="store_true", help="a few epochs, 10,000 test users")
    add("--features", type=int, default=64, help="columns of the tables")
    add("--tt-rank", type=int, default=TT_RANK, help="rank of the TT tables")
    add("--order", choices=ORDERS, default="none", help="of the ids of TT tables, see model.py")
    add("--batch-size", type=int, default=2048)
    add("--negatives", type=int, default=256, help="random items that a batch shares")
    add("--learning-rate", type=float, help="of the first step; default: tuned for each variant")
    add("--l2", type=float, help="weight of the squares of rows; default: tuned")
    add("--init-std", type=float, help="of the initial table entries; default: tuned")
    add("--epochs", type=int, help="default: tuned")
    add("--seed", type=int, default=0)
    add("--k", type=int, default=20, help="length of the ranked list")
    add("--evaluate-every", type=int, help="epochs between points of the curve; default 5; 0: none")
    add("--test-users", type=int, help="evaluate on so many random test users instead of all")
    add("--worker", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.variants = options.variants.split(",")
    for name in options.variants:
        if name not in VARIANTS:
            parser.error(f"--variants: got {name!r}; expected some of {', '.join(VARIANTS)}")
    for name in ("features", "tt_rank", "batch_size", "negatives", "k"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: got {getattr(options, name)}; expected at least 1")
    for name in ("data", "test"):
        path = getattr(options, name)
        if path is not None and not path.exists():
            parser.error(f"--{name}: {path} does not exist; expected a file of interactions")
    if options.evaluate_every is None:
        options.evaluate_every = 1 if options.quick else 5
    if options.quick and options.test_users is None:
        options.test_users = 10_000
    return options


def config(options: argparse.Namespace, variant: str) -> Config:
    """The settings of one variant."""
    kind = VARIANTS[variant].table
    tuned: dict[str, Any] = TUNED[kind] | ({"epochs": QUICK_EPOCHS[kind]} if options.quick else {})
    chosen = {name: getattr(options, name) for name in tuned if getattr(options, name) is not None}
    same = ("features", "tt_rank", "batch_size", "negatives", "seed")
    return Config(
        variant=variant,
        order=options.order if kind == "tt" else "none",
        **{name: getattr(options, name) for name in same},
        **{**tuned, **chosen},
    )
