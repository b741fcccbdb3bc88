"""The choice of the tiers, and of the sample of the quick one."""

import itertools

import pytest

from tests.tiers import SAMPLE_STEP, covering, select


def _pairs(*values):
    return set(itertools.combinations(enumerate(map(str, values)), 2))


def test_a_cover_holds_every_pair_in_fewer_cases():
    axes = ("abcd", "xyz", "01", "pq")
    cases = {str(case): _pairs(*case) for case in itertools.product(*axes)}
    chosen = covering(cases)
    assert set().union(*(cases[case] for case in chosen)) == set().union(*cases.values())
    assert 4 * 3 <= len(chosen) <= 16 < len(cases)


def test_two_axes_and_tests_without_parameters_stay_whole():
    cases = {str(case): _pairs(*case) for case in itertools.product("abc", "xy")}
    assert covering(cases) == set(cases)
    assert covering({"alone": set()}) == {"alone"}
    assert covering({}) == set()


class _Item:
    def __init__(self, nodeid, marks=(), **params):
        self.nodeid, self._marks = nodeid, marks
        if params:
            self.callspec = type("Call", (), {"params": params})

    def get_closest_marker(self, name):
        return getattr(pytest.mark, name).mark if name in self._marks else None


def test_the_sample_has_tests_of_every_module_and_few_of_the_reference():
    items = [_Item(f"tests/test_a.py::test_{k}") for k in range(SAMPLE_STEP + 1)]
    items += [_Item(f"tests/test_b.py::test[{m}]", method=m) for m in ("cuda_emulated", "native")]
    items += [_Item(f"tests/test_c.py::test[{m}]", method=m) for m in ("reference", "native")]
    items += [_Item("tests/test_d.py::test[reference]", method="reference")]
    items += [
        _Item("tests/test_e.py::test", ("full",)),
        _Item("tests/test_f.py::test", ("unsampled",)),
    ]
    chosen, left = select(items, "sample")
    assert [item.nodeid for item in chosen] == [
        "tests/test_a.py::test_0",
        f"tests/test_a.py::test_{SAMPLE_STEP}",
        "tests/test_b.py::test[native]",
        "tests/test_c.py::test[native]",
        "tests/test_d.py::test[reference]",
    ]
    assert len(chosen) + len(left) == len(items)


def test_the_tiers_are_all_tests_and_the_first_two_have_every_pair():
    product = list(itertools.product("abc", "xyz", "01"))
    items = [
        _Item(f"tests/test_a.py::test[{'-'.join(p)}]", a=p[0], b=p[1], c=p[2]) for p in product
    ]
    items += [_Item("tests/test_b.py::test", ("full",)), _Item("tests/test_b.py::test_quick")]
    items += [_Item(f"tests/test_c.py::test[{k}]", ("full",), k=k) for k in range(4)]
    tiers = {tier: select(items, tier)[0] for tier in ("quick", "rest", "combinations")}
    nodes = [item.nodeid for chosen in tiers.values() for item in chosen]
    assert sorted(nodes) == sorted(item.nodeid for item in items)
    assert set(select(items, "pairs")[0]) == {*tiers["quick"], *tiers["rest"]}
    assert {item.nodeid for item in tiers["rest"][-5:]} == {
        "tests/test_b.py::test",
        *(f"tests/test_c.py::test[{k}]" for k in range(4)),
    }
    both = [
        item.callspec.params
        for item in tiers["quick"] + tiers["rest"]
        if item.nodeid.startswith("tests/test_a.py")
    ]
    for first, second in itertools.combinations("abc", 2):
        assert len({(case[first], case[second]) for case in both}) == (9 if second == "b" else 6)
    assert all(item.nodeid.startswith("tests/test_a.py") for item in tiers["combinations"])
    assert len(tiers["combinations"]) >= 6
