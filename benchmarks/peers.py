"""Loads the contenders that need packages which may not be installed."""

import importlib
import importlib.util
from types import ModuleType

from benchmarks.results import Report

# Contender module -> the package it stands on, and how to get it.
PACKAGES = {"torch_bag": "torch", "fbgemm": "fbgemm_gpu", "tltorch_bag": "tltorch"}


def peer(contender: str, report: Report) -> ModuleType | None:
    """The contender's module; None, with a note in the report, where its package is missing."""
    package = PACKAGES[contender]
    if importlib.util.find_spec(package) is None:
        report.note(f"{package} is not installed (extra `peers`), so it was not timed")
        return None
    return importlib.import_module(f"benchmarks.contenders.{contender}")
