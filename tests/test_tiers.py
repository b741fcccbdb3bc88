"""The choice of the quick tier."""

import itertools

from tests.tiers import covering


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
