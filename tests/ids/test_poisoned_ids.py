"""An id out of range makes NaN of its bag where nothing can raise, and NaN is the gradient of its weight alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.conftest import method_fixture
from tests.helpers import SHAPES, fused, make_case

SHAPE = SHAPES["d3"]
N = SHAPE.num_embeddings
RULE = jax_tt.optimizers.Adagrad(0.1)
# A row that is read twice, bags with and without bad ids, one of a bad id alone.
IDS = np.array([3, N, 5, 3, -1, 0, 2**31 - 1, N - 1], np.int32)
OFFSETS = np.array([0, 3, 4, 6, 7, 8], np.int32)
BAD = (IDS < 0) | (IDS >= N)

method = method_fixture(
    "reference", "native", "cuda_emulated", pytest.param("cuda", marks=pytest.mark.gpu)
)


@pytest.mark.parametrize("optimizer", [None, RULE])
@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_the_weight_of_a_bad_id_has_no_gradient_that_is_a_number(kind, optimizer, method):
    cores = make_case(SHAPE, "float32", False).cores
    rows = jax_tt.tt.to_dense(cores, num_embeddings=N)
    table, state = fused(cores if kind == "tt" else rows, RULE, N)
    if optimizer is None:
        table = jax_tt.extension.with_update(table, None)
        state = {name: state[name] for name in table.spec.param_names}
    weights = np.linspace(-1, 1, len(IDS), dtype=np.float32)
    g = np.random.default_rng(0).normal(size=(len(OFFSETS) - 1, SHAPE.features)).astype(np.float32)

    def loss(weights, state):
        bags = jax_tt.Bags(jnp.asarray(IDS), jnp.asarray(OFFSETS), weights)
        out, _ = jax_tt.lookup_bags(table, state, bags, bounds="error", method=method)
        return jnp.sum(jnp.where(jnp.isnan(out), 0, out) * g), out

    # Inside shard_map nothing raises: one device that stops would leave the others waiting.
    mesh = jax.make_mesh(
        (1,), ("data",), devices=jax.devices("cuda" if method == "cuda" else "cpu")[:1]
    )
    step = jax.shard_map(
        jax.grad(loss, (0, 1), has_aux=True),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    # With the table's gradient: that of the weights alone is taken from a lookup of rows.
    (gradient, _), out = jax.jit(step)(weights, state)
    bad_bags = [BAD[a:b].any() for a, b in itertools.pairwise(OFFSETS)]
    np.testing.assert_array_equal(np.isnan(out).all(-1), bad_bags)
    # The loss leaves bags that are NaN out, so that their other ids have a gradient of 0.
    bag_of = np.repeat(np.arange(len(OFFSETS) - 1), np.diff(OFFSETS))
    dots = np.sum(np.asarray(rows)[np.where(BAD, 0, IDS)] * g[bag_of], -1)
    want = np.where(np.asarray(bad_bags)[bag_of], 0, dots)
    want[BAD] = np.nan
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5)
