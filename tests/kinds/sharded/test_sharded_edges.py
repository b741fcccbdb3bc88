"""Divided tables at their limits: fewer rows than devices, axes of one device, no ids in a batch, ids beyond int32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_tt
from jax_tt import Placement, optimizers
from jax_tt.planning import Exchange
from jax_tt.tables import ShardedTable

LARGEST = np.iinfo(np.int32).max
ROWS, SUMS = Exchange(pooled="rows"), Exchange(pooled="sums")


def _mesh(sizes):
    names = ("data", "model")[-len(sizes) :]
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def _step(table, state, ids):
    def loss(trained):
        rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, ids, bounds="zero")
        return jnp.sum(jnp.sin(3 * rows + 1)), rows

    trained = {name: state[name] for name in table.spec.trained_names}
    return jax.grad(loss, has_aux=True)(trained)


STEP = jax.jit(_step, static_argnums=0)


def _check_equal(rows, sizes, axis, placement, exchange, batches):
    plain = jax_tt.dense_table(rows, 4, optimizer=optimizers.Adam(0.05))
    table = ShardedTable(plain, _mesh(sizes), axis, placement, exchange)
    state = jax.jit(plain.init)(jax.random.key(1))
    own = table.of_rows(state)
    for ids in batches:
        (new, sums), (found, own_sums) = STEP(plain, state, ids), STEP(table, own, ids)
        np.testing.assert_allclose(own_sums, sums, rtol=1e-5, atol=1e-6)
        state, own = {**state, **new}, {**own, **found}
    for name, array in jax.jit(table.by_row)(own).items():
        np.testing.assert_allclose(array, state[name], rtol=1e-5, atol=1e-6, err_msg=name)


def _batches(rows):
    """Ids of all rows, of one row, out of range, and none."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, (8, 3))
    outside = rng.choice([-2, -LARGEST - 1, LARGEST, rows], ids.shape)
    for batch in (
        ids,
        np.full_like(ids, rows - 1),
        np.where(ids % 2, ids, outside),
        np.full_like(ids, -1),
    ):
        yield batch.astype(np.int32)


@pytest.mark.slow(but="three")
@pytest.mark.parametrize(
    ("rows", "sizes", "axis", "placement", "exchange"),
    [
        pytest.param(1, (4,), "model", Placement.hashed(), ROWS, id="one row"),
        pytest.param(
            3, (2, 2), ("model", "data"), Placement.contiguous(), SUMS, id="three rows, two axes"
        ),
        pytest.param(40, (1, 4), "data", Placement.hashed(), ROWS, id="an axis of one device"),
    ],
)
def test_fewer_rows_than_devices_axes_of_one_device_and_several_axes(
    rows, sizes, axis, placement, exchange
):
    _check_equal(rows, sizes, axis, placement, exchange, _batches(rows))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [ROWS, SUMS], ids=["rows", "sums"])
def test_batches_without_ids_and_ids_beyond_int32(exchange):
    ends = jnp.asarray([0] * 5 + [5] * 4, jnp.int32)
    large = np.array([[0, 2**31], [2**32 - 1, 3]], np.uint32)
    batches = [
        np.zeros((8, 0), np.int32),
        np.zeros((0, 3), np.int32),
        jax_tt.Bags(jnp.arange(5), ends),
        np.tile(large, (4, 1)),
    ]
    _check_equal(40, (4,), "model", Placement.hashed(), exchange, batches)
