"""Rules that keep the sources easy to read."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import jax_tt
from scripts import count_calls

PACKAGE = Path(jax_tt.__file__).parent
SOURCES = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [
    jax_tt,
    *(
        importlib.import_module(f"jax_tt.{found.name}")
        for found in pkgutil.iter_modules(jax_tt.__path__)
        if not found.name.startswith("_") and found.name != "cli"
    ),
]
# Functions that users call, by the names of their definitions, and the constructors of what they build.
PUBLIC = {
    getattr(getattr(module, name), "__name__", name) for module in MODULES for name in dir(module)
} | {"__init__", "from_pretrained"}


def test_functions_below_the_public_ones_take_at_most_eight_arguments():
    found = [
        f"{path}: {node.name}"
        for path, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name not in PUBLIC
        if len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > 8
    ]
    assert not found


def test_kinds_are_told_apart_in_their_folder_alone():
    kind = re.compile(
        r"isinstance\([^()]*\b(DenseTable|TTTable|RowCachedTable|OrderedTable|Wrapper)\b"
    )
    found = [path for path, text in SOURCES.items() if kind.search(text)]
    assert not [path for path in found if path.parts[0] not in ("_kinds", "_ops", "_table")]


def test_files_are_small():
    assert max(text.count("\n") for text in SOURCES.values()) <= 600


@pytest.mark.usefixtures("one_device")
def test_eager_fused_forward_passes_are_short():
    for count, functions, depth in (
        (count_calls.eager_fused_forward, 56, 14),
        (count_calls.eager_collection_forward, 88, 17),
    ):
        counted = count()
        assert 0 < len(counted.functions) <= functions, count.__name__
        assert 0 < counted.depth <= depth, count.__name__
