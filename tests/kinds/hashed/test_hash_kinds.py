"""Hash tables, in the tests that every kind passes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
import jax_tt.linen
from tests.helpers import to_dense
from tests.kinds.kind_case import KindCase

TRAIN = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(48, 8, ranks=4))
OPTIONS = {"policy": "none", "ways": 8, "safe_check": "error"}


@functools.partial(jax.jit, static_argnums=0)
def insert(table, state, ids):
    return jax_tt.dynamic.insert(table, state, ids)[1]


@functools.cache
def filled(table):
    """A state with a key in every slot, and the digits of the keys."""
    state = jax.jit(table.init)(jax.random.key(0))
    quiet = dataclasses.replace(table, safe_check="ignore")
    draw = np.random.default_rng(0)
    while (np.asarray(state["hash_touched"]) == 0).any():
        keys = draw.integers(0, 2**64, 200, np.uint64)
        state = insert(quiet, state, jax_tt.dynamic.split_keys(keys))
    entries = jax_tt.dynamic.keys_of(table, state)
    assert (entries["slot"] == np.arange(48)).all()
    return state, np.asarray(jax_tt.dynamic.split_keys(entries["key"]).digits)


class HashCase(KindCase):
    @property
    def state(self):
        return dict(filled(self.table)[0])

    def ids(self, rows):
        return jax_tt.SplitIds(jnp.asarray(filled(self.table)[1])[rows])

    def with_ids(self, model):
        for name, value in insert(model.table, model.state(), self.bags()).items():
            getattr(model, name)[...] = value
        return model

    def variables_with_ids(self, model, variables):
        def change(table, state):
            return jax_tt.dynamic.insert(table, state, self.bags())

        return jax.jit(lambda own: jax_tt.linen.update_table(model, own, change)[1])(variables)

    def test_lookup_equals_the_dense_table(self):
        dense = np.asarray(to_dense(self.table, self.state))
        rows = np.array([[0, 3], [47, 3]])

        @functools.partial(jax.jit, static_argnums=2)
        def lookup(state, ids, method):
            return jax_tt.lookup(self.table, state, ids, jax_tt.Lookup(method=method))[0]

        for method in ("reference", "auto"):
            found = lookup(self.state, self.ids(rows), method)
            np.testing.assert_allclose(found, dense[rows], rtol=1e-5, atol=1e-6)


class TestHash(HashCase):
    table = jax_tt.tables.HashTable(jax_tt.tables.DenseTable(48, 8), **OPTIONS)


class WrappedCase(HashCase):
    """Of a table inside, whose own tests have every combiner."""

    @pytest.mark.slow
    def test_bags_and_their_gradients(self):
        super().test_bags_and_their_gradients("mean_count")


class TestHashOfTensorTrain(WrappedCase):
    table = jax_tt.tables.HashTable(TRAIN, **OPTIONS)


@pytest.mark.slow
class TestHashOfOrdered(WrappedCase):
    table = jax_tt.tables.HashTable(
        jax_tt.tables.OrderedTable(TRAIN, jax_tt.order.IdOrder(np.arange(48)[::-1])), **OPTIONS
    )
