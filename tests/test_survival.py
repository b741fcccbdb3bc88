"""A short run of `tests.survival`, which see for long ones."""

from typing import Any

import pytest

from tests import survival
from tests.conftest import running

RUNS: list[Any] = [
    survival.Run("nnx", fused=True, donate=True, method="native", unused=True, around=True),
    survival.Run("linen", fused=True, donate=True, method="reference", unused=True),
]
OTHERS = [
    survival.Run("nnx", fused=True, donate=True, method="native", unused=True),
    survival.Run("linen", fused=True, donate=True, method="native", unused=True, around=True),
    # Without fused tables.
    survival.Run("nnx", fused=False, donate=False, method="native", unused=True),
    survival.Run("linen", fused=False, donate=True, method="native", unused=True),
]
RUNS += [pytest.param(run, marks=pytest.mark.slow, id=str(run)) for run in OTHERS]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_model_survives_what_comes(run):
    with running(run.method):
        survival.survive(run, 30)
