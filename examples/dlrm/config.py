"""The settings of a run, and the command line that sets them."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from examples.dlrm import mlperf
from examples.dlrm.data_criteo import parse_table_sizes

VARIANTS = {
    "dense_optax": "dense + optax",
    "dense_fused": "dense fused",
    "tt_optax": "TT + optax",
    "tt_fused": "TT fused",
    "mixed_fused": "mixed fused",
    "int8_fused": "int8 fused",
    "narrow_fused": "narrow fused",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of one training run."""

    model: str = "dlrm"
    data: str = "synthetic"
    eval_data: str | None = None
    tables: str = ""
    divide: int = 1
    id_order: str = "random"
    zipf: float = 1.25
    seed: int = 0
    features: int = 16
    tt_features: int | None = None
    tt_ranks: int = 2
    tt_min_rows: int = 100_000
    separate: bool = False
    cache: float = 0.0098
    cache_dtype: str = "bfloat16"
    cache_sample: int = 50
    cache_refresh: int = 0
    plan_ratio: float = 100.0
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)
    cross_layers: int = 3
    cross_rank: int = 512
    steps: int = 400
    batch_size: int = 8192
    devices: int = 1
    processes: int = 1
    table_rule: str = "adagrad"
    learning_rate: float = 0.05
    tt_learning_rate: float = 0.1
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
        if self.tables == "mlperf":
            sizes = mlperf.SIZES
        elif self.data == "synthetic":
            text = self.tables or "1000000,500000,200000,5000,100"
            sizes = tuple(int(n) for n in text.split(","))
        else:
            sizes = parse_table_sizes(self.tables or "kaggle")
        return tuple(-(-size // self.divide) for size in sizes)

    @property
    def multi_hot(self) -> tuple[int, ...]:
        """Ids that an example has in each table."""
        if self.tables == "mlperf" and self.data == "synthetic":
            return mlperf.MULTI_HOT
        return (1,) * len(self.table_sizes)

    def fingerprint(self) -> dict[str, object]:
        """The settings that a resumed run must share with the run that it continues."""
        free = {"steps", "eval_every", "checkpoint_dir", "checkpoint_every", "resume", "out"}
        settings = {k: v for k, v in dataclasses.asdict(self).items() if k not in free}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


# What is compared by default.
COMPARED = {
    "dlrm": ("dense_optax", "dense_fused", "tt_optax", "tt_fused"),
    "dcnv2": ("dense_fused", "tt_fused", "mixed_fused"),
}

# The settings that a model starts from. DCNv2's layers are those of MLPerf's benchmark.
MODELS = {
    "dlrm": Config(),
    "dcnv2": Config(
        model="dcnv2",
        tables="mlperf",
        divide=1000,
        features=128,
        tt_ranks=16,
        tt_min_rows=1000,
        cache=0.02,
        plan_ratio=20.0,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
        steps=100,
        batch_size=512,
        tt_learning_rate=0.05,
        mlp_learning_rate=1e-3,
        eval_every=50,
        eval_examples=16_384,
    ),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call of the program does."""

    config: Config
    variants: tuple[str, ...]
    big_table: tuple[int, int] | None  # rows, features
    worker: str | None  # the variant that this process trains on behalf of another
    # Of several such processes, the number of this one, and the port where they meet.
    member: tuple[int, int] | None = None


def parse(argv: Sequence[str] | None = None) -> Plan:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="dlrm",
        description="Trains DLRM with dense and tensor-train embedding tables and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", choices=tuple(MODELS), default="dlrm", help="other defaults follow it"
    )
    model = parser.parse_known_args(_without_help(argv))[0].model
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
        help="rows per table; Criteo: 26 sizes, one size, kaggle or kaggle:MAX; "
        "mlperf: those of MLPerf's benchmark, with several ids per example in synthetic data",
    )
    add(
        "--divide", type=_positive, metavar="N", help="divide the rows of all tables by this number"
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
        default=COMPARED[model],
        help="what to compare",
    )
    add("--features", type=_positive, metavar="D", help="width of every table")
    add(
        "--tt-features",
        type=_positive,
        metavar="K",
        help="width of the TT tables, and of the large tables of the narrow variant; a matrix [K, D], trained as the "
        "MLPs are, widens the rows of all of them; default: D, without a matrix",
    )
    add("--tt-ranks", type=_positive, metavar="R", help="ranks of the TT tables")
    add(
        "--tt-min-rows",
        type=_positive,
        metavar="N",
        help="smaller tables stay dense, with D columns, in the TT and narrow variants",
    )
    add("--separate", action="store_true", help="a tensor train for each table, not one for all")
    add(
        "--cache",
        type=_share,
        metavar="SHARE",
        help="row cache in front of every TT table, as a share of its rows, e.g. 0.01; 0: none",
    )
    add("--cache-dtype", choices=("bfloat16", "float32"), help="storage type of cached rows")
    add(
        "--cache-sample",
        type=_positive,
        metavar="STEPS",
        help="batches of the log by which the rows of the caches are chosen before training",
    )
    add(
        "--cache-refresh",
        type=int,
        metavar="STEPS",
        help="count in training and refresh the caches after so many steps, without a sample; 0: no",
    )
    add(
        "--plan-ratio",
        type=float,
        metavar="X",
        help="budget of the planner in the mixed variant: bytes of dense tables divided by X",
    )
    add("--bottom", type=_widths, metavar="W,...", help="hidden widths of the bottom MLP")
    add("--top", type=_widths, metavar="W,...", help="hidden widths of the top MLP")
    add("--cross-layers", type=_positive, metavar="N", help="dcnv2: layers of the cross network")
    add("--cross-rank", type=_positive, metavar="R", help="dcnv2: rank of the cross network")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=_positive)
    add("--batch-size", type=_positive, metavar="B")
    add(
        "--devices",
        type=_positive,
        metavar="N",
        help="divide the batch and the rows of dense tables over so many devices; "
        "on a CPU, they share its cores",
    )
    add(
        "--processes",
        type=_positive,
        metavar="N",
        help="train with so many processes of this machine, each of which has an equal part of the devices",
    )
    add(
        "--table-rule", choices=("adagrad", "sgd"), help="update rule of the tables, fused or optax"
    )
    add("--learning-rate", type=float, metavar="LR", help="of the tables")
    add(
        "--tt-learning-rate",
        type=float,
        metavar="LR",
        help="of the tables of the TT variants, small dense ones included",
    )
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
        default="4000000x64" if model == "dlrm" else "none",
        metavar="ROWSxD|none",
        help="also time a model of one such table",
    )
    parser.add_argument("--worker", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    # The number of this process and the port at which the processes meet.
    parser.add_argument("--member", nargs=2, type=int, help=argparse.SUPPRESS)

    parser.set_defaults(**dataclasses.asdict(MODELS[model]))
    args = vars(parser.parse_args(argv))
    apart = ("variants", "big_table", "worker", "member")
    variants, big_table, worker, member = (args.pop(name) for name in apart)
    config = Config(**args)
    if config.resume and config.checkpoint_dir is None:
        parser.error("--resume: there is nothing to resume from without --checkpoint-dir")
    if config.tt_features is not None and config.tt_features > config.features:
        parser.error(
            f"--tt-features: got {config.tt_features}, expected at most --features {config.features}"
        )
    if config.batch_size % config.devices:
        parser.error(
            f"--devices: got {config.devices}, expected a divisor of --batch-size {config.batch_size}"
        )
    if config.devices % config.processes:
        parser.error(
            f"--processes: got {config.processes}, expected a divisor of --devices {config.devices}"
        )
    dense = all(variant.startswith("dense") for variant in variants)
    if config.processes > 1 and (config.checkpoint_dir is not None or (config.cache and not dense)):
        parser.error(
            "--processes: expected no --checkpoint-dir, and --cache 0 or dense variants, beside it"
        )
    try:
        sizes = config.table_sizes
    except ValueError:
        parser.error(
            f"--tables: got {config.tables!r}, expected sizes such as "
            "1000000,5000 or mlperf (with Criteo data also kaggle or kaggle:1000000)"
        )
    if min(sizes) < 1:
        parser.error(f"--tables: got {config.tables!r}, expected at least one row in each table")
    return Plan(
        config, tuple(variants), big_table, worker, None if member is None else tuple(member)
    )


def _without_help(argv: Sequence[str] | None) -> list[str]:
    """The arguments less --help, which has to wait until all options are known."""
    arguments = sys.argv[1:] if argv is None else argv
    return [argument for argument in arguments if argument not in ("-h", "--help")]


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
