"""Data parallelism on four devices: batch sharded, table replicated, equal to one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.conftest import method_fixture
from tests.helpers import SHAPES, fused, make_case

SHAPE = SHAPES["d3"]
RULE = jax_tt.optimizers.Adagrad(0.1)

# One GPU has nothing to shard over.
method = method_fixture("reference", "native", "cuda_emulated")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def batch():
    # Duplicates across shards, and a shard whose rows the others do not touch.
    return np.random.default_rng(0).integers(0, 40, (8, 5)).astype(np.int32)


def _plain(cores, ids, method, axis_name=None):
    out = jax_tt.tt.embed_bag(cores, ids, combiner="mean", method=method, axis_name=axis_name)
    return jnp.sum(jnp.sin(out))


def _fused_maximum(state, ids, method):
    table = jax_tt.tables.TTTable.of_shape(SHAPE, update=jax_tt.Update(RULE))
    out, _ = jax_tt.lookup_bags(table, state, ids, combiner="max", method=method)
    return jnp.sum(jnp.sin(out))


def _close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize("loss", [_plain, _fused_maximum])
def test_jit_with_sharded_batch(loss, mesh, batch, method):
    parameters = make_case(SHAPE, "float32", False).cores
    if loss is _fused_maximum:
        parameters = fused(parameters, RULE)[1]
    step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))
    placed = jax.device_put(parameters, NamedSharding(mesh, P()))
    compiled = step.lower(placed, sharded, method).compile()
    _close(compiled(placed, sharded), step(parameters, batch, method))
    assert "all-gather" not in compiled.as_text()


def test_jit_forward_needs_no_communication(mesh, batch, method):
    cores = make_case(SHAPE, "float32", False).cores
    sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))
    placed = jax.device_put(cores, NamedSharding(mesh, P()))
    options = {"combiner": "sqrtn", "bounds": "zero", "method": method}
    forward = jax.jit(lambda c, i: jax_tt.tt.embed_bag(c, i, **options))
    compiled = forward.lower(placed, sharded).compile()
    text = compiled.as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all"))
    _close(compiled(placed, sharded), forward(cores, batch))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, mesh, batch, method):
    """Of gradients; `test_fused_shard` has the fused steps."""
    parameters = make_case(SHAPE, "float32", False).cores
    want = jax.jit(jax.grad(_plain), static_argnums=2)(parameters, batch, method)
    axis_name = None if check_vma else "data"

    def shard(parameters, ids):
        return jax.grad(_plain)(parameters, ids, method, axis_name)

    step = jax.jit(
        jax.shard_map(
            shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
        )
    )
    compiled = step.lower(parameters, batch).compile()
    _close(compiled(parameters, batch), want)
    assert "all-gather" not in compiled.as_text()


def test_shard_map_of_the_forward_pass(mesh, batch, method):
    cores = make_case(SHAPE, "float32", False).cores

    def total(cores):
        spread = jax.shard_map(
            lambda c, i: jax_tt.tt.embed_bag(c, i, method=method),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
        )
        return jnp.sum(jnp.sin(spread(cores, batch)))

    def alone(cores):
        return jnp.sum(jnp.sin(jax_tt.tt.embed_bag(cores, batch, method=method)))

    _close(jax.jit(jax.grad(total))(cores), jax.jit(jax.grad(alone))(cores))
