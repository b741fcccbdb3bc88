"""Training steps of a collection against FBGEMM's table-batched embedding on the CPU."""

import numpy as np
import pytest

from jax_tt import Lookup
from tests.conftest import method_fixture
from tests.peers.ours import Ours
from tests.peers.rules import RULES, Rule
from tests.peers.tables import (
    NEIGHBOURS,
    SEQUENCES,
    Batch,
    assert_close,
    batch_without_ids,
    random_batch,
)
from tests.peers.tbe import TBE, SparseType

method = method_fixture("reference", "ffi")
MEANS = NEIGHBOURS._replace(combiner="mean")
STEPS = 20


def assert_same_step(rule: Rule, ours: Ours, theirs: TBE, batch: Batch) -> None:
    """Steps both; asserts that results, gradients of weights, values and optimizer states agree."""
    (rows, gradient), (want, want_gradient) = ours.step(batch), theirs.step(batch)
    assert_close(rows, want, rule.rtol, rule.atol)
    assert (gradient is None) == (want_gradient is None) == (batch.weights is None)
    if gradient is not None and want_gradient is not None:
        assert_close([gradient], [want_gradient], rule.rtol, rule.atol)
    assert_close(ours.values(), theirs.values(), rule.rtol, rule.atol)
    for slot, state in rule.states.items():
        assert_close(ours.arrays(slot), theirs.states(state), rule.rtol, rule.atol)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_trajectories(name, weighted, method):
    """Ids occur more than once in bags, in features, and in features that share a table."""
    rule, values = RULES[name], NEIGHBOURS.values()
    ours = Ours(NEIGHBOURS, values, Lookup(method=method), rule.ours)
    theirs = rule.tbe(NEIGHBOURS, values)
    for seed in range(STEPS):
        assert_same_step(rule, ours, theirs, random_batch(NEIGHBOURS, seed, weighted=weighted))


@pytest.mark.parametrize("tables", [MEANS, SEQUENCES], ids=["mean", "sequences"])
@pytest.mark.parametrize("name", RULES)
def test_other_combiners(name, tables, method):
    rule, values = RULES[name], tables.values()
    ours = Ours(tables, values, Lookup(method=method), rule.ours)
    theirs = rule.tbe(tables, values)
    for seed in range(3):
        assert_same_step(rule, ours, theirs, random_batch(tables, seed))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.own_sizes])
def test_sizes_of_features(name, weighted, method):
    rule, values = RULES[name], NEIGHBOURS.values()
    ours = Ours(NEIGHBOURS, values, Lookup(method=method), rule.ours)
    theirs = rule.tbe(NEIGHBOURS, values)
    for seed in range(3):
        batch = random_batch(NEIGHBOURS, seed, (5, 0, 3, 2), weighted=weighted)
        assert_same_step(rule, ours, theirs, batch)


@pytest.mark.parametrize("name", RULES)
def test_batches_without_ids_change_nothing(name, method):
    rule, values = RULES[name], NEIGHBOURS.values()
    ours = Ours(NEIGHBOURS, values, Lookup(method=method), rule.ours)
    theirs = rule.tbe(NEIGHBOURS, values)
    assert_same_step(rule, ours, theirs, batch_without_ids(NEIGHBOURS))
    assert_close(ours.values(), values, 0, 0)


@pytest.mark.parametrize("name", RULES)
def test_tables_in_float16(name, method):
    """One step, whose rows are rounded to nearest; optimizer states are float32 in both."""
    values = NEIGHBOURS.values(np.float16)
    rule = RULES[name]._replace(rtol=1e-3, atol=1e-3)
    ours = Ours(NEIGHBOURS, values, Lookup(dtype=np.float32, method=method), rule.ours)
    theirs = rule.tbe(NEIGHBOURS, values, weights_precision=SparseType.FP16)
    assert_same_step(rule, ours, theirs, random_batch(NEIGHBOURS, 0))
