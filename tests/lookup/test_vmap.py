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

    def step(cores, bags):
        def loss(cores, weights):
            given = dataclasses.replace(bags, weights=weights)
            out = jax_tt.tt.embed_bag(cores, given, combiner="mean", method=method)
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(loss, argnums=(0, 1))(cores, bags.weights)

    both = which == "both"
    mapped = jax.jit(jax.vmap(step, in_axes=(0 if both else None, 0)))
    found, alone = mapped(_stack(cores) if both else cores[0], _stack(bags)), jax.jit(step)
    for i in range(3):
        jax.tree.map(
            lambda got, want, i=i: np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5),
            found,
            alone(cores[i if both else 0], bags[i]),
        )


def test_vmap_of_lookup(method):
    case = make_case(SHAPE, "float32", False)
    ids = jnp.arange(6).reshape(2, 3)

    @jax.jit
    def both(ids):
        def lookup(ids):
            return jax_tt.tt.lookup(case.cores, ids, method=method)

        return jax.vmap(lookup)(ids), lookup(ids)

    np.testing.assert_array_equal(*both(ids))
