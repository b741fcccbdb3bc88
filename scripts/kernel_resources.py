"""Registers, stack, spills and occupancy of each CUDA kernel, as reported by the compiler. Occupancy is limited here by
registers and threads. Shared memory is not included, because it is dynamic and not known to the compiler.

    python scripts/kernel_resources.py                # prints the table
    python scripts/kernel_resources.py --write        # puts it between the markers of docs/performance.md
    python scripts/kernel_resources.py --check        # fails if a specialised kernel spills registers

Needs nvcc, no GPU. Every .cu file is compiled once for each architecture, with the flags of the build.
"""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
# In the names of the kernels that are made for the common shapes, where the time goes.
SPECIALISED = "Fast"
MARKERS = ("<!-- kernels:begin -->", "<!-- kernels:end -->")


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor, as the CUDA programming guide lists them."""

    warps: int = 64
    blocks: int = 32
    registers: int = 65536

    def resident(self, registers: int, threads: int) -> int:
        """Number of blocks that fit at the same time, as limited by registers and threads."""
        warps = -(-threads // 32)
        # Registers are given out 256 to a warp at a time, warps to the four schedulers in turn.
        per_warp = max(1, -(-registers * 32 // 256)) * 256
        by_registers = self.registers // per_warp // 4 * 4 // warps
        return min(self.blocks, self.warps // warps, by_registers)


ARCHITECTURES = {"80": Multiprocessor(), "90": Multiprocessor(), "100": Multiprocessor()}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instance of one kernel on one architecture."""

    name: str
    registers: int
    stack: int
    spills: int
    threads: int  # of a block at most, from its launch bounds

    @property
    def template(self) -> str:
        return self.name.partition("<")[0]


def parse(log: str, ptx: str, names: dict[str, str]) -> list[Kernel]:
    """Kernels from what ``-Xptxas -v`` says and the launch bounds in the PTX; ``names`` are readable ones."""
    bounds = {
        entry: int(threads)
        for entry, threads in re.findall(
            r"\.entry\s+(\w+)\s*\([^)]*\)\s*\.maxntid\s+(\d+)", ptx, re.DOTALL
        )
    }
    kernels = []
    blocks = re.split(r"Compiling entry function '", log)[1:]
    for block in blocks:
        symbol = block.partition("'")[0]
        stack, stores, loads = map(
            int,
            re.search(  # type: ignore[union-attr]
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
            ).groups(),
        )
        registers = int(re.search(r"Used (\d+) registers", block)[1])  # type: ignore[index]
        kernels.append(
            Kernel(names[symbol], registers, stack, stores + loads, bounds.get(symbol, 1024))
        )
    return kernels


def readable(symbols: Iterable[str]) -> dict[str, str]:
    """Names as the sources have them: no namespaces, no parameters."""
    symbols = sorted(set(symbols))
    text = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = {}
    for symbol, name in zip(symbols, text, strict=True):
        name = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|\b\w+::", "", name)
        name = re.sub(r"^void ", "", name)
        # The parameters: from the last "(" at the outermost level of template brackets.
        depth, end = 0, len(name)
        for i, letter in enumerate(name):
            depth += (letter == "<") - (letter == ">")
            if letter == "(" and depth == 0:
                end = i
                break
        short[symbol] = name[:end]
    return short


def compile_file(source: Path, architecture: str, command: list[str]) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "kernels"
        arch = f"-arch=sm_{architecture}"
        keep = ["--keep", "--keep-dir", folder]
        done = subprocess.run(
            [*command, arch, *keep, "-Xptxas=-v", "-cubin", "-o", output, source],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{source.name}: nvcc failed\n{done.stderr[:2000]}")
        log = done.stderr + done.stdout
        ptx = "".join(path.read_text() for path in Path(folder).glob("*.ptx"))
    return parse(log, ptx, readable(re.findall(r"entry function '(\w+)'", log)))


def collect(
    command: list[str], sources: list[Path], architectures: Iterable[str]
) -> dict[str, list[Kernel]]:
    """Kernels by architecture."""
    jobs = [(source, a) for a in architectures for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda job: (job[1], compile_file(*job, command)), jobs)
    kernels = defaultdict(list)
    for architecture, some in found:
        kernels[architecture] += some
    return kernels


def table(kernels: dict[str, list[Kernel]]) -> str:
    """Markdown: a row for each kernel, the worst over its instances."""
    lines = [
        "| kernel | instances | threads | "
        + " | ".join(f"sm_{a}: registers | stack | spills | occupancy" for a in kernels)
        + " |"
    ]
    lines.append("|" + " --- |" * (3 + 4 * len(kernels)))
    grouped: dict[str, dict[str, list[Kernel]]] = defaultdict(dict)
    for architecture, some in kernels.items():
        for kernel in some:
            grouped[kernel.template].setdefault(architecture, []).append(kernel)
    for name in sorted(grouped):
        cells: list[str] = []
        instances, threads = 0, 0
        for architecture, limits in ((a, ARCHITECTURES[a]) for a in kernels):
            same = grouped[name].get(architecture, [])
            instances = max(instances, len(same))
            threads = max((k.threads for k in same), default=0)
            registers = max((k.registers for k in same), default=0)
            fill = min(
                (
                    limits.resident(k.registers, k.threads) * -(-k.threads // 32) / limits.warps
                    for k in same
                ),
                default=0.0,
            )
            spills = max((k.spills for k in same), default=0)
            stack = max((k.stack for k in same), default=0)
            cells += [str(registers), *(f"{b} B" if b else "none" for b in (stack, spills))]
            cells.append(f"{fill:.0%}")
        lines.append(f"| `{name}` | {instances} | {threads} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spilling(kernels: dict[str, list[Kernel]]) -> list[str]:
    return [
        f"{k.name} on sm_{a}: {k.spills} bytes"
        for a, some in kernels.items()
        for k in some
        if k.spills
    ]


def write(page: Path, text: str) -> None:
    before, begin, rest = page.read_text().partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (begin and end):
        sys.exit(f"{page.relative_to(ROOT)}: no {MARKERS[0]} ... {MARKERS[1]} to write between")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cuda")
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    recorded = arguments.build / "nvcc_command.txt"
    if not recorded.exists():
        print(f"no CUDA build in {arguments.build}: make cuda")
        return
    sources = map(Path, (arguments.build / "nvcc_sources.txt").read_text().splitlines())
    kernels = collect(
        recorded.read_text().splitlines(), list(sources), arguments.architectures.split(",")
    )
    text = table(kernels)
    print(text)
    if arguments.write:
        write(PAGE, text)
    problems = spilling(kernels)
    if problems:
        print("\nkernels that spill registers:", *problems, sep="\n  ")
    if arguments.check and any(SPECIALISED in problem for problem in problems):
        sys.exit(1)


if __name__ == "__main__":
    main()
