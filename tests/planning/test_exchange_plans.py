"""`plan_exchange`: messages whose sizes are counted hold the batches that they were counted for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_tt
from jax_tt import Lookup, Placement
from jax_tt._ids.inputs import bag_batch
from jax_tt._table.groups import BoundTable, Call
from jax_tt.planning import Exchange
from jax_tt.tables import ShardedTable

ROWS, BAGS, LENGTH = 4000, 32, 40


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))


def _ids(hot):
    """Few different ids: those of one device under a contiguous placement, or one in half of the places."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS // 4 if hot == "neighbours" else ROWS, (BAGS, LENGTH))
    return np.where(rng.random(ids.shape) < 0.5, 7, ids) if hot == "one" else ids


def _fits(table, ids):
    """Whether the messages of the expected sizes hold a batch; the bags are those of one device."""

    @jax.jit
    def forward(state, ids):
        batch, _ = bag_batch(table.ids, ids, jnp.float32)
        lookup = Lookup(bounds="zero")
        call = Call(BoundTable(table, lookup), state, batch, ())
        (sums,), residuals = table.group.forward([call], None)
        return sums[:, 0], residuals.fits

    state = table.table.init(jax.random.key(0))
    sums, fits = forward(table.of_rows(state), jnp.asarray(ids))
    np.testing.assert_allclose(
        sums, np.asarray(state["embedding"])[ids].sum(axis=1), rtol=1e-5, atol=1e-5
    )
    assert fits.all() or not fits.any()  # all devices agree
    return bool(fits.all())


@pytest.mark.slow(but="one-sums")
@pytest.mark.parametrize("pooled", ["rows", "sums"])
@pytest.mark.parametrize("hot", ["neighbours", "one"])
def test_counted_messages_hold_skewed_batches(mesh, hot, pooled):
    plain, ids = jax_tt.dense_table(ROWS, 4), _ids(hot)
    placement = Placement.contiguous() if hot == "neighbours" else Placement.hashed()
    table = ShardedTable(plain, mesh, "model", placement)
    exchange = jax_tt.planning.plan_exchange(table, ids, pooled=pooled)
    assert exchange.pooled == pooled
    assert 0 < exchange.expected_unique < 1
    parts = ids.reshape(4, -1)
    assert exchange.expected_unique == max(len(np.unique(part)) for part in parts) / parts.shape[1]
    counted = ShardedTable(plain, mesh, "model", placement, exchange)
    assert _fits(counted, ids)
    if (hot, pooled) == ("one", "rows"):
        # A frequent id is one row: the owners of the different rows are even.
        assert exchange.expected_skew < 1.5
    else:
        assert exchange.expected_skew > (3.9 if hot == "neighbours" else 2)
        even = Exchange(expected_unique=exchange.expected_unique, pooled=pooled)
        assert not _fits(ShardedTable(plain, mesh, "model", placement, even), ids)


def test_counts_of_replicas_and_column_shards():
    """Replicas share the requests of a page by the place of a device along the axes of the table alone."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    plain, ids = jax_tt.dense_table(40, 4), np.arange(16).reshape(4, 4)
    for axis in ("model", "data"):
        table = ShardedTable(plain, mesh, axis, Placement.pages([(0, 1), 0, 1, 1], 10))
        exchange = jax_tt.planning.plan_exchange(table, ids)
        # Rows 12 to 15 of the last part are all on device 0, of two; those of the first one are on the own device.
        assert (exchange.expected_unique, exchange.expected_skew) == (1, 2)
    columns = ShardedTable(plain, mesh, ("data", "model"), Placement.columns(2))
    # Each of two shards gets all ids, an even spread would be half of them for each of four devices.
    assert jax_tt.planning.plan_exchange(columns, ids).expected_skew == 2
    padding = jax_tt.planning.plan_exchange(columns, np.full((4, 4), -1), pooled="sums")
    assert (padding.expected_unique, padding.expected_skew) == (1 / 4, 1)


def test_errors_name_the_argument(mesh):
    table = ShardedTable(jax_tt.dense_table(40, 4, name="words"), mesh, "model", Placement.hashed())
    with pytest.raises(ValueError, match=r"^ids: got the id 40; expected 0 to 39"):
        jax_tt.planning.plan_exchange(table, np.array([40]))
    with pytest.raises(TypeError, match=r"^ids: got float64 .*; expected integers"):
        jax_tt.planning.plan_exchange(table, np.ones(4))
