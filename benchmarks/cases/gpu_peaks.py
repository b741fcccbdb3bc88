"""What the card itself can do, beside which all other figures stand."""

from benchmarks.gpu import peaks
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("gpu_peaks", "GPU: copies of memory and products of this card", gpu=True)
def run(settings: Settings, report: Report) -> None:
    card = peaks.of_this_card(settings.quick)
    report.figure("copy", card.bytes / 1e12, "TB/s", "copy of 1 GiB, read and written")
    report.figure("float32", card.flops / 1e12, "TFLOP/s", "product of matrices in float32")
    report.figure("tf32", card.tensor_flops / 1e12, "TFLOP/s", "the same in TF32")
