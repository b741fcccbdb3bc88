"""Layers with tables that are divided over the devices of a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt import Placement

RULE = jax_tt.optimizers.RowWiseAdagrad(0.1)
FEATURES = {
    "clicked": jax_tt.Feature("item"),
    "shown": jax_tt.Feature("item", combiner="mean"),
    "ad": jax_tt.Feature("ad"),
    "big": jax_tt.Feature("big"),
}


def _tables():
    return {
        "item": jax_tt.dense_table(200, 4, optimizer=RULE),
        "ad": jax_tt.dense_table(50, 4),
        "big": jax_tt.tt_table(10_000, 4, tt_ranks=2, optimizer=RULE),
    }


def _mesh(kind, shape=(2, 2)):
    return jax.make_mesh(
        shape,
        ("data", "model"),
        axis_types=(kind,) * 2,
        devices=jax.devices()[: shape[0] * shape[1]],
    )


def _over(mesh, placement=None):
    placement = {"item": Placement.hashed()} if placement is None else placement
    return {} if mesh is None else {"mesh": mesh, "axis": "model", "placement": placement}


def _batches(mesh):
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = {
            name: jnp.asarray(rng.integers(0, 50, (8, length)))
            for name, length in zip(FEATURES, (3, 2, 1, 2), strict=True)
        }
        if mesh is not None:
            batch = jax.device_put(batch, NamedSharding(mesh, P(("data", "model"))))
        yield batch


class _Model(nnx.Module):
    def __init__(self, mesh):
        self.embed = jax_tt.EmbedCollection(_tables(), FEATURES, **_over(mesh), rngs=nnx.Rngs(0))

    def __call__(self, batch):
        return self.embed.concatenated(batch)


@nnx.jit
def _step(model, opt, batch):
    loss, grads = jax_tt.value_and_grad(lambda model: jnp.mean(jnp.sin(model(batch))))(model)
    opt.update(model, grads)
    return loss


def _trained(mesh):
    model = _Model(mesh)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(1e-1))
    losses = []
    for batch in _batches(mesh):
        if mesh is not None and not losses:
            # What is not sharded is on every device.
            state = jax.tree.map(
                lambda array: (
                    jax.device_put(array, NamedSharding(mesh, P()))
                    if len(array.sharding.device_set) == 1
                    else array
                ),
                nnx.state((model, opt)),
            )
            nnx.update((model, opt), state)
        losses.append(float(_step(model, opt, batch)))
    return losses, model.embed.states()


def test_nnx_steps_equal_those_on_one_device():
    losses, states = _trained(None)
    found, own = _trained(_mesh(AxisType.Explicit))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, arrays in states.items():
        for array, value in arrays.items():
            np.testing.assert_allclose(own[name][array], value, rtol=1e-5, atol=1e-6)


def test_states_move_between_meshes_and_placements():
    placements = [
        (_mesh(AxisType.Auto), {"item": Placement.pages([(0, 1), 1, 0], 80)}),
        (None, None),
        (_mesh(AxisType.Auto, (1, 4)), {"item": Placement.contiguous(), "ad": Placement.on(3)}),
        (_mesh(AxisType.Auto, (1, 2)), Placement.hashed()),
    ]
    first = jax_tt.EmbedCollection(_tables(), FEATURES, rngs=nnx.Rngs(5))
    states = first.states()
    for k, (mesh, placement) in enumerate(placements):
        embed = jax_tt.EmbedCollection(
            _tables(), FEATURES, **_over(mesh, placement), rngs=nnx.Rngs(k)
        )
        embed.set_states(jax.device_get(states))
        states = embed.states()
        for name, arrays in first.states().items():
            for array, value in arrays.items():
                np.testing.assert_array_equal(states[name][array], value)


@pytest.mark.slow
def test_linen_calls_equal_those_on_one_device():
    mesh = _mesh(AxisType.Auto)
    batch = next(_batches(mesh))
    plain = jax_tt.linen.EmbedCollection(_tables(), FEATURES)
    sharded = jax_tt.linen.EmbedCollection(_tables(), FEATURES, **_over(mesh))
    results, tables = [], []
    for embed in (plain, sharded):
        variables = jax.jit(embed.init)(jax.random.key(0), batch)

        @jax.jit
        def step(variables, batch, embed=embed):
            def loss(trained):
                rows = embed.apply({**variables, **trained}, batch, method="concatenated")
                return jnp.sum(jnp.sin(rows)), rows

            trained = {k: variables[k] for k in ("params", OVERWRITE_WITH_GRADIENT)}
            return jax.grad(loss, has_aux=True)(trained)

        gradients, rows = step(variables, batch)
        results.append(rows)
        tables.append({**variables.get("placement", {}), **gradients})
    np.testing.assert_allclose(*results, rtol=1e-6)
    own, expected = (found[OVERWRITE_WITH_GRADIENT]["item"]["embedding"] for found in tables[::-1])
    assert own.shape[0] == 2 * 100
    # The same rows, in another order.
    np.testing.assert_allclose(np.sort(own, axis=0), np.sort(expected, axis=0), atol=1e-6)

    update = partial(jax_tt.linen.update_table, sharded, variables)
    frozen, served = update(jax_tt.Collection.frozen)
    assert frozen.layer.mesh is None and OVERWRITE_WITH_GRADIENT not in served
    rows = frozen.layer.apply(served, batch, method="concatenated")
    np.testing.assert_allclose(rows, results[1], rtol=1e-6)
    item = jax_tt.quantize(np.ones((200, 4), np.float32), bits=8)
    with pytest.raises(ValueError, match="some tables alone are divided over the mesh"):
        update(partial(jax_tt.Collection.with_tables, tables={"item": item}))


def test_arguments_that_do_not_fit_are_refused():
    mesh = _mesh(AxisType.Auto)
    over = {"mesh": mesh, "axis": "model"}
    for arguments, message in (
        ({"axis": "model"}, r"axis: got 'model' without a mesh"),
        ({"placement": Placement.hashed()}, r"placement: .* without a mesh"),
        ({"mesh": mesh}, "axis: got None beside a mesh"),
        ({"mesh": mesh, "axis": "modl"}, "axis: got 'modl'"),
        ({**over, "placement": {"itm": None}}, "placement: got the table 'itm'"),
        ({**over, "placement": {"item": 3}}, "placement: got an int"),
        ({**over, "placement": {"big": Placement.hashed()}}, "expected a DenseTable"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_tt.EmbedCollection(_tables(), FEATURES, **arguments, rngs=nnx.Rngs(0))


def test_keys_of_one_table_of_a_collection():
    mesh, keys = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2]), np.arange(10) * 7 - 3
    together, alone = (
        jax_tt.EmbedCollection(
            {"item": jax_tt.hash_table(64, 8)},
            {"seen": jax_tt.Feature("item")},
            mesh=mesh,
            axis="model",
            rngs=nnx.Rngs(0),
        )
        for _ in range(2)
    )
    together.insert({"seen": keys[:, None]})
    layer = alone.tables["item"]
    assert int(layer.insert(keys).counts["inserted"]) == 10
    jax.tree.map(np.testing.assert_array_equal, alone.states(), together.states())
    layer.eval()  # nothing trains it
    layer.remove(keys[:3])
    assert jax_tt.dynamic.statistics(layer.table, layer.state())["keys"] == 7


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_features_of_every_form_in_every_layout(axes):
    """Rectangles are divided over the devices and ragged bags are not; their rows are joined in one sharding."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(axes,))
    tables = {name: jax_tt.dense_table(16, 4) for name in ("first", "second")}
    features = {name: jax_tt.Feature(name) for name in tables}
    embed = jax_tt.EmbedCollection(tables, features, mesh=mesh, axis="model", rngs=nnx.Rngs(0))
    rectangle, ragged = np.arange(16).reshape(8, 2), [[k] * (k % 3) for k in range(8)]
    for first, second in ((rectangle, rectangle), (ragged, ragged), (rectangle, ragged)):
        batch = embed.host_batch({"first": first, "second": second})
        rows, *wide = _in_all_layouts(embed, batch)
        columns = [np.asarray(rows[name]) for name in features]
        np.testing.assert_array_equal(wide[0], np.concatenate(columns, 1))
        np.testing.assert_array_equal(wide[1], np.stack(columns, 1))


@nnx.jit
def _in_all_layouts(embed, batch):
    return embed(batch), embed.concatenated(batch), embed.stacked(batch)
