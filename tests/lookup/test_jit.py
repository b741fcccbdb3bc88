"""Compilation: once per shape, and the method switch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._jax import backend
from tests.helpers import SHAPES, fused, make_case


def test_other_batches_do_not_recompile(method):
    """Nor does the table after a step, whose types are those of the table before it."""
    rule = jax_tt.optimizers.Adam(lambda step: 0.1 / (1 + step))
    cores = make_case(SHAPES["d2"], "bfloat16", False).cores
    table, state = fused(cores, rule)
    traces = []

    @jax.jit
    def step(state, bags, scale):
        traces.append(1)

        def loss(state, weights):
            given = dataclasses.replace(bags, weights=weights)
            rows, _ = jax_tt.lookup_bags(table, state, given, method=method, grad_scale=scale)
            return rows.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(state, bags.weights)

    short, long = [[1], [2, 3]], [[4, 5, 6], [7]]
    for i, rows in enumerate((short, long, short)):
        weights = [[1.0] * len(row) for row in rows]
        bags = jax_tt.Bags.from_ragged(rows, weights, capacity=6)
        state, _ = step(state, bags, np.float32(2.0**i))
    assert len(traces) == 1 and step._cache_size() == 1 and state["step"] == 3


def test_environment_replaces_auto(monkeypatch):
    monkeypatch.setenv("JAX_TT_METHOD", "reference")
    assert backend.choose("auto") == "reference"
    monkeypatch.setenv("JAX_TT_METHOD", "fast")
    with pytest.raises(ValueError, match="JAX_TT_METHOD: got 'fast'"):
        backend.choose("auto")


def test_without_the_native_module(monkeypatch):
    monkeypatch.delenv("JAX_TT_METHOD", raising=False)
    monkeypatch.setattr(backend, "native_platforms", lambda: ())
    backend._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="native module is not available"):
        assert backend.choose("auto") == "reference"
    assert backend.choose("auto") == "reference"  # one warning, not one per call
    with pytest.raises(RuntimeError, match="method='reference'"):
        backend.choose("native")
