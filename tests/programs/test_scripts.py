"""What compilers and gcov say of the CUDA kernels is read right, and faults are planted where they belong."""

import types
from pathlib import Path

import jax_tt
from scripts import cuda_coverage, kernel_instructions, kernel_loads, kernel_resources, mutants
from scripts.kernel_instructions import Counted
from scripts.kernel_resources import Kernel, Multiprocessor
from scripts.mutant import Mutant, plant

ROOT = Path(__file__).resolve().parents[2]


LOG = """\
ptxas info    : Compiling entry function '_Z6kernelPf' for 'sm_90'
ptxas info    : Function properties for _Z6kernelPf
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z5otherPf' for 'sm_90'
ptxas info    : Function properties for _Z5otherPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""
PTX = """\
.visible .entry _Z6kernelPf(
\t.param .u64 .ptr .align 1 _Z6kernelPf_param_0
)
.maxntid 256, 1, 1
{
.visible .entry _Z5otherPf(
\t.param .u64 .ptr .align 1 _Z5otherPf_param_0
)
{
"""


def test_resources_are_read_as_the_compiler_prints_them():
    names = {"_Z6kernelPf": "kernel<float, 4>", "_Z5otherPf": "other"}
    kernels = kernel_resources.parse(LOG, PTX, names)
    assert kernels == [Kernel("kernel<float, 4>", 96, 8, 28, 256), Kernel("other", 32, 0, 0, 1024)]
    table = kernel_resources.table({"90": kernels})
    assert "| `kernel` | 1 | 256 | 96 | 8 B | 28 B | 25% |" in table
    assert "| `other` | 1 | 1024 | 32 | none | none | 100% |" in table
    assert kernel_resources.spilling({"90": kernels}) == ["kernel<float, 4> on sm_90: 28 bytes"]


def test_occupancy():
    sm = Multiprocessor()
    assert sm.resident(32, 1024) == 2  # threads
    assert sm.resident(128, 256) == 2  # registers: 64 K over 128 x 256
    assert sm.resident(255, 256) == 1
    assert sm.resident(16, 32) == 32  # blocks


KERNEL = """\
template <typename T>
__global__ void __launch_bounds__(64) Kernel(T* p) {
  if (p == nullptr)
    return;

  return;
}
"""


def test_coverage_is_summed_over_compiled_sources_and_instances(tmp_path):
    (tmp_path / "a.cu").write_text(KERNEL)

    def report(symbol, executed, lines):
        function = {"name": symbol, "execution_count": executed}
        counted = [{"line_number": n, "count": c} for n, c in lines]
        files = [
            {"file": "a.cu", "functions": [function], "lines": counted},
            {"file": "/usr/include/vector", "functions": [], "lines": counted},
        ]
        return {"current_working_directory": str(tmp_path), "files": files}

    # Of float and of double; the second never runs.
    reports = [
        report("_Z6KernelIfEvPT_", 2, [(2, 2), (3, 2), (4, 0), (6, 0)]),
        report("_Z6KernelIdEvPT_", 0, [(2, 0), (3, 0), (4, 0), (6, 0)]),
    ]
    counts = cuda_coverage.merge(reports, tmp_path)
    (counted,) = counts.values()
    assert counted.lines == {2: 2, 3: 2, 4: 0, 6: 0}
    assert counted.never == [4, 6]
    text = cuda_coverage.page(counts, ["tests/test_x.py"], "3 passed")
    assert "| `a.cu` | 4 | 2 | 50.0 % |" in text
    assert "| `Kernel` | `a.cu` | 2 | 1 |" in text and "never executed: `Kernel<double>`" in text
    assert "   4      return;" in text and "`test_x.py`" in text and "3 passed" in text


def test_a_source_with_all_lines_executed_is_not_rounded_up():
    assert cuda_coverage.share(1999, 2000) == "99.9 %"
    assert cuda_coverage.share(2000, 2000) == "100.0 %"
    assert cuda_coverage.share(0, 0) == "no code"


def test_every_planted_fault_has_one_place_and_a_name_of_its_own():
    for mutant in mutants.MUTANTS:
        mutant.place((ROOT / mutant.file).read_text())  # raises unless there is one
        assert mutant.old != mutant.new, mutant.name
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)


def test_planted_faults_are_off_until_they_are_switched_on(tmp_path, monkeypatch):
    faults = [
        Mutant("rounds up", "jax_tt/half.py", "x // 2", "(x + 1) // 2"),
        Mutant("divides by 3", "ffi/half.cc", "x / 2", "x / 3"),
    ]
    for name, text in {
        "jax_tt/half.py": '"""Half."""\n\nimport math\n\n\ndef half(x):\n    return x // 2\n',
        "ffi/half.cc": "int Half(int x) { return x / 2; }\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    plant(tmp_path, faults)
    planted: dict = {}
    for active, wanted in ((None, 1), (0, 2)):
        switch = types.SimpleNamespace(on=lambda k, active=active: k == active)
        monkeypatch.setattr(jax_tt, "_planted", switch, raising=False)
        exec((tmp_path / "jax_tt/half.py").read_text(), planted)
        assert planted["half"](3) == wanted
    native = "int Half(int x) { return (::jax_tt_mutants::On(1) ? (x / 3) : (x / 2)); }\n"
    assert (tmp_path / "ffi/half.cc").read_text() == f'#include "ffi/planted.h"\n{native}'


SASS = """\
.text._Z6kernelPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   MUFU.RCP R2, R2 ;
.L_x_1:
        /*0020*/                   FFMA R4, R2, R3, R4 ;
.L_x_0:
        /*0030*/                   HMMA.1688.F32.TF32 R4, R8, R10, R4 ;
        /*0040*/              @!P0 BRA `(.L_x_0) ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
        /*0080*/                   NOP;
"""


def test_instructions_are_counted_as_they_are_disassembled():
    whole, loops = kernel_instructions.parse(SASS)
    assert whole == Counted(instructions=7, products=1, multiply_adds=1, reciprocals=1)
    assert loops == [Counted(instructions=2, products=1, multiply_adds=0, reciprocals=0)]


LOADS = """\
\t.section\t.text._Z6kernelPf,"ax",@progbits
        /*0000*/                   LDG.E.64 R2, desc[UR4][R8.64] ;
        /*0010*/              @!P0 LDG.E R4, desc[UR4][R10.64] ;
        /*0020*/                   IADD3 R6, R4, 1, RZ ;
        /*0030*/                   LDG.E R5, desc[UR4][R2.64] ;
        /*0040*/                   EXIT ;
\t.section\t.text._Z5otherPf,"ax",@progbits
        /*0000*/                   EXIT ;
"""


def test_loads_that_wait_are_told_from_those_under_way_together():
    found = kernel_loads.functions(LOADS)
    # The first is under way beside the second, which is used before the third; behind the third comes none.
    assert {name: kernel_loads.loads(code) for name, code in found.items()} == {
        "kernel": (3, 2),
        "other": (0, 0),
    }
