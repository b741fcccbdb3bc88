"""The choice of the tiers, and of the sample of the quick one."""

import itertools

import pytest

from tests.tiers import SAMPLE_STEP, covering, select


def test_a_cover_holds_every_value_in_as_many_cases_as_the_longest_axis_has():
    axes = ("abcd", "xyz", "01")
    cases = {str(case): set(enumerate(case)) for case in itertools.product(*axes)}
    chosen = covering(cases)
    assert set().union(*(cases[case] for case in chosen)) == set().union(*cases.values())
    assert len(chosen) == 4
    assert covering({"alone": set()}) == {"alone"}
    assert covering({}) == set()


class _Item:
    def __init__(self, nodeid, marks=(), **params):
        self.nodeid, self._marks = nodeid, dict(marks)
        if params:
            self.callspec = type("Call", (), {"params": params})

    def get_closest_marker(self, name):
        return getattr(pytest.mark, name)(**self._marks[name]).mark if name in self._marks else None


def _chosen(items, tier):
    chosen, left = select(items, tier)
    assert len(chosen) + len(left) == len(items)
    return [item.nodeid for item in chosen]


def test_the_sample_has_tests_of_every_module_and_few_of_the_reference():
    items = [_Item(f"tests/test_a.py::test_{k}") for k in range(SAMPLE_STEP + 1)]
    items += [_Item(f"tests/test_b.py::test[{m}]", method=m) for m in ("cuda_emulated", "native")]
    items += [_Item(f"tests/test_c.py::test[{m}]", method=m) for m in ("reference", "native")]
    items += [_Item("tests/test_d.py::test[reference]", method="reference")]
    items += [
        _Item("tests/test_e.py::test", {"slow": {}}),
        _Item("tests/test_f.py::test", {"unsampled": {}}),
    ]
    assert _chosen(items, "sample") == [
        "tests/test_a.py::test_0",
        f"tests/test_a.py::test_{SAMPLE_STEP}",
        "tests/test_b.py::test[native]",
        "tests/test_c.py::test[native]",
        "tests/test_d.py::test[reference]",
    ]


def test_ci_adds_what_is_slow_and_all_is_every_combination():
    items = [_Item(f"test_a.py::test[{a}{b}]", a=a, b=b) for a in "xyz" for b in "01"]
    items += [
        _Item(f"test_a.py::ways[{a}-{m}]", a=a, method=m)
        for a in "xy"
        for m in ("reference", "native", "cuda_emulated")
    ]
    items += [_Item("test_b.py::slow", {"slow": {}}), _Item("test_b.py::quick")]
    items += [_Item(f"test_c.py::test[{k}]", {"slow": {"but": "2"}}, k=k) for k in range(3)]
    quick = [
        *("test_a.py::test[x0]", "test_a.py::test[y1]", "test_a.py::test[z0]"),
        *("test_a.py::ways[x-reference]", "test_a.py::ways[x-native]"),
        *("test_a.py::ways[y-cuda_emulated]", "test_b.py::quick", "test_c.py::test[2]"),
    ]
    assert _chosen(items, "quick") == quick
    slow = ["test_b.py::slow", "test_c.py::test[0]", "test_c.py::test[1]"]
    assert sorted(_chosen(items, "ci")) == sorted([*quick, *slow])
    assert _chosen(items, "all") == [item.nodeid for item in items]
