"""Selects the tests of a tier, and orders tests.

quick:   what `make test` runs: whether a change broke something, in the time of a break.
ci:      what `.ci/run` runs before a change lands: all kinds of faults that tests are known to find, each where it is
         cheapest. It adds the tests marked `slow`; of one marked `slow(but=text)`, quick has the case with that text.
sample:  what `make test-newest` runs with the newest packages: of each module the first test of the quick tier and
         every fortieth after it, without tests marked `unsampled`, without emulated kernels, which that target does
         not build, and without the reference where a module has tests without it.
all:     what `make soak` runs: every combination of parameters.

Of a test with several parameters, the first three tiers have as many combinations as contain every value of each; if it
is marked `each_way`, every value with each native implementation. With the reference, whose programs take several times
as long to compile as those of native operations, they have one.
"""

from collections.abc import Iterable

import pytest

TIERS = ("quick", "ci", "sample", "all")
SAMPLE_STEP = 40


def select(items: list[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of a tier, and those that are left out."""
    if tier == "all":
        return items, []
    nodes = _covering(item for item in items if tier == "ci" or not _slow(item))
    if tier == "sample":
        nodes = _sample([item for item in items if item.nodeid in nodes])
    chosen = [item for item in items if item.nodeid in nodes]
    left = [item for item in items if item.nodeid not in nodes]
    return chosen, left


def _slow(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("slow")
    # Of the node, the brackets with the parameters.
    return (
        mark is not None and mark.kwargs.get("but", "no text") not in item.nodeid.partition("[")[2]
    )


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


def _covering(items: Iterable[pytest.Item]) -> set[str]:
    functions: dict[str, dict[str, set[object]]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = _values(item)
    return {node for cases in functions.values() for node in covering(cases)}


def covering(cases: dict[str, set[object]]) -> set[str]:
    """Cases that contain all values together, chosen greedily; ties are broken by order."""
    missing = set().union(*cases.values())
    chosen = {case for case, values in cases.items() if not values}
    while missing:
        best = max(cases, key=lambda case: len(cases[case] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def _values(item: pytest.Item) -> set[object]:
    """What a case covers: values of its parameters, of which the reference is enough by itself."""
    if _method(item) == "reference":
        return {"reference"}
    call = getattr(item, "callspec", None)
    params = {} if call is None else call.params
    way = _method(item) if item.get_closest_marker("each_way") else None
    return {(way, name, _value(value)) for name, value in params.items()}


def _value(value: object) -> str:
    plain = value is None or isinstance(value, str | int | float | type)
    # Other values, such as arrays, may not be comparable; all combinations have the same object.
    return repr(value) if plain else str(id(value))


def optimized_last(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Sorts tests compiled with all optimizations last, so that the other programs are dropped only once."""
    return sorted(items, key=lambda item: item.get_closest_marker("optimized") is not None)
