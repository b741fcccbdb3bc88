"""Imports go down, from folder to folder."""

from pathlib import Path

from scripts.layers import (
    FFI,
    FFI_LAYERS,
    LAYERS,
    PACKAGE,
    circles,
    imports,
    includes,
    upward,
)


def test_there_are_at_most_fourteen_layers():
    assert len(LAYERS) <= 14


def test_every_file_is_in_a_folder_of_a_layer():
    folders = {folder for layer in LAYERS for folder in layer}
    homeless = [
        path
        for path in (file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))
        if path.parts[0].startswith("_")
        and path.name not in ("__init__.py", "__main__.py")
        and not folders & {".".join(path.parts[:k]) for k in range(1, len(path.parts))}
    ]
    assert not homeless


def test_imports_go_down_and_make_no_circles():
    found = imports(PACKAGE)
    assert upward(found, PACKAGE, LAYERS) == []
    assert circles(found, PACKAGE) == []


def test_includes_of_cpp_folders_go_down():
    found = includes(FFI)
    assert len(found) > 500
    assert upward(found, FFI, FFI_LAYERS) == []


def test_a_planted_include_is_found(tmp_path):
    (tmp_path / "ffi" / "core").mkdir(parents=True)
    (tmp_path / "ffi" / "core" / "a.h").write_text('#include <x>\n#include "ffi/cuda/tt/b.h"\n')
    (wrong,) = upward(includes(tmp_path / "ffi"), tmp_path / "ffi", FFI_LAYERS)
    assert wrong == "ffi/core/a.h:2: b from ffi.cuda.tt.b: up, core -> cuda.tt"


def test_a_planted_import_is_found(tmp_path):
    for line, direction in (
        ("from lib.high.b import y", "up"),
        ("def f():\n    from lib.high import b", "up"),
        ("if TYPE_CHECKING:\n    from ..high.b import y", "up"),
        ("import lib.beside.c", "sideways"),
    ):
        package = _planted(tmp_path, line)
        layers = (("low", "beside"), ("high",), ("",))
        (wrong,) = upward(imports(package), package, layers)
        assert wrong.startswith("lib/low/a.py:") and f": {direction}, low -> " in wrong, line


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
