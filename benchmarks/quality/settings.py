"""The kinds of tables that are compared, and what determines a run: more of both than in the example."""

from dataclasses import dataclass

from examples.retrieval import settings as example
from examples.retrieval.settings import Variant

VARIANTS = example.VARIANTS | {
    "int8_fused": Variant("8 bits a number, fused", "int8", fused=True),
    "int4_fused": Variant("4 bits a number, fused", "int4", fused=True),
    "tt2_fused": Variant("TT of two cores, fused", "tt2", fused=True),
    "tt_residual_fused": Variant("sum of TTs, fused", "tt_residual", fused=True),
    "low_rank": Variant("low rank", "low_rank", fused=True),
    "hashing": Variant("hashing", "hashing", fused=True),
    "quotient_remainder": Variant("quotient-remainder", "quotient_remainder", fused=True),
}
# Tables with a row for each id, whose size is determined by those of their numbers.
WHOLE = ("dense", "int8", "int4")

_SMALL = {"learning_rate": 3e-3, "l2": 3e-2, "init_std": 0.01, "epochs": 30}
# Chosen on the last fifth of each user's train items, never on test items: those of "dense" by `curve --tune`, the same
# pair on Amazon-book and Video, which "int8" and "int4" have as well, those of "tt" and "tt2" with few runs on
# Amazon-book. The others are where `curve --tune` starts from.
# The learning rate is that of the first step of Adam; it decreases linearly to 0.
TUNED: dict[str, dict[str, float]] = example.TUNED | {
    "int8": example.TUNED["dense"],
    "int4": example.TUNED["dense"],
    "tt2": example.TUNED["tt"],
    "low_rank": _SMALL,
    "hashing": _SMALL,
    "quotient_remainder": _SMALL,
}
# From spectral rows, where what has no entry cannot start. Those of "dense", "tt2" and "tt_residual" were chosen in
# the same way.
TUNED_SPECTRAL: dict[str, dict[str, float]] = {
    "dense": {"learning_rate": 9e-3, "l2": 0.2, "init_std": 0.25, "epochs": 30},
    "tt2": {"learning_rate": 5e-4, "l2": 1e-3, "init_std": 0.25, "epochs": 30},
    "tt_residual": {"learning_rate": 2e-3, "l2": 0.2, "init_std": 0.25, "epochs": 30},
    "low_rank": {"learning_rate": 3e-3, "l2": 3e-2, "init_std": 0.25, "epochs": 30},
}
# Where tables start from the rows of a trained dense table: so few epochs that what they hold is not lost to what the
# train items repeat. Chosen with few runs as the others; the start has its own length.
_FROM_TRAINED = {"learning_rate": 1e-3, "l2": 0.2, "init_std": 0.0, "epochs": 6}
TUNED_TRAINED: dict[str, dict[str, float]] = {
    "tt_residual": _FROM_TRAINED,
    "low_rank": _FROM_TRAINED,
}


@dataclass(frozen=True)
class Config(example.Config):
    """All that determines the final parameters, together with the data and the rows of a teacher.

    Attributes:
        loss: the only one that there is now; the names of finished points depend on it.
        ratio: float32 bytes of the dense tables over those of these tables, at least; None for tables with a row for
            each id, and for tensor trains of the rank `tt_rank`.
        start: "random", "spectral", or the method whose rows the tables start from.
        dtype: storage type; dense tables and single tensor trains are float32.
    """

    loss: str = "softmax"
    ratio: float | None = None
    start: str = "random"
    dtype: str = "float32"


def tuned_for(kind: str, start: str) -> dict[str, float]:
    """The tuned settings for a kind of table and a start."""
    starts = {"random": TUNED, "spectral": TUNED_SPECTRAL}
    return starts.get(start, TUNED_TRAINED)[kind]
