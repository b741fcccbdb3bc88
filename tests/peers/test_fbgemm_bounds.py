"""Ids out of range: what FBGEMM's modes and those of jax_tt do, each in terms of a batch without such ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt import Lookup, lookup_features
from tests.conftest import method_fixture
from tests.peers.ours import Ours
from tests.peers.rules import RULES
from tests.peers.tables import NEIGHBOURS, Batch, assert_close, random_batch
from tests.peers.tbe import BoundsCheckMode

method = method_fixture("reference", "native")
RULE = RULES["rowwise adagrad"]
VALUES = NEIGHBOURS.values()


def rows_of_ids(batch: Batch) -> np.ndarray:
    """The number of rows of the table of every id."""
    sizes = [NEIGHBOURS.sizes[table][0] for table in NEIGHBOURS.of_features]
    return np.repeat(sizes, batch.lengths_of_features)


def bad_batch() -> Batch:
    """Every fourth id is too large and every fifth one negative; -1 stands for a pruned row in FBGEMM."""
    batch = random_batch(NEIGHBOURS, 0, weighted=True)
    position = np.arange(len(batch.ids))
    ids = np.where(position % 4 == 0, rows_of_ids(batch) + position, batch.ids)
    return batch._replace(ids=np.where(position % 5 == 0, -2 - position, ids).astype(np.int32))


def is_bad(batch: Batch) -> np.ndarray:
    return (batch.ids < 0) | (batch.ids >= rows_of_ids(batch))


def left_out(batch: Batch) -> Batch:
    keep = ~is_bad(batch)
    before = np.concatenate([[0], np.cumsum(keep)])
    offsets = before[batch.offsets].astype(np.int32)
    return Batch(batch.ids[keep], offsets, batch.weights[keep], batch.sizes)


def at_the_nearest_row(batch: Batch) -> Batch:
    return batch._replace(ids=np.clip(batch.ids, 0, rows_of_ids(batch) - 1).astype(np.int32))


def at_row_0(batch: Batch) -> Batch:
    return batch._replace(ids=np.where(is_bad(batch), 0, batch.ids).astype(np.int32))


def tbe(mode: str):
    return RULE.tbe(NEIGHBOURS, VALUES, bounds_check_mode=BoundsCheckMode[mode])


def assert_agree(ours: Ours, batch: Batch, theirs, equivalent: Batch) -> None:
    rows, _ = ours.step(batch)
    want, _ = theirs.step(equivalent)
    assert_close(rows, want)
    assert_close(ours.values(), theirs.values(), RULE.rtol, RULE.atol)
    assert_close(ours.arrays("slot_sum_0"), theirs.states("sum"), RULE.rtol, RULE.atol)


@pytest.mark.parametrize(
    ("bounds", "meaning"), [("warn", left_out), ("zero", left_out), ("clip", at_the_nearest_row)]
)
def test_modes_of_jax_tt(bounds, meaning, method):
    batch = bad_batch()
    assert is_bad(batch).any() and not is_bad(meaning(batch)).any()
    ours = Ours(NEIGHBOURS, VALUES, Lookup(bounds=bounds, method=method), RULE.ours)
    assert_agree(ours, batch, tbe("FATAL"), meaning(batch))


@pytest.mark.parametrize("mode", ["WARNING", "IGNORE"])
def test_modes_of_fbgemm(mode):
    """Both read and train row 0."""
    batch = bad_batch()
    ours = Ours(NEIGHBOURS, VALUES, Lookup(bounds="error"), RULE.ours)
    assert_agree(ours, at_row_0(batch), tbe(mode), batch)


def test_offsets_are_repaired_as_fbgemm_does():
    """Both raise an offset to the one before it."""
    batch = random_batch(NEIGHBOURS, 0, weighted=True)
    offsets = batch.offsets.copy()
    offsets[3] = offsets[6]
    assert (np.diff(offsets) < 0).any()
    ours = Ours(NEIGHBOURS, VALUES, Lookup(bounds="zero"), RULE.ours)
    keyed = dataclasses.replace(ours.keyed(batch), offsets=jnp.asarray(offsets))
    rows, _ = lookup_features(ours.collection, ours.state, keyed, ours.lookup)
    assert_close(list(rows.values()), tbe("IGNORE").rows(batch._replace(offsets=offsets)))


def test_both_stop():
    with pytest.raises(RuntimeError, match="Expected idx"):
        tbe("FATAL").rows(bad_batch())
    ours = Ours(NEIGHBOURS, VALUES, Lookup(bounds="error", method="native"), RULE.ours)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of range"):
        ours.rows(bad_batch())
