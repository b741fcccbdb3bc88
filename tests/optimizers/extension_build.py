"""Builds `examples/custom_rule` for tests, once for all workers; later runs compile what has changed."""

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import jax_tt
from jax_tt._base import ffi

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_rule"
PACKAGE = EXAMPLE / "python" / "lion_rule"
BUILD = ROOT / "build" / "test_extension"


def run(*command: object, **variables: str) -> str:
    """The output of a command, which must succeed."""
    # What this process imports, whatever made it find that.
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"PYTHONPATH": paths} | variables,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}{done.stderr[-4000:]}"
    return done.stdout


def why_not() -> str | None:
    """Why this machine cannot build the example; None if it can."""
    if reason := ffi.why_unavailable("cpu"):
        return reason
    if importlib.util.find_spec("pybind11") is None:
        return "pybind11 is not installed"
    if shutil.which("cmake") is None:
        return "cmake is not installed"
    if compiler() is None:
        return "there is no C++ compiler"
    try:
        jax_tt.extension.get_include()
    except RuntimeError as error:
        return str(error)
    return None


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(name: str, *defines: str) -> Path:
    """A folder that can be added to `sys.path`, with the package of the example."""
    folder = BUILD / f"{name}-{sys.implementation.cache_tag}"
    with locked(folder):
        generator = ("-G", "Ninja") if shutil.which("ninja") else ()
        python = f"-DPython_EXECUTABLE={sys.executable}"
        run("cmake", "-S", EXAMPLE, "-B", folder, *generator, python, *defines)
        run("cmake", "--build", folder)
        run("cmake", "--install", folder, "--prefix", folder / "site")
        shutil.copytree(PACKAGE, folder / "site" / "lion_rule", dirs_exist_ok=True)
    return folder / "site"


@functools.cache
def lion_rule() -> ModuleType:
    """The package of the example, compiled for the CPU."""
    if reason := why_not():
        pytest.skip(reason)
    sys.path.insert(0, str(build("cpu", "-DLION_RULE_CUDA=OFF")))
    return importlib.import_module("lion_rule")
