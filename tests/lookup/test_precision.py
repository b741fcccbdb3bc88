"""``precision=``: what it resolves to, that it reaches every product forward and backward, and what it changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.lax import DotAlgorithm, DotAlgorithmPreset, Precision

import jax_tt
import jax_tt.linen
from jax_tt import optimizers
from jax_tt._base.dtypes import resolve_precision, tensor_float32
from tests.conftest import method_fixture, running

method = method_fixture("cuda_emulated", pytest.param("cuda", marks=pytest.mark.gpu))


# Has GPU kernels of its own, the only ones that use tensor cores.
SHAPE = jax_tt.TTShape(500, 64, (16, 16), (8, 8, 8), (4, 4, 4))
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 500, (3, 4)), jnp.int32)
EXACT = DotAlgorithm(jnp.float32, jnp.float32, jnp.float32)


def test_resolves():
    for given, resolved, tf32 in (
        (None, Precision.HIGHEST, False),
        ("highest", Precision.HIGHEST, False),
        ("float32", Precision.HIGHEST, False),
        ("high", Precision.HIGH, True),
        ("tensorfloat32", Precision.HIGH, True),
        ("default", Precision.DEFAULT, True),
        ("bfloat16", Precision.DEFAULT, True),
        (Precision.HIGH, Precision.HIGH, True),
        (("default", "high"), Precision.HIGH, True),
        ((Precision.HIGHEST, "default"), Precision.HIGHEST, False),
        (DotAlgorithmPreset.DEFAULT, Precision.DEFAULT, True),
        ("TF32_TF32_F32", DotAlgorithmPreset.TF32_TF32_F32, True),
        (DotAlgorithmPreset.TF32_TF32_F32_X3, DotAlgorithmPreset.TF32_TF32_F32_X3, False),
        (EXACT, EXACT, False),
    ):
        assert resolve_precision(given) == resolved
        assert tensor_float32(resolved) == tf32


def test_others_are_refused():
    cores = jax_tt.tt.init(jax.random.key(0), SHAPE)
    for given in ("exact", ("high",), ("high", "exact"), 3, True, jnp.float32):
        with pytest.raises(ValueError, match=r"precision: got .*expected None, 'default'"):
            jax_tt.tt.lookup(cores, IDS, precision=given, method="reference")


def test_none_takes_the_setting():
    with jax.default_matmul_precision("tensorfloat32"):
        assert resolve_precision(None) == Precision.HIGH
        assert resolve_precision("highest") == Precision.HIGHEST
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert resolve_precision(None) == DotAlgorithmPreset.BF16_BF16_F32


def _precisions(function, *args):
    """Of all products in a program, those of its inner programs too."""
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                given = equation.params["precision"]
                found.extend(given if isinstance(given, tuple) else (given,))
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


FUSED = jax_tt.tables.TTTable.of_shape(
    SHAPE, update=jax_tt.Update(optimizers.SGD(0.1)), core_init="normal"
)


def _cores(state):
    return FUSED.spec.params(state)


def _lookup(state, **options):
    return jax_tt.tt.lookup(_cores(state), IDS, **options)


def _bags(state, **options):
    return jax_tt.tt.embed_bag(_cores(state), IDS, **options)


def _fused_lookup(state, **options):
    return jax_tt.lookup(FUSED, state, IDS, **options)[0]


def _fused_bags(state, **options):
    return jax_tt.lookup_bags(FUSED, state, IDS, **options)[0]


def _attend(state, **options):
    del options["method"]
    return jax_tt.tt.attend(_cores(state), jnp.ones((2, 64)), **options)


OPS = [_lookup, _bags, _fused_lookup, _fused_bags, _attend]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("given", [None, "high", "default"])
def test_every_product_of_the_reference_has_it(op, given):
    def step(table):
        return jax.grad(lambda t: jnp.sum(op(t, precision=given, method="reference")))(table)

    found = _precisions(step, FUSED.init(jax.random.key(0)))
    assert len(found) >= 4
    assert set(found) == {resolve_precision(given)}


def test_backward_pass_keeps_the_precision_of_the_call():
    def backward(table):
        with jax.default_matmul_precision("tensorfloat32"):
            out, pullback = jax.vjp(lambda t: _lookup(t, method="reference"), table)
        return pullback(out)

    assert set(_precisions(backward, FUSED.init(jax.random.key(0)))) == {Precision.HIGH}


def _step(op, table, method, precision):
    def step(table):
        return jax.value_and_grad(
            lambda t: jnp.sum(op(t, precision=precision, method=method) ** 2)
        )(table)

    return jax.tree.leaves(jax.jit(step)(table))


@pytest.mark.parametrize("op", [_bags, _fused_lookup])
def test_tensor_float32_only_where_it_is_asked_for(op, method):
    table = FUSED.init(jax.random.key(0))
    exact = _step(op, table, method, None)
    # Those that mean the same are of `resolve_precision`; another form of them is enough here.
    for name in ("highest", (Precision.HIGHEST, "default"), EXACT)[: 3 if op is _bags else 1]:
        for got, want in zip(_step(op, table, method, name), exact, strict=True):
            np.testing.assert_array_equal(got, want)
    rounded = _step(op, table, method, "high")
    assert any(np.any(got != want) for got, want in zip(rounded, exact, strict=True))
    for got, want in zip(rounded, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=5e-3, atol=5e-3 * np.abs(want).max())
    with jax.default_matmul_precision("tensorfloat32"):
        for got, want in zip(_step(op, table, method, None), rounded, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", [_bags, _fused_lookup])
def test_changes_nothing_on_the_cpu(op):
    with running("native") as method:
        table = FUSED.init(jax.random.key(0))
        exact = _step(op, table, method, None)
        for name in ("default", "TF32_TF32_F32"):
            for got, want in zip(_step(op, table, method, name), exact, strict=True):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
@pytest.mark.parametrize("given", [None, "high"])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
def test_layers_hand_it_on(flavour, given, cached):
    cache = jax_tt.RowCache(8) if cached else None
    table = jax_tt.tt_table(500, 64, tt_ranks=16, cache=cache)
    lookup = jax_tt.Lookup(precision=given, method="reference")
    query = jnp.ones((2, 64))
    if flavour == "nnx":
        layer = jax_tt.TableEmbed(table, lookup, rngs=nnx.Rngs(0))
        layer.eval()  # counts nothing
        calls = (lambda: layer(IDS), lambda: layer.attend(query))
    else:
        layer = jax_tt.linen.TableEmbed(table, lookup)
        variables = jax.jit(layer.init)(jax.random.key(0), IDS)
        calls = (
            lambda: layer.apply(variables, IDS),
            lambda: layer.apply(variables, query, method="attend"),
        )
    for call in calls:
        # The cached rows among the scores are no product of cores.
        found = [p for p in _precisions(call) if p != Precision.HIGHEST or not given]
        assert len(found) >= 2
        assert set(found) == {resolve_precision(given)}
