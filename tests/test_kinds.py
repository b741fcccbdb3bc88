"""The kinds of the package, in the tests that every kind passes."""

import numpy as np

import jax_tt
from jax_tt._cache.maintain import populated
from tests.kind_case import KindCase

TRAIN = jax_tt.TTTable.of_shape(jax_tt.TTShape.suggest(50, 8, ranks=4))


class TestDense(KindCase):
    table = jax_tt.DenseTable(50, 8)


class TestTensorTrain(KindCase):
    table = TRAIN


class TestOrdered(KindCase):
    table = jax_tt.OrderedTable(TRAIN, jax_tt.order.IdOrder(np.arange(50)[::-1]))


class TestCached(KindCase):
    table = jax_tt.RowCachedTable(TRAIN, jax_tt.RowCache(10, ways=5))

    @property
    def state(self):
        """With rows that are not those of the cores."""
        state, ids = super().state, np.array([1, 2, 49])
        _, state = jax_tt.lookup_rows(self.table, state, ids, jax_tt.Lookup())
        state = populated(self.table, state, "auto")
        return {**state, "cache_rows": state["cache_rows"] + 0.5}
