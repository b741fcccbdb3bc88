"""Messages for what new users try: each says what to write instead."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
from jax_tt import optimizers
from jax_tt._base import environment
from jax_tt._base.arguments import mismatch
from tests.conftest import method_fixture
from tests.helpers import fused

ROOT = Path(__file__).resolve().parent.parent
CORES = jax_tt.tt.init(jax.random.key(0), jax_tt.TTShape.suggest(100, 8, ranks=4))
DENSE = jnp.ones((10, 3))
RULE = optimizers.SGD(0.1)
FUSED, STATE = fused(CORES, RULE)
CACHE = jax_tt.RowCache(20, ways=4)
CACHED = jax_tt.tt_table(100, 8, tt_ranks=4, cache=CACHE)
IDS = jnp.array([[1, 2], [3, 4]])
native = method_fixture("native")  # the fixture is called `method`


def weighted(weights, **options):
    bags = jax_tt.Bags(IDS, weights=weights)
    return jax_tt.tt.embed_bag(CORES, bags, combiner="mean", **options)


def cached(cores, **options):
    params = dict(zip(CACHED.table.spec.param_names, cores, strict=True))
    state = params | CACHED.init_rest(params)
    return jax_tt.lookup_bags(CACHED, state, IDS, jax_tt.Lookup(**options))[0]


def trained(state, **options):
    return jax_tt.lookup_bags(FUSED, state, IDS, **options)[0]


OPS = {
    "tt": (partial(jax_tt.tt.embed_bag, bags=IDS), CORES),
    "dense": (partial(jax_tt.functional.embed_bag, bags=IDS), DENSE),
    "weights": (weighted, jnp.ones((2, 2))),
    "fused": (trained, STATE),
    "cached": (cached, CORES),
}


def total(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def again(f):
    return lambda x: total(jax.grad(f)(x))


FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jit of jvp": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
}
HIGHER = {
    "grad of grad": lambda f, x: jax.grad(again(f))(x),
    "in jit": lambda f, x: jax.jit(jax.grad(again(jax.jit(f))))(x),
    "hessian": lambda f, x: jax.hessian(f)(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.jit(jax.grad(f)), (x,), (x,)),
}


@pytest.mark.parametrize("op", OPS)
def test_derivatives_that_native_ops_do_not_have(op, method):
    run, x = OPS[op]
    for calls, words in ((FORWARD, "in forward mode"), (HIGHER, "higher derivatives")):
        # How a derivative is asked for makes no difference between ops.
        for name in calls if op == "tt" else list(calls)[-1:]:
            call = calls[name]
            with pytest.raises(TypeError, match="method='reference'") as error:
                call(lambda x: total(run(x, method=method)), x)
            assert words in str(error.value), name


def test_gradients_of_gradients_of_what_comes_after(method):
    """The table is a constant, and what is differentiated twice reaches it through the cotangent."""

    def loss(scale, cores):
        return total(scale * jax_tt.tt.embed_bag(cores, IDS, method=method))

    with pytest.raises(TypeError, match="higher derivatives"):
        jax.grad(lambda scale: total(jax.grad(loss, 1)(scale, CORES)))(2.0)
    # Where no gradient of the table is asked for, there is nothing to refuse.
    second = jax.grad(jax.grad(loss))(2.0, CORES)
    reference = 2 * total(jax_tt.tt.embed_bag(CORES, IDS, method="reference"))
    np.testing.assert_allclose(second, reference, rtol=1e-5)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("op", ["tt", "weights", "cached"])
def test_a_gradient_that_is_a_constant_is_first_order(op, transform, method):
    """First-order MAML: the gradient of a step whose own gradient is not differentiated."""
    run, x = OPS[op]

    def after_a_step(x, method):
        grad = transform(jax.grad(lambda x: total(run(x, method=method))))(x)
        x = jax.tree.map(lambda a, b: a - 0.1 * jax.lax.stop_gradient(b), x, grad)
        return total(run(x, method=method))

    want = jax.jit(jax.grad(partial(after_a_step, method="reference")))(x)
    mapped = jax.jit(jax.vmap(jax.grad(partial(after_a_step, method=method))))
    got = jax.tree.map(lambda a: a[1], mapped(jax.tree.map(lambda a: jnp.stack([a, a]), x)))
    for result in (transform(jax.grad(partial(after_a_step, method=method)))(x), got):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), result, want)


def test_only_what_is_differentiated_is_computed(method):
    """A gradient of the cores alone computes none of the weights, with the operands marked one by one."""

    def loss(cores, weights):
        bags = jax_tt.Bags(IDS, weights=weights)
        return jax_tt.tt.embed_bag(cores, bags, method=method).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(CORES, jnp.ones((2, 2))))
    both = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(CORES, jnp.ones((2, 2))))
    assert text.count("f32[2,0]") > both.count("f32[2,0]")


RAGGED = [
    [[1, 2], [3]],
    ([1, 2], [3]),
    [[1], []],
    [np.array([1, 2]), np.array([3])],
    np.array([[1, 2], [3]], object),
]


def test_ragged_lists():
    rngs, order = nnx.Rngs(0), jax_tt.order.IdOrder.identity(100)
    state = CACHED.init(jax.random.key(0))
    ops = (
        partial(jax_tt.tt.embed_bag, CORES),
        partial(jax_tt.tt.lookup, CORES),
        partial(jax_tt.functional.embed_bag, DENSE),
        partial(jax_tt.lookup_bags, FUSED, STATE),
        lambda lists: jax_tt.lookup_bags(CACHED, state, lists, jax_tt.Lookup()),
        partial(jax_tt.functional.count_out_of_range, num_embeddings=5),
        jax_tt.Bags.from_padded,
        jax_tt.TTEmbedBag(100, 8, tt_ranks=4, rngs=rngs),
        jax_tt.TTEmbedBag(100, 8, tt_ranks=4, id_order=order, rngs=rngs),
    )
    for op, lists in [*((op, RAGGED[0]) for op in ops), *((ops[0], lists) for lists in RAGGED)]:
        with pytest.raises(TypeError, match=r"jax_tt\.Bags\.from_ragged\(lists\)"):
            op(lists)


def test_bags_given_to_a_lookup():
    with pytest.raises(TypeError, match=r"tt\.embed_bag"):
        jax_tt.tt.lookup(CORES, jax_tt.Bags(IDS))


def imports(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_flax():
    done = imports("""
