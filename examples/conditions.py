"""The machine, the versions and the date of a measurement."""

import datetime
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any


def conditions() -> dict[str, Any]:
    """What a file of results says about where it was measured."""
    try:
        cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        cpu = None
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "flax", "optax", "numpy")},
    }
