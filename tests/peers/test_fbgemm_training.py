"""Training steps of a collection against FBGEMM's table-batched embedding on the CPU."""

from typing import Any

import numpy as np
import pytest

from jax_tt import Lookup
from tests.conftest import method_fixture
from tests.peers.ours import Ours
from tests.peers.rules import IN_PLACE, RULES, Rule
from tests.peers.tables import Batch, Tables, assert_close, batch_without_ids, random_batch
from tests.peers.tbe import TBE, SparseType

method = method_fixture("reference", "native")


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


def both(rule: Rule, tables: Tables, method: str, storage: Any = np.float32) -> tuple[Ours, TBE]:
    """The same tables in both libraries."""
    values, lookup = tables.values(storage), Lookup(dtype=np.float32, method=method)
    precision = {np.float32: SparseType.FP32, np.float16: SparseType.FP16}[storage]
    theirs = rule.tbe(tables, values, weights_precision=precision)
    return Ours(tables, values, lookup, rule.ours), theirs


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_trajectories(name, weighted, method):
    """Ids occur more than once in bags, in features, and in features that share a table."""
    rule = RULES[name]
    ours, theirs = both(rule, rule.tables, method)
    for seed in range(20):
        batch = random_batch(rule.tables, seed, weighted=weighted)
        assert_same_step(rule, ours, theirs, batch)


def test_averages_in_place(method):
    """FBGEMM averages at the beginning of a step, and jax_tt at the end of the step before."""
    ours, theirs = both(IN_PLACE, IN_PLACE.tables, method)
    for t in range(1, 21):
        batch = random_batch(IN_PLACE.tables, t)
        (rows, _), (want, _) = ours.step(batch), theirs.step(batch)
        assert_close(rows, want, IN_PLACE.rtol, IN_PLACE.atol)
        if (t + 1) % 3 != 0:
            assert_close(ours.values(), theirs.values(), IN_PLACE.rtol, IN_PLACE.atol)


@pytest.mark.parametrize("combiner", ["mean", None])
@pytest.mark.parametrize("name", RULES)
def test_other_combiners(name, combiner, method):
    """Sequences have one width in FBGEMM."""
    rule = RULES[name]
    tables = rule.tables._replace(combiner=combiner)
    if combiner is None:
        tables = tables._replace(sizes=tuple((rows, 8) for rows, _ in tables.sizes))
    ours, theirs = both(rule, tables, method)
    for seed in range(3):
        assert_same_step(rule, ours, theirs, random_batch(tables, seed))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.own_sizes])
def test_sizes_of_features(name, weighted, method):
    rule = RULES[name]
    sizes = (5, 0, 3, 2, 1, 4)[: len(rule.tables.of_features)]
    ours, theirs = both(rule, rule.tables, method)
    for seed in range(3):
        batch = random_batch(rule.tables, seed, sizes, weighted=weighted)
        assert_same_step(rule, ours, theirs, batch)


@pytest.mark.parametrize("name", RULES)
def test_batches_without_ids_change_nothing(name, method):
    rule = RULES[name]
    ours, theirs = both(rule, rule.tables, method)
    assert_same_step(rule, ours, theirs, batch_without_ids(rule.tables))
    assert_close(ours.values(), rule.tables.values(), 0, 0)


@pytest.mark.parametrize("name", RULES)
def test_tables_in_float16(name, method):
    """One step, whose rows are rounded to nearest; optimizer states are float32 in both."""
    rule = RULES[name]._replace(rtol=1e-3, atol=1e-3)
    ours, theirs = both(rule, rule.tables, method, np.float16)
    assert_same_step(rule, ours, theirs, random_batch(rule.tables, 0))
