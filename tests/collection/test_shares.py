"""Shares of several processes become the batch that one process makes of all samples."""

import itertools

import jax
import numpy as np
import pytest

import jax_tt
from tests.collection.shares_run import BATCHES, CUTS, SAMPLES, TABLES, collection_of, rectangle
from tests.processes import launch


@pytest.mark.slow
def test_two_processes_make_one_batch_of_their_shares(tmp_path):
    runs = launch(tmp_path, 2, "collection.shares_run")
    for name, (features, make) in BATCHES.items():
        want = jax.tree.leaves(collection_of(features).host_batch(make(0, SAMPLES)))
        for own, cut in itertools.product(runs, CUTS):
            got = [own[f"{name} {cut} {k}"] for k in range(len(want))]
            for one, expected in zip(got, want, strict=True):
                assert one.dtype == expected.dtype, name
                np.testing.assert_array_equal(one, expected, f"{name}, {cut}")
    rows = rectangle(0, SAMPLES, 2)
    for own in runs:
        # In the order of the rows on the mesh, as JAX places arrays of processes.
        np.testing.assert_array_equal(own["turned"], np.concatenate([rows[4:], rows[:4]]))
        np.testing.assert_array_equal(own["turned"], own["turned by JAX"])
        np.testing.assert_array_equal(own["nnx"], own["linen"])
    errors = [{k[6:]: str(v) for k, v in own.items() if k.startswith("error")} for own in runs]
    for own in errors:
        for name in ("own", "every"):
            assert "process 1 was given another batch than process 0" in own[name]
            assert "pass local=True" in own[name]
        assert not any(own[f"call {k}"] for k in range(2, 8))
        assert "has a share" not in own["thread"] and not own["thread"]
        for name in ("form", "columns", "weights"):
            assert "got a share of another form in process" in own[name], name
            assert "feature 'a'" in own[name] and "np.zeros((0, 5), int)" in own[name]
        for name in ("capacity", "order"):
            assert "got another capacity, or KeyedBags with features in another order" in own[name]
        assert "sharding: got None with local=True" in own["none"]
        for name in ("replicated", "both"):
            assert "that every process has neighbouring rows of its own" in own[name]
    for name in ("one fails", "one fails locally"):
        assert "RuntimeError: host_batch: process 1 failed, and this one" in errors[0][name]
        assert "got id 100 at position 0" in errors[1][name]


def test_one_process_has_all_shares():
    for features, make in BATCHES.values():
        collection, whole = collection_of(features), make(0, SAMPLES)
        got, want = (collection.host_batch(whole, local=local) for local in (True, False))
        assert jax.tree.all(jax.tree.map(np.array_equal, got, want))
    got = jax_tt.pipeline.host_batch(TABLES["item"], [[1], []], local=True)
    np.testing.assert_array_equal(got.offsets, [0, 1, 1])
