"""The native rule takes the steps of the reference: `python -m pytest examples/custom_rule`, once it is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lion_rule import Lion

import jax_tt

ROWS, COLUMNS, BAGS = 60, 33, 8
RULE = Lion(learning_rate=0.01, weight_decay=0.1)


TABLES = {
    "dense": jax_tt.dense_table(ROWS, COLUMNS, optimizer=RULE),
    "tensor train": jax_tt.tt_table(ROWS, 8, tt_ranks=3, optimizer=RULE),
}


def start():
    """The states of the tables."""
    return {kind: table.init(jax.random.key(0)) for kind, table in TABLES.items()}


def loss(states, bags, method):
    pooled = (
        jax_tt.lookup_bags(table, states[kind], bags, method=method)[0]
        for kind, table in TABLES.items()
    )
    return sum(jnp.sum(jnp.sin(3 * rows)) for rows in pooled)


step = jax.jit(jax.grad(loss), static_argnames="method")


@functools.cache
def after_20_steps(method):
    now = start()
    random = np.random.default_rng(1)
    for _ in range(20):
        # Every id about twice; the last one never.
        ids = random.integers(0, ROWS - 1, (BAGS, 16))
        now = step(now, jnp.asarray(ids, jnp.int32), method=method)
    return now


@pytest.mark.parametrize("kind", TABLES)
def test_20_steps_are_those_of_the_reference(kind):
    before = start()[kind]
    got, want = (after_20_steps(method)[kind] for method in ("auto", "reference"))
    for name in before:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)
    for name in TABLES[kind].spec.param_names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)
        assert np.any(np.asarray(got[name]) != np.asarray(before[name]))
    if kind == "dense":
        np.testing.assert_array_equal(got["embedding"][-1], before["embedding"][-1])
