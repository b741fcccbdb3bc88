"""The native rule takes the steps of the reference: `python -m pytest examples/custom_rule`, once it is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lion_rule import Lion

import jax_tt

ROWS, COLUMNS, BAGS = 60, 33, 8
SHAPE = jax_tt.TTShape.suggest(ROWS, 8, ranks=3)
RULE = Lion(learning_rate=0.01, weight_decay=0.1)


def tables():
    """A dense table and a tensor train."""
    random = np.random.default_rng(0)
    dense = jnp.asarray(random.normal(size=(ROWS, COLUMNS)) / 4, jnp.float32)
    return tuple(
        jax_tt.functional.init_fused(start, RULE)
        for start in (dense, jax_tt.tt.init(jax.random.key(0), SHAPE))
    )


def loss(tables, bags, method):
    dense = jax_tt.functional.fused_embed_bag(tables[0], bags, RULE, method=method)
    cores = jax_tt.tt.fused_embed_bag(tables[1], bags, RULE, method=method)
    return jnp.sum(jnp.sin(3 * dense)) + jnp.sum(jnp.sin(3 * cores))


step = jax.jit(jax.grad(loss), static_argnames="method")


@functools.cache
def after_20_steps(method):
    now = tables()
    random = np.random.default_rng(1)
    for _ in range(20):
        # Every id about twice; the last one never.
        ids = random.integers(0, ROWS - 1, (BAGS, 16))
        now = step(now, jnp.asarray(ids, jnp.int32), method=method)
    return now


@pytest.mark.parametrize("kind", ["dense", "tensor train"])
def test_20_steps_are_those_of_the_reference(kind):
    place = ["dense", "tensor train"].index(kind)
    start, got, want = (
        found[place] for found in (tables(), *map(after_20_steps, ("auto", "reference")))
    )
    for new, old, expected in zip(got.cores, start.cores, want.cores, strict=True):
        np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-5)
        assert np.any(np.asarray(new) != np.asarray(old))
    for slots, expected in zip(got.slots, want.slots, strict=True):
        np.testing.assert_allclose(slots[0], expected[0], rtol=1e-4, atol=1e-5)
    if kind == "dense":
        np.testing.assert_array_equal(got.cores[0][-1], start.cores[0][-1])
