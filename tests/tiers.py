"""Selects the tests of a tier, and orders tests.

`make test` runs the quick tier, `make test-rest` the rest, and `make test-combinations` what is left; `make test-pairs`
runs the first two together, so that what tests of a module share is compiled and prepared once. A test marked
`full` is not in the quick tier, except for the parameters that contain `text` if it is marked `full(but=text)`. For a
test with several parameters, the quick tier has enough combinations to contain every value of each, or, if it is marked
`pairwise`, every pair of values. The rest adds all other tests, and combinations such that the two tiers together have
every pair of values of every test. A defect that needs a combination of three values is found by the third tier.

Programs of the reference take several times as long to compile as those of native ops, so the quick tier has one
combination of each test that is not `pairwise` with it.

`make test-newest` runs the sample tier: of each module, the first test of the quick tier and every fortieth after it.
Tests marked `unsampled`, which do not depend on the versions of Python's packages, and emulated kernels, which that
target does not build, are left out, and the reference where a module has tests without it.
"""

import itertools
from collections.abc import Collection, Iterable

import pytest

TIERS = ("quick", "rest", "pairs", "combinations", "sample", "all")
SAMPLE_STEP = 40
Pair = tuple[tuple[str, str], tuple[str, str]]


def select(items: list[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of a tier, and those that are left out."""
    if tier == "all":
        return items, []
    quick = _quick(items)
    if tier == "sample":
        nodes = _sample([item for item in items if item.nodeid in quick])
    elif tier == "quick":
        nodes = quick
    else:
        rest = _rest(items, quick)
        left_over = {item.nodeid for item in items} - quick - rest
        nodes = {"rest": rest, "pairs": quick | rest, "combinations": left_over}[tier]
    chosen = [item for item in items if item.nodeid in nodes]
    left = [item for item in items if item.nodeid not in nodes]
    return chosen, left


def _sample(items: list[pytest.Item]) -> set[str]:
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _method(item) != "cuda_emulated" and not item.get_closest_marker("unsampled"):
            modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    chosen: set[str] = set()
    for cases in modules.values():
        others = [item for item in cases if _method(item) != "reference"]
        chosen |= {item.nodeid for item in (others or cases)[::SAMPLE_STEP]}
    return chosen


def _method(item: pytest.Item) -> object:
    call = getattr(item, "callspec", None)
    return None if call is None else call.params.get("method")


def _quick(items: list[pytest.Item]) -> set[str]:
    functions: dict[str, dict[str, set[Pair]]] = {}
    for item in items:
        cases = functions.setdefault(item.nodeid.partition("[")[0], {})
        full = item.get_closest_marker("full")
        if full is None or ("but" in full.kwargs and full.kwargs["but"] in _parameters(item)):
            cases[item.nodeid] = _needed(item)
    return {node for cases in functions.values() for node in covering(cases)}


def _rest(items: list[pytest.Item], quick: set[str]) -> set[str]:
    functions: dict[str, dict[str, set[Pair]]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = _pairs(item)
    return {node for cases in functions.values() for node in covering(cases, quick)} - quick


def _parameters(item: pytest.Item) -> str:
    """The parameters of a test in brackets, without the names of its file and its function."""
    _, bracket, parameters = item.nodeid.partition("[")
    return bracket + parameters


def covering(cases: dict[str, set[Pair]], known: Collection[str] = ()) -> set[str]:
    """Cases that contain all pairs together with known ones, chosen greedily; ties are broken by order."""
    missing = set().union(*cases.values())
    missing -= set().union(*(cases[case] for case in cases if case in known))
    chosen = {case for case, pairs in cases.items() if not pairs}
    while missing:
        best = max(cases, key=lambda case: len(cases[case] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def _needed(item: pytest.Item) -> set[Pair]:
    """What a test covers in the quick tier: values of parameters, each paired with itself, or pairs of values."""
    if item.get_closest_marker("pairwise"):
        return _pairs(item)
    values = _values(item)
    if ("method", repr("reference")) in values:
        values = [("method", repr("reference"))]
    return {(value, value) for value in values}


def _pairs(item: pytest.Item) -> set[Pair]:
    """All pairs of values of parameters; a single value is paired with itself."""
    values = _values(item)
    if len(values) == 1:
        return {(values[0], values[0])}
    return set(itertools.combinations(values, 2))


def _values(item: pytest.Item) -> list[tuple[str, str]]:
    call = getattr(item, "callspec", None)
    return (
        [] if call is None else sorted((name, _value(value)) for name, value in call.params.items())
    )


def _value(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float | type)
    # Other values, such as arrays, may not be comparable; all combinations have the same object.
    return repr(value) if plain else str(id(value))


def optimized_last(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Sorts tests compiled with all optimizations last, so that the other programs are dropped only once."""
    return sorted(items, key=lambda item: item.get_closest_marker("optimized") is not None)
