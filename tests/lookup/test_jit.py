"""Compilation: once per shape, and the method switch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._jax import backend
from tests.helpers import SHAPES, make_case


def test_second_call_does_not_recompile(method):
    case = make_case(SHAPES["d3"], "float32", True)
    traces = []

    @jax.jit
    def step(cores, bags):
        traces.append(1)
        return jax.grad(lambda c: jax_tt.tt.embed_bag(c, bags, method=method).sum())(cores)

    short, long = [[1], [2, 3]], [[4, 5, 6], [7]]
    for rows in (short, long, short):
        weights = [[1.0] * len(row) for row in rows]
        step(case.cores, jax_tt.Bags.from_ragged(rows, weights, capacity=6))
    assert len(traces) == 1 and step._cache_size() == 1


def test_fused_second_call_does_not_recompile(method):
    rule = jax_tt.optimizers.Adam(lambda step: 0.1 / (1 + step))
    table = jax_tt.functional.init_fused(make_case(SHAPES["d3"], "bfloat16", False).cores, rule)
    traces = []

    @jax.jit
    def step(table, ids, scale):
        traces.append(1)
        return jax.grad(
            lambda t: (
                jax_tt.tt.fused_embed_bag(t, ids, rule, method=method, grad_scale=scale)
                .astype(jnp.float32)
                .sum()
            )
        )(table)

    for i in range(3):
        table = step(table, np.full((2, 2), i, np.int32), np.float32(2.0**i))
    assert len(traces) == 1 and step._cache_size() == 1 and table.step == 3


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
