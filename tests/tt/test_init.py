"""Distribution of the table entries that the initialisers give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.helpers import dense_table

NAMES = ("approx-normal", "approx-uniform", "normal", "uniform")
TABLES = [
    (4000, 8, 8, 2),
    (3000, 32, (3, 9, 5, 2), 5),
    (8000, 8, 1, 3),
]


def _entries(init, table, seed=0):
    shape = jax_tt.TTShape.suggest(*table)
    cores = jax_tt.tt.init(jax.random.key(seed), shape, init)
    return dense_table(cores, shape.num_embeddings)


def _kurtosis(values):
    return (values**4).mean() / (values**2).mean() ** 2


@pytest.mark.parametrize("init", NAMES)
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_mean_and_variance_of_entries(init, table):
    entries = _entries(init, table)
    target = 1 / (3 * table[0])
    assert abs(entries.var() / target - 1) < 0.02
    # Entries share cores, so the mean converges with the size of the cores, not of the table.
    assert abs(entries.mean()) < 0.1 * target**0.5


def test_headline_table_is_normal():
    shape = jax_tt.TTShape(11_000_000, 64, 32, (200, 220, 250), (4, 4, 4))
    cores = jax_tt.tt.init(jax.random.key(0), shape)
    ids = np.random.default_rng(0).integers(0, 11_000_000, 5000)
    look_up = jax.jit(functools.partial(jax_tt.tt.lookup, method="reference"))
    rows = np.asarray(look_up(cores, ids), np.float64)
    assert abs(rows.var() * 33e6 - 1) < 0.02
    assert abs(_kurtosis(rows) - 3) < 0.1
    deviation = rows / rows.std()
    for sigmas, expected in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert abs((np.abs(deviation) < sigmas).mean() - expected) < 0.005


def test_rank_one_entries_follow_their_targets():
    kurtosis = {init: _kurtosis(_entries(init, TABLES[-1])) for init in NAMES}
    assert abs(kurtosis["approx-normal"] - 3) < 1
    assert abs(kurtosis["approx-uniform"] - 1.8) < 0.7
    assert kurtosis["normal"] > 8  # a product of three normals: what the others avoid


def test_dtype_and_determinism():
    dtype = jnp.bfloat16
    shape = jax_tt.TTShape.suggest(1000, 8, 4)
    one = jax_tt.tt.init(jax.random.key(7), shape, dtype=dtype)
    two = jax_tt.tt.init(jax.random.key(7), shape, dtype=dtype)
    other = jax_tt.tt.init(jax.random.key(8), shape, dtype=dtype)
    assert tuple(core.shape for core in one) == shape.core_shapes
    assert all(core.dtype == dtype and np.isfinite(core.astype(np.float32)).all() for core in one)
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    assert not (one[0] == other[0]).all()


def test_callable_and_errors():
    shape = jax_tt.TTShape.suggest(1000, 8, 4)
    cores = jax_tt.tt.init(jax.random.key(0), shape, jax.nn.initializers.ones)
    assert all((core == 1).all() for core in cores)
    with pytest.raises(ValueError, match="approx-normal"):
        jax_tt.tt.init(jax.random.key(0), shape, "gaussian")
    with pytest.raises(ValueError, match="core 0"):
        jax_tt.tt.init(jax.random.key(0), shape, lambda key, shape, dtype: jnp.ones(3))
