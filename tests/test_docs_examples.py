"""Examples of the documentation run: those in docstrings, README.md and docs/*.md; every public name has one."""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_tt
from jax_tt._base import reports
from tests.conftest import native_available
from tests.copied_arrays import watching

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block that only shows something opens with ```python no-run.
BLOCK = re.compile(
    r"^```python[ \t]*(?P<flags>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [
    "jax_tt",
    *(
        f"jax_tt.{found.name}"
        for found in pkgutil.iter_modules(jax_tt.__path__)
        if not found.name.startswith("_") and found.name != "cli"
    ),
]


@pytest.fixture
def _trains_all_tables() -> Iterator[None]:
    """No example computes next values of fused tables that nothing takes."""
    reports.forget()
    yield
    assert not [key for key in reports._reported if "next values" in str(key)]


# Layers of pages, and copies of all or some of their arrays. What `replaced` returns shares variables with its layer.
COPIES = {
    "collections.md": [("served", "apart"), ("served", "further"), ("served", "layer")],
    "quickstart.md": [("served", "other")],
    "id_order.md": [("layer", "restored")],
}


@pytest.mark.slow(but="README")
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
@pytest.mark.usefixtures("promotion_of_a_user", "_trains_all_tables")
def test_markdown(page, tmp_path, monkeypatch):
    """The blocks of a page run in order and see each other's names; no compiled step or evaluation copies a table."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    assert "axis_types" not in text  # meshes are those that jax.make_mesh makes by default
    assert "nnx.clone(" not in text  # it shares arrays
    assert ("jnp.copy" in text) == (page.name in COPIES)
    names: dict[str, object] = {"__name__": "__main__"}
    with watching(str(page)):
        for match in BLOCK.finditer(text):
            if "no-run" in match["flags"]:
                continue
            line = text.count("\n", 0, match.start("code"))
            if ">>>" in match["code"]:
                run_session(match["code"], names, page, line)
            else:
                # Blank lines in front keep the line numbers of the page in tracebacks.
                exec(compile("\n" * line + match["code"], str(page), "exec"), names)
    for name, copy in COPIES.get(page.name, ()):
        check_copy(names[name], names[copy])


def check_copy(layer, copy):
    """A donated step of either leaves the arrays of the other."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: jnp.roll(x, 1), state), donate_argnums=0)
    for stepped, other in ((layer, copy), (copy, layer)):
        before = jax.tree.leaves(nnx.state(stepped))
        nnx.update(stepped, step(nnx.state(stepped)))
        assert any(array.is_deleted() for array in before)
        assert not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(other)))


def run_session(code: str, names: dict[str, object], page: Path, line: int) -> None:
    test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
    names.update(test.globs)


def modules() -> list[ModuleType]:
    """All Python modules of the package; its compiled ones have no examples."""
    found = pkgutil.walk_packages(jax_tt.__path__, "jax_tt.")
    named = [importlib.import_module(info.name) for info in found if not _compiled(info)]
    return [jax_tt, *named]


def _compiled(info: pkgutil.ModuleInfo) -> bool:
    spec = info.module_finder.find_spec(info.name, None)  # pyright: ignore[reportCallIssue]
    return spec is None or not str(spec.origin).endswith(".py")


def docstrings() -> dict[str, list[doctest.DocTest]]:
    """Every docstring with an example, once, by the folder or file right below the package."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = {test.name: test for module in modules() for test in finder.find(module)}
    found: dict[str, list[doctest.DocTest]] = {}
    for name, test in sorted(tests.items()):
        if test.examples:
            found.setdefault(".".join(name.split(".")[:2]), []).append(test)
    return found


# Examples of what only installations with native operations have.
NATIVE = {"jax_tt._base.installed.get_include", "jax_tt.optimizers.native.register"}
EXAMPLES = docstrings()


@pytest.mark.parametrize("tests", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.usefixtures("promotion_of_a_user", "_trains_all_tables")
def test_docstrings(tests):
    """All that fail are reported, each with its name and its line."""
    report: list[str] = []
    for test in tests:
        if test.name not in NATIVE or native_available():
            doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert not report, "".join(report)


def public_objects():
    """Public classes and functions of the package, each once, and the methods worth an example."""
    seen = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("jax_tt"):
                continue
            if inspect.isclass(value) or inspect.isroutine(value):
                seen[id(value)] = (f"{module_name}.{name}", value)
    return sorted(seen.values(), key=lambda item: item[0])


def test_flax_names_are_public():
    names = [name for name, _ in public_objects()]
    for name in ("TTEmbed", "TTEmbedBag", "EmbedBag", "FusedParam", "FusedOptimizer"):
        assert f"jax_tt.nnx.{name}" in names or f"jax_tt.{name}" in names
        assert getattr(jax_tt, name) is getattr(jax_tt.nnx, name)
        assert name in dir(jax_tt)


# Plain records and protocols: their fields are described where they are made.
WITHOUT_EXAMPLE = {
    "jax_tt.SplitIds",
    "jax_tt.tt.Cost",
    "jax_tt.Table",
    "jax_tt.extension.ReferenceTable",  # tests/kinds/test_toy_kind.py is its example
    "jax_tt.extension.Wrapper",  # tests/kinds/test_wrappers.py has one
    # What kinds register; users call functions of layers and of collections.
    "jax_tt.extension.grow",
    "jax_tt.extension.maintain",
    "jax_tt.extension.reorder",
    "jax_tt.extension.with_cache",
    "jax_tt.extension.without_values",
    # What checkpoints hold of a kind.
    "jax_tt.extension.by_row",
    "jax_tt.extension.in_pieces",
    "jax_tt.extension.of_pieces",
    "jax_tt.extension.of_rows",
    "jax_tt.extension.pieces",
    "jax_tt.extension.unsharded",
    "jax_tt.optimizers.Optimizer",
    "jax_tt.optimizers.Slot",
}


def test_every_public_name_is_documented():
    texts = {name: inspect.getdoc(value) or "" for name, value in public_objects()}
    assert not [name for name, text in texts.items() if not text], "no docstring"
    without = {name for name, text in texts.items() if ">>>" not in text}
    assert not without - WITHOUT_EXAMPLE, "no example"
