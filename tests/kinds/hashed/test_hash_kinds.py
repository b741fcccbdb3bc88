"""Hash tables, in the tests that every kind passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
import jax_tt.linen
from tests.kinds.kind_case import KindCase

TRAIN = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(48, 8, ranks=4))
OPTIONS = {"policy": "none", "ways": 8, "safe_check": "error"}


class HashCase(KindCase):
    @functools.cached_property
    def state(self):
        """With a key in every slot."""
        state = jax.jit(self.table.init)(jax.random.key(0))
        insert = jax.jit(
            lambda state, keys: jax_tt.dynamic.insert(
                jax_tt.tables.HashTable(self.table.table, **{**OPTIONS, "safe_check": "ignore"}),
                state,
                keys,
            )[1]
        )
        draw = np.random.default_rng(0)
        while (state["hash_touched"] == 0).any():
            keys = draw.integers(0, 2**64, 200, np.uint64)
            state = insert(state, jax_tt.dynamic.split_keys(keys))
        return state

    def ids(self, rows):
        entries = jax_tt.dynamic.keys_of(self.table, self.state)
        assert (entries["slot"] == np.arange(48)).all()
        return jax_tt.SplitIds(jnp.asarray(jax_tt.dynamic.split_keys(entries["key"]).digits)[rows])

    def with_ids(self, model):
        _, state = jax_tt.dynamic.insert(model.table, model.state(), self.bags())
        for name, value in state.items():
            getattr(model, name)[...] = value
        return model

    def variables_with_ids(self, model, variables):
        _, variables = jax_tt.linen.update_table(
            model,
            variables,
            lambda table, state: jax_tt.dynamic.insert(table, state, self.bags()),
        )
        return variables

    def test_lookup_equals_the_dense_table(self):
        dense = jax_tt.tables.to_dense(self.table, self.state)
        rows = np.array([[0, 3], [47, 3]])
        for method in ("reference", "auto"):
            lookup = jax_tt.Lookup(method=method)
            found, _ = jax_tt.lookup(self.table, self.state, self.ids(rows), lookup)
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
