"""Parts of the CPU kernels on their own: the scheduler and the ops of hash tables under sanitizers, with a simple
thread pool instead of XLA's, and the arithmetic of ids."""

import shutil
import subprocess

import pytest

from tests.helpers import cxx_compiler
from tests.processes import build

pytestmark = pytest.mark.unsampled

SOURCES = {
    "parallel": ("tables/ops", "workspace"),
    "hash": (
        *("hash/find", "hash/insert", "hash/place", "hash/rows", "tiers/key_index", "passes"),
        *("workspace", "../common/reports"),
    ),
}


@pytest.mark.slow(but="parallel-thread")
@pytest.mark.dear("compiles all ops of hash tables with a sanitizer")
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize("name", SOURCES)
def test_sanitizers_find_nothing(tmp_path, name, sanitizer):
    program = tmp_path / "stress"
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [f"tests/cpp/{name}_stress.cc", *(f"ffi/cpu/{own}.cc" for own in SOURCES[name])]
    built = build(cxx_compiler(), [*flags, "-pthread", "-I."], sources, program)
    if built.returncode and any(f"-l{library}san" in built.stderr for library in ("t", "a", "ub")):
        pytest.skip(f"this compiler comes without -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    # Where addresses are laid out too randomly for the sanitizer's shadow memory, it must run without that.
    command = [str(program)]
    if shutil.which("setarch"):
        command = ["setarch", "--addr-no-randomize", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "Operation not permitted" in done.stderr and done.returncode:
        done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "ok\n"


@pytest.mark.parametrize("check", ["devices", "divider", "tile_count"])
def test_a_header_by_itself(tmp_path, check):
    """Devices at work; division by multiplication; sums of counts that blocks leave for others, in states that no
    emulator reaches.
    """
    program = tmp_path / check
    source = f"tests/cpp/{check}_check.cc"
    options = ["-std=c++20", "-O2", "-DJAX_TT_EMULATION", "-I."]
    built = build(cxx_compiler(), options, [source], program)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ok\n")
