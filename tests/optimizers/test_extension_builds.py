"""The example of a rule in C++ as its users build it, and its kernels for GPUs, which the emulator runs."""

import importlib
import importlib.util
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import jax_tt
from jax_tt._base import ffi
from tests.conftest import native_available
from tests.optimizers import extension_build
from tests.optimizers.extension_build import EXAMPLE, PACKAGE, ROOT, compiler, run
from tests.processes import build

pytestmark = [pytest.mark.slow, pytest.mark.dear("compiles the example as its users do")]


@pytest.fixture(autouse=True)
def can_build():
    if reason := extension_build.why_not():
        pytest.skip(reason)


def run_its_tests(site: Path, **variables: str) -> str:
    """In a process of its own, which imports this build of the example, with the settings of its users."""
    path = f"import sys; sys.path.insert(0, {str(site)!r})"
    code = f"{path}; import pytest; sys.exit(pytest.main(['-q', {str(EXAMPLE)!r}]))"
    return run(sys.executable, "-c", code, **variables)


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="needs the emulated module")
def test_the_cuda_kernels_take_the_steps_of_the_reference(tmp_path):
    package = tmp_path / "lion_rule"
    shutil.copytree(PACKAGE, package)
    include = [
        importlib.import_module("pybind11").get_include(),
        sysconfig.get_path("include"),
        jax_tt.extension.get_include(),
        ROOT,
    ]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags += ["-DJAX_TT_EMULATION", "-DLION_RULE_CUDA", "-Wno-unknown-pragmas"]
    flags += [f"-I{folder}" for folder in include]
    emulator = sorted((ROOT / "ffi" / "emulation").glob("*.cc"))
    sources = [EXAMPLE / "src" / "module.cc", EXAMPLE / "src" / "lion.cu", *emulator]
    made = package / f"_lion{sysconfig.get_config_var('EXT_SUFFIX')}"
    built = build(compiler(), flags, sources, made)
    assert built.returncode == 0, built.stderr
    assert "2 passed" in run_its_tests(tmp_path, JAX_TT_METHOD="cuda_emulated")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_nvcc_compiles_the_kernels():
    site = extension_build.build("cuda", "-DCMAKE_CUDA_ARCHITECTURES=80-real")
    assert "2 passed" in run_its_tests(site, JAX_TT_METHOD="native")
    if ffi.load("cuda_emulated") is None:
        return
    with pytest.raises(AssertionError, match="compiled with headers of another version; rebuild"):
        run_its_tests(site, JAX_TT_METHOD="cuda_emulated")


@pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None,
    reason="scikit-build-core is not installed",
)
def test_pip_builds_a_wheel(tmp_path):
    options = (
        "--no-deps",
        "--no-build-isolation",
        "--config-settings",
        "cmake.define.LION_RULE_CUDA=OFF",
    )
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", tmp_path, EXAMPLE)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert "2 passed" in run_its_tests(site)
