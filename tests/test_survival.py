"""A short run of `tests.survival`, which see for long ones."""

import pytest

from tests import survival
from tests.conftest import running

RUNS = [
    survival.Run("nnx", fused=True, donate=True, method="ffi", unused=True),
    survival.Run("nnx", fused=False, donate=False, method="ffi", unused=True),
    survival.Run("linen", fused=True, donate=True, method="reference", unused=True),
    survival.Run("linen", fused=False, donate=True, method="ffi", unused=True),
    survival.Run("nnx", fused=True, donate=True, method="ffi", unused=True, around=True),
    survival.Run("linen", fused=True, donate=True, method="ffi", unused=True, around=True),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_model_survives_what_comes(run):
    with running(run.method):
        survival.survive(run, 30)
