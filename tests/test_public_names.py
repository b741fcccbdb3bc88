"""The public names: few at the top, the others by module, each of them in the documentation."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import jax_tt
from jax_tt._table.options import DEFAULT_BOUNDS

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


def signatures():
    """Of all functions, constructors and methods, by their names."""
    for module in (jax_tt, *map(module_of, MODULES)):
        for name in names(module):
            one = getattr(module, name)
            methods = inspect.getmembers(one, inspect.isroutine) if inspect.isclass(one) else ()
            for own, function in methods or ((name, one),):
                written = inspect.isfunction(function) or inspect.ismethod(function)
                if written and (own == "__init__" or own[0] != "_"):
                    yield f"{module.__name__}.{name} {own}", inspect.signature(function)


def test_bounds_have_one_default():
    found = {}
    for called, signature in signatures():
        for argument in signature.parameters.values():
            if argument.name == "bounds":
                found[called] = argument.default
            elif isinstance(argument.default, jax_tt.Lookup):
                found[called] = argument.default.bounds
    doors = {f"jax_tt.{name} __init__" for name in ("Lookup", "EmbedBag", "EmbedCollection")}
    doors |= {
        "jax_tt.TableEmbed from_pretrained",
        "jax_tt.Tiers prefetch",
        "jax_tt.tt.lookup lookup",
        "jax_tt.linen.TableEmbed __init__",
    }
    assert doors < {*found}
    assert {*found.values()} == {DEFAULT_BOUNDS}, found
