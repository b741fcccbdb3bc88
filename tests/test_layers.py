"""Imports go down, from room to room: those inside functions and for type checkers count too."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "jax_tt"

# From the lowest: a room may import the rooms of lower layers and itself. Rooms of one layer do not know each other.
LAYERS = (
    ("_base",),
    ("_jax", "_formats", "optimizers"),
    ("_ids",),
    ("_tt", "_sets"),
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
    found = []
    for module, path in sorted(files.items()):
        file = path.relative_to(package.parent).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                asked = [(alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    folder = module.split(".")[: None if path.name == "__init__.py" else -1]
                    base = ".".join(
                        [*folder[: len(folder) - node.level + 1], *filter(None, [base])]
                    )
                asked = [(_of(base, alias.name, files), alias.name) for alias in node.names]
            else:
                continue
            found += [
                Import(file, node.lineno, source, name)
                for source, name in asked
                if source == root or source.startswith(f"{root}.")
            ]
    return found


def upward(found: list[Import], package: Path, layers: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports that do not go down."""
    level = {room: floor for floor, rooms in enumerate(layers) for room in rooms}

    def room(module: str) -> str:
        parts = module.split(".")[1:]
        names = [".".join(parts[:k]) for k in range(len(parts), -1, -1)]
        return next(name for name in names if name in level)

    bad = []
    for one in found:
        mine, other = room(_module(package.parent / one.file, package)), room(one.source)
        if mine != other and level[other] >= level[mine]:
            direction = "up" if level[other] > level[mine] else "sideways"
            bad.append(f"{one}: {direction}, {mine or 'the faces'} -> {other or 'the faces'}")
    return bad


def circles(found: list[Import], package: Path) -> list[str]:
    """Groups of files that import one another, each with the lines that tie it."""
    ties: dict[str, dict[str, list[Import]]] = {}
    for one in found:
        mine = _module(package.parent / one.file, package)
        if one.source != mine:
            ties.setdefault(mine, {}).setdefault(one.source, []).append(one)
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


def _of(base: str, name: str, files: dict[str, Path]) -> str:
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


def test_there_are_at_most_fourteen_layers():
    assert len(LAYERS) <= 14


def test_every_file_is_in_a_room():
    rooms = {room for layer in LAYERS for room in layer}
    folders = {path.relative_to(PACKAGE).parts for path in PACKAGE.rglob("*.py")}
    homeless = {
        parts
        for parts in folders
        if parts[0].startswith("_")
        and parts[0] != "__init__.py"
        and parts[-1] != "__init__.py"
        and not rooms & {".".join(parts[:k]) for k in range(1, len(parts))}
    }
    assert not homeless


def test_imports_go_down():
    assert upward(imports(PACKAGE), PACKAGE, LAYERS) == []


def test_there_are_no_circles():
    assert circles(imports(PACKAGE), PACKAGE) == []


@pytest.mark.parametrize(
    ("line", "direction"),
    [
        ("from lib.high.b import y", "up"),
        ("def f():\n    from lib.high import b", "up"),
        ("if TYPE_CHECKING:\n    from ..high.b import y", "up"),
        ("import lib.beside.c", "sideways"),
    ],
)
def test_a_planted_import_is_found(tmp_path, line, direction):
    package = _planted(tmp_path, line)
    layers = (("low", "beside"), ("high",), ("",))
    (bad,) = upward(imports(package), package, layers)
    assert bad.startswith("lib/low/a.py:") and f": {direction}, low -> " in bad


def test_a_planted_circle_is_found(tmp_path):
    package = _planted(tmp_path, "def f():\n    from lib.high import b")
    (circle,) = circles(imports(package), package)
    assert circle.startswith(
        "2 files: lib/high/b.py:1: x from lib.low.a; lib/low/a.py:2: b from lib.high.b"
    )


def _planted(folder: Path, line: str) -> Path:
    package = folder / "lib"
    for name, text in {
        "__init__.py": "",
        "low/__init__.py": "",
        "low/a.py": f"{line}\nx = 1\n",
        "high/__init__.py": "",
        "high/b.py": "from lib.low.a import x\ny = x\n",
        "beside/__init__.py": "",
        "beside/c.py": "",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package
