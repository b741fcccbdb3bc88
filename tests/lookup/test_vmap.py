"""Leading batch dimensions through `jax.vmap`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.helpers import SHAPES, make_case

SHAPE = SHAPES["d3"]


def _stack(cases):
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *cases)


@pytest.mark.slow(but="native")
@pytest.mark.parametrize("which", ["bags", "both"])
@pytest.mark.parametrize("form", ["ragged", "rectangular"])
def test_vmap_of_value_and_gradient(which, form, method):
    cases = [make_case(SHAPE, "float32", True, seed) for seed in range(3)]
    cores = [case.cores for case in cases]
    bags = [case.bags(form) for case in cases]

    def loss(cores, weights, bags):
        given = dataclasses.replace(bags, weights=weights)
        return jnp.sum(jnp.sin(jax_tt.tt.embed_bag(cores, given, combiner="mean", method=method)))

    step = jax.value_and_grad(loss, argnums=(0, 1))
    axes = (0 if which != "bags" else None, 0 if which != "cores" else None)
    args = (
        _stack(cores) if axes[0] == 0 else cores[0],
        _stack(bags) if axes[1] == 0 else bags[0],
    )
    mapped = jax.vmap(lambda cores, bags: step(cores, bags.weights, bags), in_axes=axes)(*args)
    for i in range(3):
        c, b = cores[i if axes[0] == 0 else 0], bags[i if axes[1] == 0 else 0]
        alone = step(c, b.weights, b)
        jax.tree.map(
            lambda got, want, i=i: np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5),
            mapped,
            alone,
        )


def test_vmap_of_lookup(method):
    case = make_case(SHAPE, "float32", False)
    ids = jnp.arange(6).reshape(2, 3)
    mapped = jax.vmap(lambda i: jax_tt.tt.lookup(case.cores, i, method=method))(ids)
    np.testing.assert_array_equal(mapped, jax_tt.tt.lookup(case.cores, ids, method=method))
