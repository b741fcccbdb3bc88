"""Sphinx settings: `make docs` builds build/docs from the pages here and the docstrings of jax_tt."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

project = "jax_tt"
author = "The jax_tt authors"
project_copyright = author
found = re.search(r'__version__ = "(.+)"', (ROOT / "jax_tt" / "_base" / "version.py").read_text())
assert found is not None
version = release = found[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Docstrings name objects of the library in single backticks.
default_role = "py:obj"

myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"jax_tt {version}"

# "a, b," on a line of arguments that goes on in the next one.
_NAMES = re.compile(r"\s+(\w+, )*\w+,$")


def join_names(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Puts argument names that share one description on one line, as napoleon wants them."""
    for i in reversed(range(len(lines) - 1)):
        if _NAMES.fullmatch(lines[i]):
            lines[i : i + 2] = [f"{lines[i]} {lines[i + 1].strip()}"]


def setup(app: Any) -> None:
    # Before napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", join_names, priority=400)
