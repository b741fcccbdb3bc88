"""Instructions of kernels in their machine code for compute capability 9.0, and of their innermost loops.

    python -m scripts.kernel_instructions                     # of these sources
    python -m scripts.kernel_instructions --root /path/to/other/checkout

Needs nvcc and nvdisasm, which comes with a CUDA toolkit, or as ``pip install nvidia-cuda-nvdisasm``. A loop is what
lies between a branch back and its label; those with products or multiply-adds are listed that hold no other loop.
"""

import argparse
import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# One instance of each kernel that takes the most time, in a source of its own, which compiles fast.
PROBES = {
    "SumRows<4, StepSink<float, Sgd<float>>>": """
#include "ffi/core/optimizers/sgd.h"
#include "ffi/cuda/dense/step.h"
namespace jax_tt {
template __global__ void SumRows<4, StepSink<float, Sgd<float>>>(const __grid_constant__ TableList<GradientTable>,
    const __grid_constant__ DensePlan);
}
""",
    "MakeSharesFast<FastTile<32, 4>, Float32Math, float>": """
#include "ffi/cuda/tt/fast_launch.h"
namespace jax_tt {
using Own = OneTable<FastShares<float>>;
template __global__ void MakeSharesFast<FastTile<32, 4>, fast_internal::Float32Math, float, Own>(
    const __grid_constant__ Own);
}
""",
}
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\b(.*)$")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"\(?\.L_x_(\d+)")


@dataclasses.dataclass(frozen=True)
class Counted:
    """Instructions of a kernel or a loop; products are those of tensor cores, divisions use a reciprocal."""

    instructions: int
    products: int
    multiply_adds: int
    reciprocals: int


def parse(text: str) -> tuple[Counted, list[Counted]]:
    """A kernel as nvdisasm prints it: all of it, and its innermost loops with products or multiply-adds."""
    names: list[str] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif found := _INSTRUCTION.match(line):
            names.append(found[1])
            target = _TARGET.search(found[2]) if found[1].startswith("BRA") else None
            begin = labels.get(f".L_x_{target[1]}") if target else None
            # The branch to itself behind the end of a kernel is no loop.
            if begin is not None and begin < len(names) - 1:
                spans.append((begin, len(names)))
    end = max((k + 1 for k, name in enumerate(names) if name == "EXIT"), default=len(names))

    def count(some: list[str]) -> Counted:
        own = [name for name in some if name != "NOP"]

        def of(*beginnings: str) -> int:
            return sum(name.startswith(beginnings) for name in own)

        return Counted(len(own), of("HMMA", "HGMMA"), of("FFMA"), of("MUFU.RCP"))

    def innermost(begin: int, to: int) -> bool:
        others = set(spans) - {(begin, to)}
        return not any(begin <= start and stop <= to for start, stop in others)

    loops = [count(names[begin:to]) for begin, to in sorted(set(spans)) if innermost(begin, to)]
    whole = count(names[: max(end, *(to for _, to in spans))] if spans else names)
    return whole, [loop for loop in loops if loop.products or loop.multiply_adds]


def disassembler() -> str | None:
    """nvdisasm of the PATH, of a toolkit, or of a wheel."""
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    wheels = [path for folder in folders for path in Path(folder).rglob("bin/nvdisasm")]
    return found or next(map(str, wheels), None)


def compiled(probe: str, root: Path, disassemble: str) -> str:
    """The machine code of a probe."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "probe.cu", Path(folder) / "probe.cubin"
        source.write_text(probe)
        include = subprocess.run(
            [sys.executable, "-c", "import jax.ffi; print(jax.ffi.include_dir())"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        command = ["nvcc", "-std=c++20", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", f"-I{root}"]
        command += ["-isystem", include, "-arch=sm_90", "-cubin", "-o", str(cubin), str(source)]
        subprocess.run(command, check=True)
        return subprocess.run(
            [disassemble, "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="of the sources")
    parser.add_argument("--only", default="", help="a part of the name of a kernel")
    arguments = parser.parse_args()
    disassemble = disassembler()
    if disassemble is None or shutil.which("nvcc") is None:
        sys.exit("kernel_instructions: needs nvcc and nvdisasm (pip install nvidia-cuda-nvdisasm)")
    print("| | instructions | HMMA | instructions per HMMA | FFMA | divisions |")
    print("| --- |" + " ---: |" * 5)
    for name, probe in PROBES.items():
        if arguments.only not in name:
            continue
        whole, loops = parse(compiled(probe, arguments.root, disassemble))
        for what, one in [(name, whole), *(("an innermost loop", loop) for loop in loops)]:
            per = f"{one.instructions / one.products:.1f}" if one.products else ""
            print(
                f"| {what} | {one.instructions} | {one.products or ''} | {per} | {one.multiply_adds} | "
                f"{one.reciprocals or ''} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
