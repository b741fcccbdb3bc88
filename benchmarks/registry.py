"""The list of benchmark cases: a case is a function in its own file under ``benchmarks/cases``."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from benchmarks.results import Report
from benchmarks.timing import Budget


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a case is to be run. ``quick`` uses small tables and batches, to check that everything runs."""

    quick: bool = False

    @property
    def budget(self) -> Budget:
        return Budget.quick() if self.quick else Budget()


@dataclasses.dataclass(frozen=True)
class Case:
    """A named measurement; ``measure`` fills the report."""

    name: str
    title: str
    measure: Callable[[Settings, Report], None]
    gpu: bool = False  # measured on a GPU; its quick run needs none

    def run(self, settings: Settings, listener: Callable[[str, Any], None] | None = None) -> Report:
        report = Report(self.title, listener=listener)
        if settings.quick:
            report.note("quick run: small sizes and few calls, the figures mean nothing")
        if not native_available(self.gpu):
            report.note("jax_tt's native module is not there: its figures are those of pure JAX")
        self.measure(settings, report)
        return report


def native_available(gpu: bool = False) -> bool:
    """Whether the native module is available."""
    try:
        from jax_tt._base.ffi import available
    except ImportError:
        return False
    return available("cuda" if gpu else "cpu")


_CASES: dict[str, Case] = {}
_Measure = Callable[[Settings, Report], None]


def case(name: str, title: str, *, gpu: bool = False) -> Callable[[_Measure], _Measure]:
    """Registers the decorated function as the case ``name``."""

    def register(measure: _Measure) -> _Measure:
        if name in _CASES:
            raise ValueError(f"two benchmark cases are called {name!r}")
        _CASES[name] = Case(name, title, measure, gpu)
        return measure

    return register


def all_cases() -> dict[str, Case]:
    """Every case by name, in the order of their names' files."""
    package = importlib.import_module("benchmarks.cases")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"benchmarks.cases.{module}")
    return dict(_CASES)
