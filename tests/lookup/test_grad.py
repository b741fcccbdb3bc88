"""Derivatives: second order, only what is asked for, remat and scan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_tt
from jax_tt._jax import backend
from jax_tt._native import table_group, tt
from jax_tt._table import reference
from tests.helpers import SHAPES, WEIGHTABLE, assert_close, make_case


@pytest.fixture
def case():
    return make_case(SHAPES["d2"], "float32", True)


def _loss(case, combiner, method):
    bags = case.bags()

    def loss(cores, weights):
        given = weights if combiner in WEIGHTABLE else None
        given = dataclasses.replace(bags, weights=given)
        out = jax_tt.tt.embed_bag(cores, given, combiner=combiner, method=method)
        return jnp.sum(jnp.sin(out))

    return loss, bags.weights


def test_second_order_through_the_reference(x64):
    case = make_case(SHAPES["d2"], "float64", True)
    weighted, weights = _loss(case, "sqrtn", "reference")
    largest, _ = _loss(case, "max", "reference")

    def total(cores):
        return weighted(cores, weights) + largest(cores, weights)

    for function in (total, jax.grad(total)):
        check_grads(jax.jit(function), (case.cores,), order=1, modes=["fwd", "rev"])


def test_remat_and_scan(case, method):
    loss, weights = _loss(case, "mean", method)
    plain = jax.jit(jax.grad(loss))(case.cores, weights)

    def scanned(cores):
        again = jax.checkpoint(loss)
        stack = jnp.stack([jnp.asarray(weights)] * 3)
        return jax.lax.scan(lambda total, w: (total + again(cores, w), None), 0.0, stack)[0]

    for a, b in zip(plain, jax.jit(jax.grad(scanned))(case.cores), strict=True):
        assert_close(b, 3 * np.asarray(a, np.float64), 1e-6)


def test_a_plan_of_other_ids_is_made_again(method, monkeypatch):
    """Where the backward pass of a batch is divided over the devices in another way, a plan is that of another part."""
    saved, plans = tt.TTGradientCall.saved, []

    def first_plan(call, residuals):
        of_call = saved(call, residuals)
        plans.append(of_call["plan"])
        return {**of_call, "plan": plans[0]}

    monkeypatch.setattr(tt.TTGradientCall, "saved", first_plan)
    monkeypatch.setattr(tt, "is_resharded", lambda ids: True)
    table = jax_tt.tt_table(60, 8, tt_ranks=3)
    state = table.init(jax.random.key(0))
    trained = {name: state[name] for name in table.spec.trained_names}

    def loss(trained, ids, method):
        rows, _ = jax_tt.lookup(table, {**state, **trained}, ids, method=method)
        return jnp.sum(jnp.sin(rows))

    for ids in (jnp.array([3, 59, 3, 8]), jnp.array([7, 7, 21, 40])):
        found, want = (jax.grad(loss)(trained, ids, how) for how in (method, "reference"))
        for name, gradient in want.items():
            assert_close(found[name], gradient, 1e-5)
    assert len(plans) == (0 if method == "reference" else 2)


def test_integer_ids_have_no_gradient(case, method):
    bags = case.bags()
    total = jax.jit(lambda bags: jax_tt.tt.embed_bag(case.cores, bags, method=method).sum())
    grads = jax.grad(total, allow_int=True)(bags)
    assert grads.ids.dtype == jax.dtypes.float0 and grads.offsets.dtype == jax.dtypes.float0
    assert np.any(grads.weights)


@pytest.fixture
def recorder(monkeypatch):
    """What is asked of the native ops, which the reference takes over: names of ops, and the cotangents they want."""
    calls = []

    def run(found, wide=None, shared=None):
        (call,) = found
        assert wide is None and not shared
        assert call.platform == "cpu"
        calls.append((call.op, call.lookup.wanted))
        params = tuple(call.params.values())
        if call.op == "forward":
            none = (None, None, None)  # residuals
            return [(reference.forward(call.table, params, call.batch, call.lookup, None), none)]
        g = call.blocked["g"].reshape(call.batch.num_segments, call.batch.num_bags, -1)
        return [reference.backward(call.table, params, call.batch, g, call.lookup)]

    monkeypatch.setattr(table_group, "run", run)
    monkeypatch.setattr(backend, "native_platforms", lambda: ("cpu",))
    return calls


def test_only_requested_cotangents_are_computed(case, recorder):
    loss, weights = _loss(case, "sum", "native")
    weights = jnp.asarray(weights)
    of_both = jax.grad(_loss(case, "sum", "reference")[0], argnums=(0, 1))
    expected = jax.jit(of_both)(case.cores, weights)

    dcores = jax.jit(jax.grad(loss, argnums=0))(case.cores, weights)
    assert [op for op, _ in recorder].count("backward") == 1
    assert recorder[-1][1].names and not recorder[-1][1].weights
    recorder.clear()

    both = jax.jit(jax.grad(loss, argnums=(0, 1)))(case.cores, weights)
    assert recorder[-1][0] == "backward" and recorder[-1][1].weights
    recorder.clear()

    dweights = jax.jit(jax.grad(loss, argnums=1))(case.cores, weights)
    assert "backward" not in [op for op, _ in recorder]  # no gradient of the cores
    for got in (dcores, both[0]):
        for a, b in zip(got, expected[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for got in (both[1], dweights):
        np.testing.assert_allclose(got, expected[1], rtol=1e-5, atol=1e-6)


def test_only_weights_on_every_method(case, method):
    loss, weights = _loss(case, "sqrtn", method)
    padded = case.bags("rectangular")

    def of_padded(w):
        given = dataclasses.replace(padded, weights=w)
        return jax_tt.tt.embed_bag(case.cores, given, method=method).sum()

    @jax.jit
    def gradients(cores, weights, padded_weights):
        _, both = jax.grad(loss, argnums=(0, 1))(cores, weights)
        return jax.grad(loss, argnums=1)(cores, weights), both, jax.grad(of_padded)(padded_weights)

    alone, both, of_padding = gradients(case.cores, weights, padded.weights)
    np.testing.assert_allclose(alone, both, rtol=1e-5, atol=1e-6)
    assert not np.any(np.asarray(of_padding)[np.asarray(padded.ids) == -1])


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_a_bag_whose_weights_sum_to_zero_has_no_gradient(case, combiner, method):
    bags = jax_tt.Bags(jnp.array([1, 2, 3]), jnp.array([0, 2, 2, 3]), jnp.array([0.0, 0.0, 1.0]))

    @jax.jit
    def gradients(cores, weights):
        def loss(cores, weights):
            given = dataclasses.replace(bags, weights=weights)
            out = jax_tt.tt.embed_bag(cores, given, combiner=combiner, method=method)
            return jnp.sum(out[:2])

        return jax.grad(loss, (0, 1))(cores, weights)

    for gradient in jax.tree.leaves(gradients(case.cores, bags.weights)):
        assert not np.any(gradient)
