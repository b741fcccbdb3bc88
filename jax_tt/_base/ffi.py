"""Loads the native modules and registers their FFI targets; nothing else imports them.

A *platform* here is one way of running the native ops: ``"cpu"``, ``"cuda"``, or ``"cuda_emulated"``, the CUDA sources
compiled for the processor, which only test builds have.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import importlib.util
import threading
from importlib.metadata import entry_points
from types import ModuleType
from typing import NamedTuple

import jax

from jax_tt._base import reports
from jax_tt._base.environment import variable


@dataclasses.dataclass(frozen=True)
class _Native:
    """A module, the platform that JAX knows its targets by, what their names start with, and how to build it."""

    module: str
    jax_platform: str
    prefix: str
    option: str


class Rule(NamedTuple):
    """A native rule: the names of its hyper-parameters in order, and its numbers of slots per entry and per row."""

    hyperparameters: list[str]
    entry_slots: int
    row_slots: int


_NATIVE = {
    "cpu": _Native("jax_tt._cpu", "cpu", "jax_tt_", "JAX_TT_NATIVE"),
    "cuda": _Native("jax_tt._cuda", "CUDA", "jax_tt_", "JAX_TT_CUDA"),
    "cuda_emulated": _Native("jax_tt._emulated", "cpu", "jax_tt_emulated_", "JAX_TT_EMULATION"),
}


# The arguments with which modules add the rules of extensions, by name, and the modules that have them all.
_rules: dict[str, tuple[object, str]] = {}
_modules: list[ModuleType] = []
_rules_lock = threading.Lock()


@functools.cache
def target(platform: str, op: str) -> str:
    """Name of the FFI target of an op, e.g. ``"jax_tt_forward_v1"``."""
    return f"{_NATIVE[platform].prefix}{op}_v1"


@functools.cache
def load(platform: str) -> ModuleType | None:
    """The native module of a platform with its targets registered, or None; `why_unavailable` tells why."""
    return _load(platform)[0]


def why_unavailable(platform: str) -> str | None:
    """Why `load` returned None, in words for a user; None where the module is there."""
    return _load(platform)[1]


@functools.cache
def _load(platform: str) -> tuple[ModuleType | None, str | None]:
    native = _NATIVE.get(platform)
    if native is None:
        return None, f"jax_tt has no native ops for {platform}"
    if importlib.util.find_spec(native.module) is None:
        return None, (
            f"{native.module} was not built with this installation (pip install . -C cmake.define.{native.option}=ON)"
        )
    if platform == "cuda" and (reason := _without_cuda()):
        return None, reason
    try:
        module = importlib.import_module(native.module)
    except ImportError as error:
        return None, f"{native.module} could not be loaded ({error})"
    try:
        for name, capsule in module.registrations().items():
            jax.ffi.register_ffi_target(name, capsule, native.jax_platform, api_version=1)
    except Exception as error:  # the runtime refuses handlers built against an FFI it does not know
        return (
            None,
            f"jax {jax.__version__} does not accept {native.module} ({error}); rebuild jax_tt against this jax",
        )
    with _rules_lock:
        for rule in _rules.values():
            module.add_rule(*rule)
        _modules.append(module)
    if platform == "cuda":
        # Memory of the host is allocated by a device, which must be one that this process has anyway.
        module.listen(reports.report_native, jax.local_devices(backend="cuda")[0].local_hardware_id)
    else:
        module.listen(reports.report_native)
    # Threads of XLA may run on while Python ends, and must not call into it then.
    atexit.register(module.listen, None)
    if platform == "cuda_emulated":
        # The order in which threads and blocks run; races show as results that depend on it.
        module.set_seed(int(variable("JAX_TT_EMULATION_SEED") or 0))
    return module, None


def add_rule(capsule: object, version: str) -> str:
    """Adds the capsule of a rule to all native modules, now or when they are loaded; returns the rule's name."""
    cpu = load("cpu")
    assert cpu is not None
    with _rules_lock:
        name = cpu.add_rule(capsule, version)
        for module in _modules:
            module.add_rule(capsule, version)
        _rules[name] = capsule, version
    rule.cache_clear()
    return name


@functools.cache
def rule(platform: str, name: str) -> Rule | None:
    """A rule of the native module of a platform, which must be available; None if there is none of that name."""
    module = load(platform)
    assert module is not None
    found = module.rule(name)
    return None if found is None else Rule(*found)


def _without_cuda() -> str | None:
    """Why this process cannot run CUDA ops; None where it can.

    Asking JAX starts its backends, which has a use of its own: targets registered before that are looked at only when
    the CUDA backend starts, and one that it refuses would take the backend with it.
    """
    try:
        jax.devices("cuda")
        return None
    except RuntimeError as error:
        reason = str(error)
    if not any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins")):
        return (
            f"jax {jax.__version__} is installed without CUDA; install it with `pip install jax-tt[cuda13]` or "
            "`jax-tt[cuda12]`, whichever the driver supports"
        )
    return f"jax finds no CUDA device ({reason})"


def available(platform: str) -> bool:
    """Whether this process has native ops for ``"cpu"``, ``"cuda"`` or ``"cuda_emulated"``."""
    return load(platform) is not None
