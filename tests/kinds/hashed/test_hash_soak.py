"""The long run of random operations, cut short."""

from functools import partial

import pytest

from jax_tt._base.progress import Progress
from tests.conftest import WAYS, method_fixture
from tests.kinds.hashed import hash_run, hash_soak

# The reference takes long to trace; `test_hash_directory` and `test_hash_tables` have its results.
method = method_fixture(*WAYS[1:])


# Of all policies, those whose tables have an admission.
@pytest.mark.slow(but="native")
@pytest.mark.parametrize("policy", hash_run.ADMISSIONS)
def test_hash_table_equals_dicts(policy, method):
    make = partial(hash_soak.HashRun, policy, method)
    assert hash_soak.run(make, 4000, Progress(shown=False)) >= 4000


def test_tiers_equal_dicts():
    assert hash_soak.run(hash_soak.TiersRun, 4000, Progress(shown=False)) >= 4000
