"""Loads of the CUDA kernels that are waited for one by one, in their machine code for compute capability 9.0.

    python -m scripts.kernel_loads             # prints the table
    python -m scripts.kernel_loads --check     # fails where a kernel has more of them than MOST says

A load from memory takes several hundred cycles, so a thread should ask for all that it can before it looks at any of
it. A load waits here if what it brings is used before the next load that does not depend on it is issued, in the order
of the code: of loads that are asked for together the last one waits, and branches are not followed.

Needs nvcc and nvdisasm, as ``python -m scripts.kernel_instructions`` does.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.kernel_instructions import compiled, disassembler
from scripts.kernel_resources import readable

ROOT = Path(__file__).resolve().parent.parent
# Of the kernels whose loads were looked at: the most that may wait, as this release of nvcc orders them.
RELEASE = "13.0"
MOST = {
    "ffi/cuda/dense/forward.cu": {
        "PoolRows<float, 4, OneTable<ForwardTable> >": 13,
        "PoolRows<float, 4, ManyTables<ForwardTable> >": 7,
        "PoolRows<PackedRow, 4, OneTable<ForwardTable> >": 17,
        "PoolRowsByBlock<float, 4, OneTable<ForwardTable> >": 25,
    },
    "ffi/cuda/hash/find.cu": {"FindKeys": 14},
    "ffi/cuda/hash/insert.cu": {"SeekKeys": 30},
    "ffi/cuda/hash/place.cu": {"PlaceKeys": 44},
    "ffi/cuda/sort/sort.cu": {"CountBins<OneTable<BatchSort> >": 4},
}
_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\b(.*)$")
_REGISTER = re.compile(r"\bR(\d+)\b")
_WORDS = {".64": 2, ".128": 4}


def functions(text: str) -> dict[str, str]:
    """The code of each kernel of a cubin, as nvdisasm prints it, by readable names."""
    symbols, codes = (_FUNCTION.split(text)[k::2] for k in (1, 2))
    names = readable(symbols)
    return {names[symbol]: code for symbol, code in zip(symbols, codes, strict=True)}


def loads(code: str) -> tuple[int, int]:
    """Loads of a kernel from memory, and how many of them wait."""
    instructions = [
        found.groups() for line in code.splitlines() if (found := _INSTRUCTION.match(line))
    ]
    places = [k for k, (name, _) in enumerate(instructions) if name.startswith("LDG")]
    return len(places), sum(_waits(instructions[k:]) for k in places)


def _waits(instructions: list[tuple[str, ...]]) -> bool:
    (name, operands), *following = instructions
    first = _REGISTER.search(operands)
    if first is None:  # into the register that is always zero: a prefetch
        return False
    width = next((words for text, words in _WORDS.items() if text in name), 1)
    brought = {int(first[1]) + k for k in range(width)}
    for other, its_operands in following:
        if not brought.isdisjoint(map(int, _REGISTER.findall(its_operands))):
            return True
        if other.startswith("LDG"):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    disassemble = disassembler()
    if disassemble is None or shutil.which("nvcc") is None:
        print(
            "loads of the kernels are not looked at: no nvcc, or no nvdisasm (pip install nvidia-cuda-nvdisasm)"
        )
        return
    print("| kernel | loads | that wait | at most |\n| --- | ---: | ---: | ---: |")
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    held = arguments.check and f"release {RELEASE}," in said
    worse = []
    for source, most in MOST.items():
        found = functions(compiled(f'#include "{source}"\n', ROOT, disassemble))
        for name, bound in most.items():
            count, waiting = loads(found[name])
            print(f"| `{name}` | {count} | {waiting} | {bound} |", flush=True)
            if held and waiting > bound:
                worse.append(name)
    if worse:
        sys.exit(f"kernel_loads: more loads wait than before in {', '.join(worse)}")


if __name__ == "__main__":
    main()
