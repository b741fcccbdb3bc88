"""Rules that keep the sources easy to read."""

import re
from pathlib import Path

import pytest

import jax_tt
from scripts import count_calls, walk

PACKAGE = Path(jax_tt.__file__).parent
SOURCES = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def test_kinds_are_told_apart_in_their_folder_alone():
    kind = re.compile(
        r"isinstance\([^()]*\b(DenseTable|TTTable|RowCachedTable|OrderedTable|Wrapper)\b"
    )
    found = [path for path, text in SOURCES.items() if kind.search(text)]
    assert not [path for path in found if path.parts[0] not in ("_kinds", "_ops", "_table")]


@pytest.mark.usefixtures("one_device")
def test_eager_fused_forward_passes_are_short():
    for count, functions, depth in (
        (count_calls.eager_fused_forward, 56, 14),
        (count_calls.eager_collection_forward, 88, 17),
    ):
        counted = count()
        assert 0 < len(counted.functions) <= functions, count.__name__
        assert 0 < counted.depth <= depth, count.__name__


@pytest.mark.usefixtures("one_device")
def test_traced_steps_walk_no_further():
    """What tracing a step enters: files, calls from one folder to another, and the depth of calls."""
    for name, files, rooms, levels in (
        ("EmbedBag", 34, 72, 18),
        ("collection of three", 40, 197, 18),
        ("inserting hash table", 55, 250, 34),
    ):
        step, args = walk.steps()[name]
        found = walk.walk(step, *args)
        assert 0 < found.files <= files, name
        assert 0 < found.rooms <= rooms, name
        assert 0 < found.levels <= levels, name
