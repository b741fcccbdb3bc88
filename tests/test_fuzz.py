"""Hostile calls, in a process of their own: a crash is a failed test with the call that did it.

The suite makes 500; `make fuzz` makes 100,000.
"""

from importlib.util import find_spec

from tests.conftest import native_available
from tests.fuzz.__main__ import SHARES, run


def test_hostile_calls_raise_or_return():
    left_out = set() if native_available() else {"data", "offsets", "raw", "collection"}
    if not (find_spec("orbax") and find_spec("matplotlib")):
        left_out.add("files")
    calls = {part: max(1, round(500 * share)) for part, share in SHARES.items()}
    passed, report = run(
        {part: count for part, count in calls.items() if part not in left_out}, 0, timeout=1800
    )
    print(report)
    assert passed, report
