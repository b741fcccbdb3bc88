"""The public names: few at the top, the others by module, each of them in the documentation."""

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import jax_tt

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODULES = [
    found.name
    for found in pkgutil.iter_modules(jax_tt.__path__)
    if not found.name.startswith("_") and found.name != "cli"
]


def module_of(name):
    return importlib.import_module(f"jax_tt.{name}")


def names(module):
    return [
        name
        for name in dir(module)
        if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
    ]


def test_the_top_has_at_most_45_names():
    assert len(names(jax_tt)) <= 45


def test_the_top_shows_no_module_of_python():
    assert not {"importlib", "typing"} & {*dir(jax_tt)}


def test_modules_at_the_top_are_public():
    found = {name: getattr(jax_tt, name) for name in dir(jax_tt) if not name.startswith("_")}
    modules = {name: one.__name__ for name, one in found.items() if isinstance(one, ModuleType)}
    ours = {name for name, full in modules.items() if full.startswith("jax_tt")}
    # The command line is an attribute wherever another test has imported it.
    assert ours - {"cli"} == {*MODULES}
    assert all(getattr(jax_tt, name) is module_of(name) for name in MODULES)


def test_every_name_is_in_the_documentation():
    text = "\n".join(page.read_text() for page in sorted(DOCS.rglob("*.md")))
    found = {one for module in (jax_tt, *map(module_of, MODULES)) for one in names(module)}
    assert not [one for one in found if not re.search(rf"(?<!\w){one}\b", text)]
