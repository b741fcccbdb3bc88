"""The kinds of the package, in the tests that every kind passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.kinds.kind_case import KindCase

TRAIN = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(50, 8, ranks=4))


class TestDense(KindCase):
    table = jax_tt.tables.DenseTable(50, 8)


class TestProductCodes(KindCase):
    table = jax_tt.coded_table(50, 8, num_codes=4, bits=3, rotated=True)


class TestProductsOfSums(KindCase):
    table = jax_tt.coded_table(50, 8, num_codes=4, bits=3, terms=2, hot=20, hot_terms=1)


@pytest.mark.slow
class TestCodebooksInATrain(KindCase):
    table = jax_tt.coded_table(
        50, 8, num_codes=4, bits=3, codebook_shape=jax_tt.TTShape(32, 2, 2, (8, 4), (2, 1))
    )


class TestTensorTrain(KindCase):
    table = TRAIN


class TestOrdered(KindCase):
    table = jax_tt.tables.OrderedTable(TRAIN, jax_tt.order.IdOrder(np.arange(50)[::-1]))


class TestCached(KindCase):
    table = jax_tt.tables.RowCachedTable(TRAIN, jax_tt.RowCache(10, ways=5))

    @functools.cached_property
    def state(self):
        """With rows that are not those of the cores."""

        @jax.jit
        def warmed(ids):
            state = self.table.init(jax.random.key(0))
            _, state = jax_tt.lookup(self.table, state, ids)
            return jax_tt.cache.populate(self.table, state)

        state = warmed(np.array([1, 2, 49]))
        return {**state, "cache_rows": state["cache_rows"] + 0.5}


def test_wrappers_refuse_what_they_cannot_wrap():
    order = jax_tt.order.IdOrder(np.arange(60)[::-1])
    dense = jax_tt.tables.DenseTable(60, 8)
    for make in (
        lambda table: jax_tt.tables.OrderedTable(table, order),
        lambda table: jax_tt.tables.RowCachedTable(table, jax_tt.RowCache(8)),
    ):
        with pytest.raises(TypeError, match=r"table: got 'dense'; expected a jax_tt\.Table"):
            make("dense")
    with pytest.raises(TypeError, match="table: got one that has an order of ids"):
        jax_tt.tables.OrderedTable(jax_tt.tables.OrderedTable(dense, order), order)
    state = jax_tt.tables.OrderedTable(dense, order).init(jax.random.key(0))
    del state["id_order"]
    with pytest.raises(ValueError, match="state: has no id_order"):
        lookup = jax_tt.Lookup(bounds="zero")
        jax_tt.lookup(jax_tt.tables.OrderedTable(dense, order), state, jnp.array([1]), lookup)


def test_tables_of_two_orders_are_two_tables():
    orders = [
        jax_tt.order.IdOrder(rows) for rows in (np.arange(60)[::-1], np.roll(np.arange(60), 1))
    ]
    one, other = (
        jax_tt.tables.OrderedTable(jax_tt.tables.DenseTable(60, 8), order) for order in orders
    )
    assert one != other
    init = jax.jit(lambda table, key: table.init(key)["id_order"], static_argnums=0)
    assert (init(one, jax.random.key(0)) != init(other, jax.random.key(0))).any()


class OfTables(KindCase):
    """Tables of tables."""

    def named(self, array):
        _, k, name = array.split("_", 2)
        return f"{type(self.table).__name__}( of 50 rows)?, table {k}: {name}"


@pytest.mark.slow
class TestSum(OfTables):
    """Of trains in two orders and a dense table."""

    table = jax_tt.tables.SumTable(
        (
            TRAIN,
            jax_tt.tables.OrderedTable(TRAIN, jax_tt.order.IdOrder(np.arange(50)[::-1])),
            jax_tt.tables.DenseTable(50, 8),
        )
    )


@pytest.mark.slow
class TestMixed(OfTables):
    """Of dense rows and coded ones."""

    table = jax_tt.tables.MixedTable(
        (
            jax_tt.tables.DenseTable(20, 8),
            jax_tt.coded_table(12, 8, num_codes=4, bits=3),
            jax_tt.tables.DenseTable(18, 8),
        )
    )

    @functools.cached_property
    def state(self):
        parts = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [20, 12, 18]))
        return self.table.with_parts(jax.jit(self.table.init)(jax.random.key(0)), parts)
