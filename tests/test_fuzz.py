"""Hostile calls, in processes of their own: a crash is a failed test with the call that did it.

JAX_TT_FUZZ_CALLS sets their number; `make fuzz` runs 100,000.
"""

import os

import pytest

from tests.conftest import native_available
from tests.fuzz.__main__ import SHARES, run

CALLS = int(os.environ.get("JAX_TT_FUZZ_CALLS", "5000"))


@pytest.mark.parametrize("part", SHARES)
def test_hostile_calls_raise_or_return(part):
    if part == "files":
        for package in ("safetensors", "orbax.checkpoint", "matplotlib", "scipy", "tqdm"):
            pytest.importorskip(package)
    if part in ("data", "raw") and not native_available():
        pytest.skip("the native module is not built")
    passed, report = run(part, round(CALLS * SHARES[part]), seed=0, timeout=1800)
    print(report)
    assert passed, report
