"""Tables of 64-bit keys on a GPU."""

from benchmarks.gpu import contenders, kernels, work
from benchmarks.gpu.measure import measure, report_kernels
from benchmarks.gpu.timing import Replayed
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("gpu_hash", "GPU: table of 1,000,000 keys, 64 columns: find, step, insertion", gpu=True)
def run(settings: Settings, report: Report) -> None:
    for name, own in work.keys(settings.quick).items():
        makers = {
            "jax_tt find": lambda own=own: Replayed(*contenders.hash_find(own)),
            "jax_tt step, all keys in the table": lambda own=own: Replayed(
                *contenders.hash_step(own)
            ),
            "jax_tt step of a layer that inserts, all keys in the table": lambda own=own: Replayed(
                *contenders.hash_step_in_call(own)
            ),
            "jax_tt insertion of new keys, of which others leave": lambda own=own: Replayed(
                *contenders.hash_insert(own)
            ),
        }
        measure(name, own, makers, settings, report, streams=("uniform",))
        report_kernels(name, contenders.hash_step(own), own, kernels.DENSE_STAGES, report)
