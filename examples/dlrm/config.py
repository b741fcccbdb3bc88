"""The settings of a run, and the command line that sets them."""

import argparse
import dataclasses
from collections.abc import Sequence

from examples.dlrm.data_criteo import parse_table_sizes

VARIANTS = {
    "dense_optax": "dense + optax",
    "dense_fused": "dense fused",
    "tt_optax": "TT + optax",
    "tt_fused": "TT fused",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of one training run."""

    data: str = "synthetic"
    eval_data: str | None = None
    tables: str = ""
    id_order: str = "clustered"
    zipf: float = 1.25
    seed: int = 0
    features: int = 16
    tt_ranks: int = 16
    tt_min_rows: int = 100_000
    cache: float = 0.0
    cache_refresh: int = 50
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)
    steps: int = 400
    batch_size: int = 8192
    table_rule: str = "adagrad"
    learning_rate: float = 0.1
    mlp_learning_rate: float = 1e-2
    eval_every: int = 100
    eval_examples: int = 131_072
    checkpoint_dir: str | None = None
    checkpoint_every: int = 100
    resume: bool = False
    out: str = "demo_output/dlrm"

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        if self.data == "synthetic":
            return tuple(
                int(n) for n in (self.tables or "1000000,500000,200000,5000,100").split(",")
            )
        return parse_table_sizes(self.tables or "kaggle")

    def fingerprint(self) -> dict[str, object]:
        """The settings that a resumed run must share with the run that it continues."""
        free = {"steps", "eval_every", "checkpoint_dir", "checkpoint_every", "resume", "out"}
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k not in free}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call of the program does."""

    config: Config
    variants: tuple[str, ...]
    big_table: tuple[int, int] | None  # rows, features
    worker: str | None  # the variant that this process trains on behalf of another


def parse(argv: Sequence[str] | None = None) -> Plan:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="dlrm",
        description="Trains DLRM with dense and tensor-train embedding tables and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        metavar="synthetic|PATH",
        help="planted click log, or Criteo TSV: file, .gz, folder",
    )
    add(
        "--eval-data",
        metavar="PATH",
        help="Criteo file to evaluate on; default: the lines after training's",
    )
    add(
        "--tables",
        metavar="ROWS,...",
        help="rows per table; Criteo: 26 sizes, one size, kaggle or kaggle:MAX",
    )
    add(
        "--id-order",
        choices=("clustered", "random"),
        help="synthetic: whether neighbouring ids belong to the same group",
    )
    add("--zipf", type=float, help="synthetic: exponent of the popularity")
    add("--seed", type=int, help="of data and initial parameters")

    add = parser.add_argument_group("model").add_argument
    add(
        "--variants",
        nargs="+",
        choices=tuple(VARIANTS),
        default=tuple(VARIANTS),
        help="what to compare",
    )
    add("--features", type=_positive, metavar="D", help="width of every table")
    add("--tt-ranks", type=_positive, metavar="R", help="ranks of the TT tables")
    add(
        "--tt-min-rows",
        type=_positive,
        metavar="N",
        help="smaller tables stay dense in the TT variants",
    )
    add(
        "--cache",
        type=_share,
        metavar="SHARE",
        help="row cache in front of every TT table, as a share of its rows, e.g. 0.01; 0: none",
    )
    add("--cache-refresh", type=_positive, metavar="STEPS", help="steps between two refreshes")
    add("--bottom", type=_widths, metavar="W,...", help="hidden widths of the bottom MLP")
    add("--top", type=_widths, metavar="W,...", help="hidden widths of the top MLP")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=_positive)
    add("--batch-size", type=_positive, metavar="B")
    add(
        "--table-rule", choices=("adagrad", "sgd"), help="update rule of the tables, fused or optax"
    )
    add("--learning-rate", type=float, metavar="LR", help="of the tables")
    add("--mlp-learning-rate", type=float, metavar="LR", help="of the MLPs, which Adam trains")
    add("--eval-every", type=_positive, metavar="STEPS")
    add("--eval-examples", type=int, metavar="N", help="held-out examples; 0 leaves evaluation out")
    add("--checkpoint-dir", metavar="DIR", help="save checkpoints here, one folder per variant")
    add("--checkpoint-every", type=_positive, metavar="STEPS")
    add(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in --checkpoint-dir",
    )

    add = parser.add_argument_group("report").add_argument
    add("--out", metavar="DIR", help="where the results and the picture go")
    add(
        "--big-table",
        type=_big,
        default="11000000x64",
        metavar="ROWSxD|none",
        help="also time a model of one such table",
    )
    parser.add_argument("--worker", choices=tuple(VARIANTS), help=argparse.SUPPRESS)

    parser.set_defaults(**dataclasses.asdict(Config()))
    args = vars(parser.parse_args(argv))
    variants, big_table, worker = (args.pop(name) for name in ("variants", "big_table", "worker"))
    config = Config(**args)
    if config.resume and config.checkpoint_dir is None:
        parser.error("--resume: there is nothing to resume from without --checkpoint-dir")
    try:
        sizes = config.table_sizes
    except ValueError:
        parser.error(
            f"--tables: got {config.tables!r}, expected sizes such as "
            "1000000,5000 (with Criteo data also kaggle or kaggle:1000000)"
        )
    if min(sizes) < 1:
        parser.error(f"--tables: got {config.tables!r}, expected at least one row in each table")
    return Plan(config, tuple(variants), big_table, worker)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: 0 to 1, e.g. 0.01")
    return share


def _widths(text: str) -> tuple[int, ...]:
    return tuple(_positive(width) for width in text.split(",") if width)


def _big(text: str) -> tuple[int, int] | None:
    if text == "none":
        return None
    rows, _, features = text.partition("x")
    return _positive(rows), _positive(features)
