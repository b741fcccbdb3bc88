"""The results of a training run: written by the process that trained, read by the report."""

import contextlib
import dataclasses
import json
import resource
import sys
from pathlib import Path


@dataclasses.dataclass
class Result:
    """Figures of one variant."""

    variant: str
    steps: int
    examples: int
    auc: float  # on the held-out examples; nan where none were asked for
    log_loss: float
    best_auc: float | None  # that of the planted probability, where it is known
    curve: list[tuple[int, float]]  # (step, AUC)
    table_parameters: int
    table_bytes: int  # the tables alone
    state_bytes: int  # every parameter and every optimizer slot
    step_ms: float  # median
    peak_bytes: int  # of the process, from the first step on
    start_bytes: int  # of the process before it made a model
    digest: str | None = None  # of the final parameters and optimizer state, bit for bit
    hit_rate: float | None = None  # of the row caches

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Result":
        return cls(**json.loads(path.read_text()))


def peak_memory() -> int:
    """Largest resident size of this process in bytes, so far or since `forget_peak_memory`."""
    try:
        # Linux: the figure of this program alone. getrusage also counts the process that started
        # it.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def forget_peak_memory() -> None:
    """Resets the peak of `peak_memory`, if the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def available_memory() -> int | None:
    """Bytes that a new process can use without swapping, or None if the system does not report it."""
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return None
