"""A call with a feature that is refused steps, inserts and counts nothing in any of its tables."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jax_tt
from jax_tt import Bags, Feature, KeyedBags

ADAM = jax_tt.optimizers.Adam(0.1)
FEATURES = {"a": Feature("x"), "b": Feature("y"), "c": Feature("h"), "d": Feature("z")}
IDS = np.arange(1, 9)


def _batch(form, last):
    offsets = np.arange(9)
    offsets[2 if form == "dict" else 8] = last
    offsets = jnp.asarray(offsets)
    if form == "keyed":
        return KeyedBags(jnp.asarray(IDS), offsets, keys=tuple(FEATURES))
    whole = {"a": Bags(jnp.asarray(IDS[:2]), offsets[:3])}
    rest = dict(zip("bcd", jnp.asarray(IDS[2:].reshape(3, 2, 1)), strict=True))
    return whole | rest | {"c": jax_tt.dynamic.whole_keys(rest["c"])}


@nnx.jit
def _step(embed, opt, batch):
    def loss(embed):
        rows = embed(batch)
        return sum(jnp.sum(x * y) for x, y in itertools.combinations(rows.values(), 2)), rows

    grads, rows = jax_tt.grad(loss, has_aux=True)(embed)
    opt.update(embed, grads)
    return rows


@pytest.mark.parametrize(
    ("form", "bounds", "devices"),
    [
        ("keyed", "clip", 1),
        ("keyed", "unchecked", 2),
        ("dict", "zero", 1),
        ("dict", "warn", 2),
    ],
)
def test_nothing_changes(form, bounds, devices):
    mesh, hashed = None, jax_tt.hash_table(64, 2, optimizer=ADAM)
    if devices > 1:
        mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    embed = jax_tt.EmbedCollection(
        {
            "x": jax_tt.dense_table(16, 2, optimizer=ADAM),
            "y": jax_tt.dense_table(16, 2, optimizer=ADAM),
            "h": hashed if form == "dict" else jax_tt.dense_table(16, 2, optimizer=ADAM),
            "z": jax_tt.tt_table(16, 2, tt_ranks=2, optimizer=ADAM, cache=jax_tt.RowCache(4)),
        },
        FEATURES,
        jax_tt.Lookup(bounds="error", method="reference" if mesh is None else "auto"),
        mesh=mesh,
        axis=None if mesh is None else "d",
        statistics=mesh is None,
        rngs=nnx.Rngs(0),
    )
    embed.tables["y"].bounds = bounds
    opt = jax_tt.FusedOptimizer(embed, optax.sgd(0.1))
    _step(embed, opt, _batch(form, 2 if form == "dict" else 8))
    before = jax.device_get((embed.states(), nnx.state(embed, jax_tt.nnx.LookupCounts)))
    rows = _step(embed, opt, _batch(form, 12))
    assert all(np.isnan(array).all() for array in rows.values())
    after = jax.device_get((embed.states(), nnx.state(embed, jax_tt.nnx.LookupCounts)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert embed.states()["h"]["step"] == 1
