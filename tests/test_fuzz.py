"""Hostile calls, in processes of their own: a crash is a failed test with the call that did it.

The quick tier makes 1,000, the rest 5,000; `make fuzz` makes 100,000.
"""

import pytest

from tests.conftest import native_available
from tests.fuzz.__main__ import SHARES, run


@pytest.mark.parametrize("calls", [1000, pytest.param(5000, marks=pytest.mark.full)])
@pytest.mark.parametrize("part", SHARES)
def test_hostile_calls_raise_or_return(part, calls):
    if part == "files":
        for package in ("safetensors", "orbax.checkpoint", "matplotlib", "scipy", "tqdm"):
            pytest.importorskip(package)
    if part in ("data", "raw", "collection") and not native_available():
        pytest.skip("the native module is not built")
    passed, report = run(part, round(calls * SHARES[part]), seed=0, timeout=1800)
    print(report)
    assert passed, report
