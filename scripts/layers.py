"""The layers of the package and of the C++ sources: which folder may import or include which.

    python -m scripts.layers

prints the lines of each folder, and what goes up. Imports inside functions and for type checkers count like all others.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "jax_tt"
FFI = Path(__file__).parent.parent / "ffi"

# From the lowest: a folder may import the folders of lower layers and itself. Folders of one layer are strangers.
LAYERS = (
    ("_base",),
    ("_jax", "_formats", "optimizers"),
    ("_ids",),
    ("_tt", "_directories"),
    ("_table",),
    ("_native", "_lookup"),
    (
        "_kinds.cached",
        "_kinds.coded",
        "_kinds.composite",
        "_kinds.dense",
        "_kinds.hashed",
        "_kinds.ordered",
        "_kinds.quantized",
        "_kinds.sharded",
        "_kinds.tensor_train",
    ),
    ("_ops",),
    ("_collection", "order"),
    ("_files", "_tiers"),
    ("_compress",),
    ("_planning",),
    ("_layers",),
    ("",),  # the faces: jax_tt itself, nnx, linen, cli
)

# The same for the folders of the C++ sources.
FFI_LAYERS = (
    ("core", "cpu.sort"),
    ("core.optimizers",),
    ("common", "cpu.kernels"),
    ("cpu", "emulation", "cuda.rules"),
    ("cpu.dense", "cpu.hash", "cpu.offsets", "cpu.route", "cpu.tables", "cpu.tt_plan", "cuda"),
    ("cpu.coded", "cpu.tiers", "cpu.tt", "cuda.offsets", "cuda.tables"),
    ("cpu.cache", "cpu.scan", "cuda.cache", "cuda.sort"),
    ("cuda.dense", "cuda.tt_plan"),
    ("cuda.hash", "cuda.tt"),
    ("include.jax_tt",),  # what extensions include
    ("modules",),
)


class Import(NamedTuple):
    """One name that a file imports from another of the package."""

    file: str
    line: int
    source: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name} from {self.source}"


def imports(package: Path) -> list[Import]:
    """All imports of files of a package from one another, wherever they stand."""
    files = {_module(path, package): path for path in package.rglob("*.py")}
    root = package.name
    edges = []
    for module, path in sorted(files.items()):
        file = path.relative_to(package.parent).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [(alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    folder = module.split(".")[: None if path.name == "__init__.py" else -1]
                    base = ".".join(
                        [*folder[: len(folder) - node.level + 1], *filter(None, [base])]
                    )
                names = [(_source(base, alias.name, files), alias.name) for alias in node.names]
            else:
                continue
            edges += [
                Import(file, node.lineno, source, name)
                for source, name in names
                if source == root or source.startswith(f"{root}.")
            ]
    return edges


def includes(sources: Path) -> list[Import]:
    """All includes of files of a folder from one another, as imports of modules with the names of their headers."""
    return [
        Import(
            path.relative_to(sources.parent).as_posix(), number, ".".join(header.parts), header.name
        )
        for path in sorted(sources.rglob("*"))
        if path.suffix in (".h", ".cc", ".cu", ".in")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := re.match(rf'#include "({sources.name}/[^"]+)"', line))
        for header in [Path(found[1]).with_suffix("")]
    ]


def upward(edges: list[Import], package: Path, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports that do not go down."""
    level = {folder: floor for floor, folders in enumerate(layers) for folder in folders}
    wrong = []
    for one in edges:
        importer = _folder(_module(package.parent / one.file, package), level)
        imported = _folder(one.source, level)
        if importer != imported and level[imported] >= level[importer]:
            direction = "up" if level[imported] > level[importer] else "sideways"
            wrong.append(
                f"{one}: {direction}, {importer or 'the faces'} -> {imported or 'the faces'}"
            )
    return wrong


def circles(edges: list[Import], package: Path) -> list[str]:
    """Groups of files that import one another, each with the lines that tie it."""
    ties: dict[str, dict[str, list[Import]]] = {}
    for one in edges:
        importer = _module(package.parent / one.file, package)
        if one.source != importer:
            ties.setdefault(importer, {}).setdefault(one.source, []).append(one)
    reached = {module: _reached(module, ties) for module in ties}
    groups = {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in ties
        if module in reached[module]
    }
    return [
        f"{len(group)} files: "
        + "; ".join(
            str(tie)
            for module in sorted(group)
            for source in sorted(ties[module])
            if source in group
            for tie in ties[module][source]
        )
        for group in sorted(groups, key=sorted)
    ]


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _folder(module: str, folders: dict[str, int]) -> str:
    parts = module.split(".")[1:]
    names = (".".join(parts[:k]) for k in range(len(parts), -1, -1))
    return next(name for name in names if name in folders)


def _source(base: str, name: str, files: dict[str, Path]) -> str:
    """The module that an import reads: a file that is named, or the one that has the name."""
    return f"{base}.{name}" if f"{base}.{name}" in files else base


def _reached(start: str, ties: dict[str, dict[str, list[Import]]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(ties.get(start, ()))
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += ties.get(module, ())
    return seen


def between_folders(package: Path) -> set[tuple[str, str]]:
    """Pairs of folders of which the first imports from the second."""
    level = {folder: floor for floor, folders in enumerate(LAYERS) for folder in folders}
    pairs = {
        (_folder(_module(package.parent / edge.file, package), level), _folder(edge.source, level))
        for edge in imports(package)
    }
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def lines(package: Path) -> dict[str, int]:
    """Lines of Python in each folder."""
    counts = dict.fromkeys((folder for layer in LAYERS for folder in layer), 0)
    for path in package.rglob("*.py"):
        counts[_folder(_module(path, package), counts)] += path.read_text().count("\n")
    return counts


def main() -> int:
    counts = lines(PACKAGE)
    for level, folders in enumerate(LAYERS, 1):
        print(level, ", ".join(f"{folder or 'faces'} {counts[folder]:,}" for folder in folders))
    print(f"{sum(counts.values()):,} lines")
    everything = imports(PACKAGE)
    wrong = upward(everything, PACKAGE, LAYERS) + circles(everything, PACKAGE)
    wrong += upward(includes(FFI), FFI, FFI_LAYERS)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
