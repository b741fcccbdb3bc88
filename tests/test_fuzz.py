"""Hostile calls, in processes of their own: a crash is a failed test with the call that did it.

The quick tier makes 1,000, the rest 4,000 others; `make fuzz` makes 100,000.
"""

import pytest

from tests.conftest import native_available
from tests.fuzz.__main__ import SHARES, run


@pytest.mark.parametrize(
    ("calls", "seed"), [(1000, 0), pytest.param(4000, 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("part", SHARES)
def test_hostile_calls_raise_or_return(part, calls, seed):
    if part == "files":
        for package in ("orbax.checkpoint", "matplotlib"):
            pytest.importorskip(package)
    if part in ("data", "raw", "collection") and not native_available():
        pytest.skip("the native module is not built")
    passed, report = run(part, round(calls * SHARES[part]), seed=seed, timeout=1800)
    print(report)
    assert passed, report
