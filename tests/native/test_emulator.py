"""The SIMT emulator: right kernels pass in every order of threads, every planted bug is named."""

import os
import re
import shutil
import subprocess

import pytest

from tests.helpers import cxx_compiler
from tests.processes import ROOT, build, compiler_cache

pytestmark = pytest.mark.unsampled

SEEDS = 5
KERNELS = ("tests/cpp/emulator_planted.cu", "tests/cpp/emulator_right.cu", "ffi/cuda/upload.cu")

RACE = r"race: .* element \d+ of shared array 0 .* with no barrier between"
PLANTED = {
    "missing_barrier": RACE,
    "missing_barrier_in_reduction": RACE,
    "overwritten_too_early": RACE,
    "many_writers": r"race: writes element 0 .* wrote with no barrier",
    "missing_syncwarp": RACE,
    "syncwarp_between_warps": RACE,
    "syncwarp_of_the_other_half": RACE,
    "plain_and_atomic": RACE,
    "read_among_atomics": r"race: .* element 0 .*",
    "write_out_of_bounds": r"out of bounds: element 63 of shared array 0 \(63 elements",
    "read_before_the_start": r"out of bounds: element -1 of shared array 0 .*thread 0\)",
    "wide_past_the_end": r"out of bounds: element 252 .* 4 elements at once .*thread 63\)",
    "misaligned": r"misaligned vector access to shared memory",
    "null_pointer": r"uses a Shared pointer that points at nothing",
    "more_than_launched": r"overrun: array 1 ends at byte 768, the launch gave 512",
    "different_takes": r"threads of the block take different shared memory",
    "read_uninitialised": r"reads uninitialised shared memory: element 50 .*thread 51\)",
    "count_uninitialised": r"reads uninitialised shared memory: element 0",
    "left_by_another_block": r"reads uninitialised shared memory",
    "divergent_barrier": r"divergent __syncthreads: .* waits at __syncthreads of .*, this one waits at",
    "barrier_after_exit": r"divergent __syncthreads: .* ended",
    "uneven_barriers": r"divergent __syncthreads: .* ended",
    "barrier_against_shuffle": r"divergent __syncthreads|deadlock",
    "half_at_barrier": r"deadlock: thread \d+ waits at the warp collective of .* with mask 0xffffffff, "
    r"while thread \d+ waits at __syncthreads",
    "mask_names_ended_lane": r"(ended while .* 0xffffffff, which names this one|names absent lane 9)",
    "mask_names_lane_elsewhere": r"(ended while .* 0xffffffff, which names|names absent lane|deadlock)",
    "mask_without_self": r"__any_sync with mask 0x0000fffe without the lane itself",
    "mask_beyond_block": r"__syncwarp with mask 0xffffffff names absent lane 16",
    "shuffle_from_outside": r"__shfl_sync: lane \d+ reads lane 20, which mask 0x0000ffff leaves out",
    "odd_width": r"__shfl_down_sync with width 12",
    "too_many_threads": r"asks for 1025 threads in a block, the limit is 1024",
    "too_much_shared": r"asks for 232449 bytes of shared memory, the limit is 232448",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The test's program with sanitizers, which also look at the emulator's fibers; other tests run it without."""
    made = tmp_path_factory.mktemp("emulator") / "emulator_test"
    emulator = sorted(path.relative_to(ROOT) for path in ROOT.glob("ffi/emulation/*.cc"))
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fsanitize=address,undefined", "-DJAX_TT_EMULATION", "-I."]
    sources = ["tests/cpp/emulator_main.cc", *emulator, *KERNELS]
    done = build(cxx_compiler(), flags, sources, made)
    if done.returncode and "asan" in done.stderr:
        pytest.skip("this compiler comes without AddressSanitizer")
    assert done.returncode == 0, done.stderr
    return made


def run(program, mode):
    # Stacks that outlive their frames are watched too: of all checks this one depends most on the fibers' annotations.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1"}
    return subprocess.run(
        [str(program), mode], capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.slow
@pytest.mark.dear("the first test compiles the emulator with sanitizers")
def test_right_kernels_pass_in_every_order(program):
    done = run(program, "right")
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "done\n"


@pytest.mark.slow
def test_planted_bugs_are_named_in_every_order(program):
    done = run(program, "planted")
    assert done.returncode == 0, done.stderr[-6000:]
    *lines, last = done.stdout.splitlines()
    assert last == "done"
    found = {name: [] for name in PLANTED}
    for line in lines:
        name, message = line.split(" ", 1)[1].split(": ", 1)
        found[name].append(message)
    for name, pattern in PLANTED.items():
        assert len(found[name]) == SEEDS, name
        for message in found[name]:
            assert message.startswith("the kernel launched at cpp/emulator_planted.cu:"), name
            assert re.search(pattern, message), f"{name}: {message}"


@pytest.mark.slow
def test_os_threads_launch_at_once(program):
    done = run(program, "threads")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


@pytest.mark.slow
def test_address_sanitizer_sees_global_memory(program):
    done = run(program, "overflow")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "WritePastTheEnd" in done.stderr


@pytest.mark.slow
def test_kernels_compile_for_devices(tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (80, 90)]
    command = [*compiler_cache(), nvcc, "-std=c++20", *targets, "-Werror", "all-warnings"]
    command += ["-Xcompiler", "-Wall,-Wextra,-Werror", "-I.", "-c", KERNELS[1]]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "kernels.o")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
