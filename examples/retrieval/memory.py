"""Resident memory of this process."""

import contextlib
import resource
from pathlib import Path


def resident_bytes() -> int:
    """Memory held now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most held since the start, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Resets the peak, if the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """A line of /proc/self/status; where there is none, the peak since the start."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
