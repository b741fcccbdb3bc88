"""Steps that FBGEMM 1.8 takes wrongly on the CPU, against gradients by hand."""

import numpy as np
import pytest

from jax_tt import Lookup, optimizers
from tests.conftest import method_fixture
from tests.peers.by_hand import by_hand
from tests.peers.ours import Ours
from tests.peers.tables import NEIGHBOURS, Tables, assert_close, random_batch

method = method_fixture("reference", "native")
RATE, EPS = 0.1, 0.05


def in_float32(arrays):
    return [array.astype(np.float32) for array in arrays]


@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_means_that_are_divided_by_the_number_of_ids(weighted, method):
    """FBGEMM divides the results, but not the gradients of rows and weights if there are weights."""
    tables = NEIGHBOURS._replace(combiner="mean_count")
    values, batch = tables.values(), random_batch(tables, 0, weighted=weighted)
    ours = Ours(tables, values, Lookup(method=method), optimizers.SGD(RATE))
    rows, gradient = ours.step(batch)
    want = by_hand(tables, values, batch)
    assert_close(rows, in_float32(want.rows))
    stepped = [value - RATE * own for value, own in zip(values, want.gradients, strict=True)]
    assert_close(ours.values(), in_float32(stepped))
    assert (gradient is not None) == weighted
    if weighted:
        assert_close([gradient], in_float32([want.weights]))


@pytest.mark.parametrize("rule", [optimizers.Adagrad, optimizers.RowWiseAdagrad])
def test_features_that_share_a_table_and_are_not_neighbours(rule, method):
    """FBGEMM then updates the rows once per feature, each time with the gradient of that feature alone, or fails."""
    tables = Tables()
    assert tables.of_features == (0, 1, 0, 2)
    values, batch = tables.values(), random_batch(tables, 0)
    ours = Ours(tables, values, Lookup(method=method), rule(RATE, EPS))
    ours.step(batch)
    gradients = by_hand(tables, values, batch).gradients
    squares = [own**2 for own in gradients]
    if rule.rowwise:
        squares = [own.mean(axis=1) for own in squares]
    assert_close(ours.arrays("slot_sum_0"), in_float32(squares))
    scales = [np.sqrt(own).reshape(len(own), -1) + EPS for own in squares]
    stepped = [
        value - RATE * own / scale
        for value, own, scale in zip(values, gradients, scales, strict=True)
    ]
    assert_close(ours.values(), in_float32(stepped), 1e-5, 1e-5)
