"""The conditions of a measurement: processor, cores, versions, commit."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

JAX_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
PEER_PACKAGES = ("torch", "faiss-cpu", "fbgemm-gpu-cpu", "tensorly", "tensorly-torch")
ROOT = Path(__file__).resolve().parent.parent


def describe() -> dict[str, object]:
    """The machine and the software, as a results file records them."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "architecture": platform.machine(),
        "instruction_sets": instruction_sets(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions(),
    }


def cpu_model() -> str:
    """The name that the processor reports."""
    match = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def instruction_sets() -> list[str]:
    """Of the vector instruction sets that matter here, those the processor has."""
    match = re.search(r"^flags\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return [name for name in ("avx", "avx2", "fma", "avx512f", "avx512_bf16") if name in flags]


def versions() -> dict[str, str]:
    """Versions of the packages that take part; a peer that is not installed is left out."""
    found = {}
    for name in JAX_PACKAGES + PEER_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit measured, marked when the checkout holds changes to tracked files."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def slug() -> str:
    """A name for this machine's results file: ``amd-epyc-2c``."""
    words = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", cpu_model().lower())
    return "-".join([*re.findall(r"[a-z0-9]+", words), f"{usable_cores()}c"])


def gpu_name() -> str | None:
    """The name that the GPU reports, or None. The driver is asked, because starting JAX would allocate its memory."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().splitlines()[0]


def slug_of(gpu: str | None) -> str:
    """A name for the results file of a GPU: ``nvidia-h200``."""
    return "-".join(re.findall(r"[a-z0-9]+", (gpu or "no gpu").lower()))


def title(found: dict[str, Any]) -> str:
    """The machine in a line, from what `describe` found."""
    return f"{found['gpu']}" if "gpu" in found else f"{found['cpu']}, {found['cores']} cores"


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
