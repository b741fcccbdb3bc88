"""Fused updates of a batch sharded over a mesh of two axes: equal to one device, without gathering a table."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import optimizers
from tests.conftest import method_fixture
from tests.helpers import fused

OPTIMIZER = optimizers.Adam(0.1)
BATCH = P(("x", "y"))

# One GPU has nothing to shard over.
method = method_fixture("reference", "native", "cuda_emulated")


def problem(kind):
    rng = np.random.default_rng(0)
    if kind == "tt":
        shape = jax_tt.TTShape(
            1000, 8, ranks=(6, 6), row_factors=(10, 10, 10), col_factors=(2, 2, 2)
        )
        source = jax_tt.tt.init(jax.random.key(0), shape, "normal")
    else:
        source = jax.random.normal(jax.random.key(1), (1000, 8))
    table, state = fused(source, OPTIMIZER)
    ids = jnp.asarray(rng.integers(0, 1000, (16, 5)), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(16, 5)), jnp.float32)
    scale = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)

    def step(state, ids, weights, scale, **options):
        def loss(state, weights):
            bags = jax_tt.Bags(ids, None, weights, False)
            return jnp.sum(jax_tt.lookup_bags(table, state, bags, **options)[0] ** 2 * scale)

        return jax.grad(loss, argnums=(0, 1))(state, weights)

    return step, (state, ids, weights, scale)


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("way", ["jit", "jit_explicit", "shard_map", "shard_map_unchecked"])
def test_equals_one_device(kind, way, method):
    step, args = problem(kind)
    run = jax.jit(functools.partial(step, method=method))
    expected = run(*args)
    kind_of_axis = AxisType.Explicit if way == "jit_explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind_of_axis,) * 2)
    shardings = (P(), BATCH, BATCH, BATCH)
    placed = [
        jax.device_put(arg, NamedSharding(mesh, spec))
        for arg, spec in zip(args, shardings, strict=True)
    ]
    if way.startswith("shard_map"):
        checked = way == "shard_map"

        def sharded(*args):
            return step(*args, method=method, axis_name=None if checked else ("x", "y"))

        run = jax.jit(
            jax.shard_map(
                sharded, mesh=mesh, in_specs=shardings, out_specs=(P(), BATCH), check_vma=checked
            )
        )
    compiled = run.lower(*placed).compile()
    table, weights = compiled(*placed)
    for got, want in zip(jax.tree.leaves(table), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights, expected[1], rtol=1e-5, atol=1e-6)
    if method == "native":
        # Ids and gradients travel for a dense table, but never the table, and nothing for a tensor train.
        gathers = re.findall(r"= (\S+) all-gather", compiled.as_text())
        assert not [of for of in gathers if kind == "tt" or of.startswith("f32[1000,8]")]


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_tables_of_each_part_of_a_mesh(kind, method):
    """Devices with another "y" have another table; "x" splits the batch."""
    step, (table, *batch) = problem(kind)
    other = jax.tree.map(lambda leaf: leaf[::-1], batch)
    alone = jax.jit(functools.partial(step, method=method))
    expected = [alone(table, *own) for own in (batch, other)]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    splits = P("y"), P("y", "x"), P("y", "x"), P("y", "x")

    def of_part(*args):
        own = jax.tree.map(lambda leaf: leaf[0], args)
        return jax.tree.map(lambda leaf: leaf[None], step(*own, method=method))

    args = jax.tree.map(lambda *parts: jnp.stack(parts), (table, *batch), (table, *other))
    run = jax.jit(jax.shard_map(of_part, mesh=mesh, in_specs=splits, out_specs=splits[:2]))
    got = run(*args)
    want = jax.tree.map(lambda *parts: jnp.stack(parts), *expected)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


SPLITS = [P(), P("x"), P(("x", "y")), P(("y", "x"))]


@pytest.mark.parametrize("optimizer", [None, OPTIMIZER])
@pytest.mark.parametrize("out", SPLITS, ids=str)
@pytest.mark.parametrize("ids", SPLITS, ids=str)
def test_forward_and_backward_split_differently(ids, out, optimizer, method):
    """What the forward pass hands to the backward pass may come back in other parts."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    shape = jax_tt.TTShape(1000, 8, ranks=(6, 6), row_factors=(10, 10, 10), col_factors=(2, 2, 2))
    update = None if optimizer is None else jax_tt.Update(optimizer)
    table = jax_tt.tables.TTTable.of_shape(shape, update=update, core_init="normal")
    state = table.init(jax.random.key(0))
    batch = jnp.asarray(np.random.default_rng(0).integers(0, 1000, (16, 5)), jnp.int32)

    @functools.partial(jax.jit, static_argnums=2)
    def gradient(state, batch, sharding=None):
        def loss(state):
            rows, _ = jax_tt.lookup_bags(table, state, batch, method=method)
            if sharding is not None:
                rows = jax.lax.with_sharding_constraint(rows, sharding)
            return jnp.sum(rows**3)

        return jax.grad(loss)(state)

    expected = gradient(state, batch)
    placed = (
        jax.device_put(state, NamedSharding(mesh, P())),
        jax.device_put(batch, NamedSharding(mesh, ids)),
    )
    got = gradient(*placed, NamedSharding(mesh, out))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_bad_id_on_one_shard_refuses_the_step(kind, method):
    """An error of one device would leave the others waiting for it: the bag becomes NaN, and the table stays."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    step, (table, ids, weights, scale) = problem(kind)
    ids = ids.at[3, 2].set(1000)
    split = NamedSharding(mesh, P("x"))
    args = (
        jax.device_put(table, NamedSharding(mesh, P())),
        *(jax.device_put(array, split) for array in (ids, weights, scale)),
    )
    new, dweights = jax.jit(lambda *args: step(*args, bounds="error", method=method))(*args)
    bags = np.isnan(dweights).any(axis=1)
    assert bags[3] and bags.sum() == 1
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(table), strict=True):
        np.testing.assert_array_equal(a, b)
