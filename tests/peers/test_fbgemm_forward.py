"""Results of a collection against FBGEMM's table-batched embedding on the CPU."""

# pyright: reportMissingImports=false

from typing import NamedTuple

import numpy as np
import pytest

from jax_tt import Lookup
from tests.conftest import method_fixture
from tests.peers.ours import Ours
from tests.peers.tables import (
    NEIGHBOURS,
    SEQUENCES,
    Batch,
    Tables,
    assert_close,
    batch_without_ids,
    random_batch,
)
from tests.peers.tbe import TBE, SparseType

method = method_fixture("reference", "native")
POOLED = Tables()
MEANS = Tables(combiner="mean")


class Case(NamedTuple):
    """Tables and a batch of them."""

    tables: Tables
    batch: Batch


CASES = {
    "sum": Case(POOLED, random_batch(POOLED, 0)),
    "sum with weights": Case(POOLED, random_batch(POOLED, 1, weighted=True)),
    "mean": Case(MEANS, random_batch(MEANS, 2)),
    "sequences": Case(SEQUENCES, random_batch(SEQUENCES, 3)),
    "sizes of features": Case(POOLED, random_batch(POOLED, 4, (5, 1, 3, 2))),
    "sizes of features with weights": Case(
        POOLED, random_batch(POOLED, 5, (5, 1, 3, 2), weighted=True)
    ),
    "a feature without bags": Case(MEANS, random_batch(MEANS, 6, (5, 0, 3, 2))),
    "no ids": Case(POOLED, batch_without_ids(POOLED)),
    "no ids in means": Case(MEANS, batch_without_ids(MEANS)),
    "no ids in sequences": Case(SEQUENCES, batch_without_ids(SEQUENCES)),
}


@pytest.mark.parametrize("case", CASES)
def test_results(case, method):
    tables, batch = CASES[case]
    values = tables.values()
    want = TBE(tables, values).rows(batch)
    assert_close(Ours(tables, values, Lookup(method=method)).rows(batch), want)


@pytest.mark.parametrize("case", ["sum", "mean", "sequences"])
def test_ids_of_64_bits(case, x64):
    tables, batch = CASES[case]
    batch = batch._replace(ids=batch.ids.astype(np.int64), offsets=batch.offsets.astype(np.int64))
    values = tables.values()
    want = TBE(tables, values).rows(batch)
    assert_close(Ours(tables, values, Lookup()).rows(batch), want)


def test_weighted_means_that_are_divided_by_the_number_of_ids(method):
    batch = random_batch(MEANS, 7, weighted=True)
    values = MEANS.values()
    want = TBE(MEANS, values).rows(batch)
    counted = MEANS._replace(combiner="mean_count")
    assert_close(Ours(counted, values, Lookup(method=method)).rows(batch), want)


@pytest.mark.parametrize(("combiner", "weighted"), [("sum", True), ("mean", False)])
@pytest.mark.parametrize("storage", [np.float32, np.float16])
def test_results_in_float16(combiner, weighted, storage, method):
    """Of tables of both types; both libraries add in float32."""
    tables = NEIGHBOURS._replace(combiner=combiner)
    batch = random_batch(tables, 8, weighted=weighted)
    values = tables.values(storage)
    precision = {np.float32: SparseType.FP32, np.float16: SparseType.FP16}[storage]
    want = TBE(tables, values, weights_precision=precision, output_dtype=SparseType.FP16)
    got = Ours(tables, values, Lookup(dtype=np.float16, method=method))
    assert_close(got.rows(batch), want.rows(batch), 1e-3)