import importlib
import sys
sys.modules["flax"] = None  # as if it were not installed
import jax_tt

for name in jax_tt._LAYERS:
    assert name not in dir(jax_tt)
for name in (*jax_tt._LAYERS, "nnx", "linen"):
    assert not hasattr(jax_tt, name), name
    for use, kind in (f"jax_tt.{name}", AttributeError), (f"from jax_tt import {name}", ImportError):
        try:
            exec(use)
        except kind as error:
            assert f"jax_tt.{name} needs flax" in str(error), error
            assert "pip install 'jax-tt[flax]'" in str(error), error
        else:
            raise AssertionError(use)
for module in ("nnx", "linen"):
    try:
        importlib.import_module(f"jax_tt.{module}")
    except ImportError as error:
        assert "pip install 'jax-tt[flax]'" in str(error), error
    else:
        raise AssertionError(module)
""")
    assert done.returncode == 0, done.stderr


def test_values_of_environment_variables(monkeypatch):
    for name, value, expected in (
        ("JAX_TT_METHOD", "fast", "'auto', 'reference', 'native'"),
        ("JAX_TT_CPU_ISA", "avx2", "'baseline', 'x86_64_v3'"),
        ("JAX_TT_NUM_THREADS", "0", "an integer >= 1"),
        ("JAX_TT_NUM_THREADS", "2.5", "an integer >= 1"),
        ("JAX_TT_EMULATION_SEED", "-1", "an integer >= 0"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name}: got '{value}'; expected .*{expected}"):
            jax_tt.tt.lookup(CORES, IDS, method="reference")
        monkeypatch.delenv(name)


def test_environment_variables_at_import():
    done = imports("import jax_tt", JAX_TT_NUM_THREADS="four")
    assert "JAX_TT_NUM_THREADS: got 'four'; expected an integer >= 1." in done.stderr
    assert done.returncode != 0


def test_misspelt_environment_variables(monkeypatch):
    for name in ("JAX_TT_DATA", "JAX_TT_CUDA", "JAX_TT_TEST_OPTIMIZED"):
        monkeypatch.setenv(name, "1")
    environment.warn_of_misspelt()  # others' variables are none of its business
    monkeypatch.setenv("JAX_TT_NUM_THREAD", "1")
    with pytest.warns(RuntimeWarning, match=r"JAX_TT_NUM_THREAD .* reads JAX_TT_NUM_THREADS"):
        environment.warn_of_misspelt()


def test_what_functions_of_one_table_do_not_take():
    table = jax_tt.dense_table(10, 3)
    collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    state = {"embedding": DENSE}
    for lookup in (jax_tt.lookup, jax_tt.lookup_bags):
        for given in (CORES, collection, state):
            with pytest.raises(
                TypeError, match=r"table: got a \w+; .* jax_tt\.lookup_features, arrays"
            ):
                lookup(given, state, IDS)
        with pytest.raises(TypeError, match=r"state: got an \w+; expected arrays by name"):
            lookup(table, DENSE, IDS)
        with pytest.raises(TypeError, match=r"options: got 'mean'; expected a Lookup, or its"):
            lookup(table, state, IDS, "mean")
        with pytest.raises(TypeError, match=r"inputs: got 2.0; expected a StepInputs, or its"):
            lookup(table, state, IDS, jax_tt.Lookup(), 2.0)
    changes = (
        partial(jax_tt.tables.grow, num_embeddings=20, key=jax.random.key(0)),
        partial(jax_tt.tables.reorder, id_order=jax_tt.order.IdOrder.identity(10)),
    )
    for change in changes:
        with pytest.raises(TypeError, match=r"table: got a Collection; expected a jax_tt\.Table"):
            change(collection, {"item": {"embedding": DENSE}})


def test_errors_say_what_they_got():
    for got, shown in (
        (np.zeros((2, 3), np.float32), "float32 of shape (2, 3)"),
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), "bfloat16 of shape (2,)"),
        (np.int8(3), "3 of int8"),
        ((1, 2), "(1, 2)"),
        ("two of them", "two of them"),
        ({}, "a dict"),
        (None, "None"),
    ):
        error = mismatch("x", got, "more", "Add some.", TypeError)
        assert str(error) == f"x: got {shown}; expected more. Add some."
