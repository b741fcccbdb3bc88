"""The variants, what determines a run, and the command line.

This module does not import JAX, which the process that waits for the others does not need.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """A way to give rows to ids.

    Attributes:
        label: in the report.
        colour: there.
        learning_rate: the best of `--tune` on the synthetic stream; for tables that never evict, that of "dynamic".
    """

    label: str
    colour: str
    learning_rate: float


# Colours that stay apart for colour-blind readers.
VARIANTS = {
    "hashing": Variant("fixed hashing", "#737373", 0.1),
    "dynamic": Variant("dynamic", "#2171b5", 0.1),
    "tiers": Variant("dynamic + tiers", "#238b45", 0.1),
    "tt": Variant("dynamic + TT", "#d94801", 0.05),
    "unlimited": Variant("a row for every id", "black", 0.1),
}
LEARNING_RATES = (0.025, 0.05, 0.1, 0.2, 0.4)
# Another stream than the ones that are reported.
TUNING_SEED = 1000


@dataclass(frozen=True)
class Config:
    """All that determines the numbers of a run, together with the stream."""

    variant: str
    features: int
    budget: int  # bytes
    learning_rate: float
    init_std: float
    host_share: float
    depth: int
    batch_size: int
    seed: int


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.streaming.main",
        description="Trains a click model on a stream of 64-bit ids whose vocabulary drifts, with several kinds of "
        "tables within the same memory, and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="interaction file, see files.py; default: a synthetic stream")
    add("--variants", default=",".join(VARIANTS), help="comma-separated")
    add("--budget", type=float, default=1.0, help="bytes on the device in millions, all counted")
    add("--steps", type=int, help="batches; default 2000, or all of the file")
    add("--batch-size", type=int, default=256)
    add("--features", type=int, default=32, help="columns of the tables")
    add("--init-std", type=float, default=0.05, help="standard deviation of initial rows")
    add("--learning-rate", type=float, help="default: tuned for each variant")
    add(
        "--host-share", type=float, default=2.0, help="rows in host memory over those on the device"
    )
    add("--depth", type=int, default=1, help="batches whose rows are fetched ahead, for tiers")
    add("--windows", type=int, default=20, help="parts of the stream that are evaluated")
    add("--seeds", type=int, default=1, help="number of streams")
    add("--seed", type=int, default=0, help="of the first stream")
    add("--tune", action="store_true", help="compare learning rates on another stream, and end")
    add("--fresh", action="store_true", help="delete earlier runs instead of continuing them")
    add("--workdir", type=Path, default=Path("demo_output/streaming"), help="results")
    add("--worker", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.variants = options.variants.split(",")
    for name in options.variants:
        if name not in VARIANTS:
            parser.error(f"--variants: got {name!r}; expected some of {', '.join(VARIANTS)}")
    for name in ("steps", "batch_size", "features", "windows", "seeds"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: got {getattr(options, name)}; expected at least 1")
    for name in ("budget", "host_share"):
        if not getattr(options, name) > 0:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: got {getattr(options, name)}; expected a number above 0")
    if options.depth < 0:
        parser.error(f"--depth: got {options.depth}; expected at least 0")
    return options


def config(options: argparse.Namespace, variant: str) -> Config:
    """The settings of one variant."""
    rate = options.learning_rate
    return Config(
        variant=variant,
        features=options.features,
        budget=int(options.budget * 1e6),
        learning_rate=VARIANTS[variant].learning_rate if rate is None else rate,
        init_std=options.init_std,
        host_share=options.host_share,
        depth=options.depth,
        batch_size=options.batch_size,
        seed=options.seed,
    )
