"""Hostile calls, in processes of their own: a crash is a failed test with the call that did it.

The suite makes 500; `make fuzz` makes 100,000.
"""

import pytest

from tests.conftest import native_available
from tests.fuzz.__main__ import SHARES, run


@pytest.mark.parametrize("part", SHARES)
def test_hostile_calls_raise_or_return(part):
    if part == "files":
        for package in ("orbax.checkpoint", "matplotlib"):
            pytest.importorskip(package)
    if part in ("data", "raw", "collection") and not native_available():
        pytest.skip("the native module is not built")
    passed, report = run(part, max(1, round(500 * SHARES[part])), seed=0, timeout=1800)
    print(report)
    assert passed, report
