"""Hyper-parameters that change between steps of a fused layer, without a new trace."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import optimizers
from tests.helpers import TRAINED

N, D = 48, 4
IDS = jnp.array([[1, 2], [3, 1], [5, 5]])
KINDS = ("lookup", "dense", "cached")
RATES = (0.1, 0.02, 0.0)


def make(kind: str, rule: Any, **kwargs: Any) -> Any:
    if kind == "dense":
        return jax_tt.EmbedBag(N, D, optimizer=rule, **kwargs)
    layer = jax_tt.TTEmbed if kind == "lookup" else jax_tt.TTEmbedBag
    cache = jax_tt.RowCache(8, ways=4) if kind == "cached" else None
    return layer(N, D, tt_ranks=2, optimizer=rule, cache=cache, **kwargs)


def table_values(layer: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(layer, TRAINED))
    return {".".join(map(str, path)): np.array(variable[...]) for path, variable in flat}


def assert_close(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-7, err_msg=name)


@nnx.jit
def take_step(layer: Any, opt: Any) -> None:
    """A step with the rule that the layer has now, which is static."""
    opt.update(layer, jax_tt.grad(lambda m: jnp.sum(m(IDS) ** 2))(layer))


@functools.cache
def wanted(kind: str, rates: Any) -> dict[str, np.ndarray]:
    """The layer after a step at every rate, each with a rule of its own."""
    layer = make(kind, optimizers.Adagrad(0.5), rngs=nnx.Rngs(0))
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    for rate in rates:
        layer.optimizer = optimizers.Adagrad(rate)
        take_step(layer, opt)
    return table_values(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_in_the_call_and_one_in_a_variable(kind):
    rate = nnx.Variable(jnp.float32(9.0))
    called = make(kind, optimizers.Adagrad(0.5), rngs=nnx.Rngs(0))
    held = make(kind, optimizers.Adagrad(learning_rate=rate), rngs=nnx.Rngs(0))
    opts = [jax_tt.FusedOptimizer(layer, optax.sgd(0.1)) for layer in (called, held)]
    traces = []

    @nnx.jit
    def called_step(layer, opt, rate):
        traces.append("call")
        given = {"learning_rate": rate}
        grads = jax_tt.grad(lambda m: jnp.sum(m(IDS, hyperparameters=given) ** 2))(layer)
        opt.update(layer, grads)

    @nnx.jit
    def held_step(layer, opt):
        traces.append("variable")
        grads = jax_tt.grad(lambda m: jnp.sum(m(IDS) ** 2))(layer)
        assert "hyperparameters" not in grads
        opt.update(layer, grads)

    for value in RATES:
        called_step(called, opts[0], jnp.float32(value))
        rate[...] = value
        held_step(held, opts[1])
    assert traces == ["call", "variable"]
    want = wanted(kind, RATES)
    assert_close(table_values(called), want)
    assert_close(table_values(held), want)
    assert held.hyperparameters["learning_rate"] is rate


@pytest.mark.parametrize("kind", ["dense", "cached"])
def test_a_rate_in_the_call_of_a_linen_layer(kind):
    twin = make(kind, optimizers.Adagrad(0.5), rngs=nnx.Rngs(0))
    layer = jax_tt.linen.TableEmbed(twin.table, combiner="sum")
    variables = layer.init(jax.random.key(0), IDS)
    (name,) = (name for name in variables if name.startswith("_overwrite"))
    for key, value in variables[name].items():
        getattr(twin, key)[...] = value
    opt = jax_tt.FusedOptimizer(twin, optax.sgd(0.1))
    traces = []

    @jax.jit
    def step(table, rate):
        traces.append(None)

        def loss(table):
            given = {"learning_rate": rate}
            return jnp.sum(layer.apply({**variables, name: table}, IDS, hyperparameters=given) ** 2)

        return jax.grad(loss)(table)

    table = variables[name]
    for value in RATES:
        table = step(table, jnp.float32(value))
        twin.optimizer = optimizers.Adagrad(value)
        take_step(twin, opt)
    assert len(traces) == 1
    assert_close(dict(table), table_values(twin))


def test_every_hyperparameter_of_adam():
    values = {"learning_rate": 0.2, "b1": 0.5, "b2": 0.75, "eps": 1e-3}
    rule = optimizers.Adam(**{name: nnx.Variable(value) for name, value in values.items()})
    held, called, fixed = (
        make("dense", rule, rngs=nnx.Rngs(0))
        for rule in (rule, optimizers.Adam(0.1), optimizers.Adam(**values))
    )
    opts = {layer: jax_tt.FusedOptimizer(layer, optax.sgd(0.1)) for layer in (held, called, fixed)}

    @nnx.jit
    def called_step(layer, opt):
        grad = jax_tt.grad(lambda m: jnp.sum(m(IDS, hyperparameters=values) ** 2))
        opt.update(layer, grad(layer))

    for layer, opt in opts.items():
        for _ in range(2):
            (called_step if layer is called else take_step)(layer, opt)
    assert_close(table_values(held), table_values(fixed))
    assert_close(table_values(called), table_values(fixed))


class Shared(nnx.Module):
    """Two tables and one rate."""

    def __init__(self) -> None:
        self.rate = nnx.Variable(jnp.float32(0.1))
        self.items = make("bag", optimizers.SGD(self.rate), rngs=nnx.Rngs(0))
        self.users = make("dense", optimizers.RowWiseAdagrad(self.rate), rngs=nnx.Rngs(1))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.items(ids) + self.users(ids)


def test_a_shared_rate_is_part_of_the_model(tmp_path):
    model = Shared()
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    rest = nnx.Not(nnx.Any(TRAINED, jax_tt.nnx.OutOfRange))
    state = nnx.to_pure_dict(nnx.state(model, rest))
    assert jax.tree.leaves(state) == [jnp.float32(0.1)]  # once

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, opt):
        opt.update(model, jax_tt.grad(lambda m: jnp.sum(m(IDS) ** 2))(model))

    step(model, opt)
    model.rate[...] = 0.0
    before = (np.array(model.items.core_0[...]), np.array(model.users.embedding[...]))
    step(model, opt)
    np.testing.assert_array_equal(model.items.core_0[...], before[0])
    np.testing.assert_array_equal(model.users.embedding[...], before[1])
    model.users.hyperparameters["learning_rate"][...] = 0.25
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        graphdef, abstract = nnx.split(nnx.eval_shape(Shared))
        restored = checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(abstract))
    nnx.replace_by_pure_dict(abstract, restored)
    again = nnx.merge(graphdef, abstract)
    assert float(again.items.hyperparameters["learning_rate"][...]) == 0.25


@pytest.mark.parametrize("jit", [True, False])
def test_a_variable_that_is_set_to_a_number(jit):
    rate = nnx.Variable(0.5)
    layer = make("dense", optimizers.Adagrad(rate), rngs=nnx.Rngs(0))
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    traces = []

    def step(layer, opt):
        traces.append(None)
        opt.update(layer, jax_tt.grad(lambda m: jnp.sum(m(IDS) ** 2))(layer))

    run = nnx.jit(step) if jit else step
    for value in RATES:
        rate.set_value(value)
        run(layer, opt)
    assert_close(table_values(layer), wanted("dense", RATES))
    assert not jit or len(traces) == 1


def test_what_fits_no_rule_is_refused():
    layer = make("dense", optimizers.Adagrad(0.1), rngs=nnx.Rngs(0))
    for given, error, match in (
        (
            {"lr": 0.1},
            ValueError,
            r"got 'lr'; expected some of those of Adagrad, learning_rate, eps",
        ),
        ({"initial_accumulator_value": 0.1}, ValueError, r"those of Adagrad, learning_rate"),
        ({"learning_rate": -1.0}, ValueError, r"learning_rate: got -1\.0"),
        ({"learning_rate": "fast"}, TypeError, r"learning_rate: got 'fast'"),
        ({"learning_rate": jnp.ones(2)}, ValueError, r"learning_rate: got float32 of shape"),
        (0.1, TypeError, r"hyperparameters: got 0\.1; expected a mapping"),
    ):
        with pytest.raises(error, match=match):
            layer(IDS, hyperparameters=given)
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"hyperparameters.*optimizer=None"):
            make(kind, None, rngs=nnx.Rngs(0))(IDS, hyperparameters={"learning_rate": 0.1})


def test_arrays_in_the_rule_of_a_layer_are_refused_with_both_ways():
    both = r"holds an array in learning_rate.*hyperparameters=.*nnx\.Variable"
    for rate in (jnp.float32(0.1), np.array(0.1)):
        with pytest.raises(TypeError, match=both):
            make("dense", optimizers.SGD(rate), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=both):
        rule = optimizers.SGD(nnx.Variable(jnp.float32(0.1)))
        layer = jax_tt.linen.TableEmbed(jax_tt.dense_table(N, D, optimizer=rule))
        layer.init(jax.random.key(0), IDS)
    with pytest.raises(TypeError, match=r"learning_rate: got a Param, which would be trained"):
        make("dense", optimizers.SGD(nnx.Param(jnp.float32(0.1))), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"learning_rate: got float32 of shape"):
        make("dense", optimizers.SGD(nnx.Variable(jnp.ones(2))), rngs=nnx.Rngs(0))
    for value in ("fast", None):
        with pytest.raises(TypeError, match=r"learning_rate: got a Variable that is no array"):
            optimizers.SGD(nnx.Variable(value))


def test_the_rule_of_a_layer_with_a_variable_is_of_no_use_elsewhere():
    layer = make("dense", optimizers.SGD(nnx.Variable(jnp.float32(0.1))), rngs=nnx.Rngs(0))
    table = jax_tt.dense_table(50, 8, optimizer=layer.optimizer)
    with pytest.raises(ValueError, match="learning_rate: is a variable of the layer"):
        jax_tt.lookup_bags(table, table.init(jax.random.key(0)), IDS)
