"""Memory of this process as Linux counts it."""

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Bytes in physical memory now."""
    return _field("VmRSS")


def peak_resident_bytes() -> int:
    """The most bytes in physical memory since the start or the last `reset_peak`."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Resets the peak of `peak_resident_bytes`."""
    _CLEAR.write_text("5")


class Growth:
    """The growth of memory inside a ``with`` block, from its start to its peak.

    >>> with Growth() as growth:
    ...     size = len(bytes(2**24))
    >>> growth.bytes >= 2**23
    True
    """

    bytes: int = 0

    def __enter__(self) -> "Growth":
        reset_peak()
        self._before = resident_bytes()
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = max(0, peak_resident_bytes() - self._before)


def available_bytes() -> int:
    """Bytes the machine can still give without swapping."""
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _field(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{_STATUS} has no {name}; memory is measured on Linux only")
    return int(match[1]) * 1024
