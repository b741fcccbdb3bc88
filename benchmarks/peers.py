"""Loads the contenders that need optional packages."""

import importlib
import importlib.util
from types import ModuleType

from benchmarks.results import Report

# Contender module -> the package it stands on, and how to get it.
PACKAGES = {
    "contenders.torch_bag": "torch",
    "contenders.clicks_torch": "fbgemm_gpu",
    "contenders.faiss_index": "faiss",
    "contenders.fbgemm": "fbgemm_gpu",
    "contenders.fbgemm_quantized": "fbgemm_gpu",
    "contenders.fbgemm_tables": "fbgemm_gpu",
    "contenders.tltorch_bag": "tltorch",
    "gpu.torch_dense": "torch",
}


def peer(contender: str, report: Report, folder: str = "contenders") -> ModuleType | None:
    """The contender's module; None, with a note in the report, where its package is missing."""
    module = f"{folder}.{contender}"
    package = PACKAGES[module]
    if importlib.util.find_spec(package) is None:
        report.note(f"{package} is not installed (extra `peers`), so it was not timed")
        return None
    return importlib.import_module(f"benchmarks.{module}")
