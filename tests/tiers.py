"""Which tests belong to the quick tier, and the order in which workers take tests.

`make test` runs the quick tier, `make test-rest` what it leaves out and, with the compiler's optimizations, the tests
marked `optimized` once more. A test marked `full` is not in the quick tier. Of a test with several parameters the quick
tier keeps as many combinations as are needed for every pair of values to occur in one of them (pairwise testing): a
defect that shows only with three certain options is found by the rest.
"""

import itertools
from collections.abc import Iterable

import pytest

TIERS = ("quick", "rest", "all")
Pair = tuple[tuple[str, str], tuple[str, str]]


def select(items: list[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of a tier, and those that are left out."""
    if tier == "all":
        return items, []
    quick = _quick(items)
    chosen: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        wanted = (item.nodeid in quick) == (tier == "quick") or (
            tier == "rest" and _optimized(item)
        )
        (chosen if wanted else left).append(item)
    return chosen, left


def _quick(items: list[pytest.Item]) -> set[str]:
    candidates = [item for item in items if item.get_closest_marker("full") is None]
    functions: dict[str, dict[str, set[Pair]]] = {}
    for item in candidates:
        function = item.nodeid.partition("[")[0]
        functions.setdefault(function, {})[item.nodeid] = _pairs(item)
    return {node for cases in functions.values() for node in covering(cases)}


def covering(cases: dict[str, set[Pair]]) -> set[str]:
    """Cases that contain every pair that any case contains, found greedily; the first of equally good ones is taken."""
    missing = set().union(*cases.values())
    chosen = {case for case, pairs in cases.items() if not pairs}
    while missing:
        best = max(cases, key=lambda case: len(cases[case] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def _pairs(item: pytest.Item) -> set[Pair]:
    """Pairs of parameters with their values; of a single parameter a pair with itself."""
    call = getattr(item, "callspec", None)
    if call is None:
        return set()
    values = sorted((name, _value(value)) for name, value in call.params.items())
    if len(values) == 1:
        values *= 2
    return set(itertools.combinations(values, 2))


def _value(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float | type)
    # Others, such as arrays and tuples of them, need not be comparable; all combinations hold the same object.
    return repr(value) if plain else str(id(value))


def optimized_last(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Tests that are compiled with all optimizations last: the others' programs are dropped once before them."""
    return sorted(items, key=_optimized)


def _optimized(item: pytest.Item) -> bool:
    return item.get_closest_marker("optimized") is not None
