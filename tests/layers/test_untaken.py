"""Next values that no update takes are reported, once; tables that are declared frozen have none."""

import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jax_tt
import jax_tt.linen
from jax_tt._base import reports
from tests.conftest import method_fixture

RULE = jax_tt.optimizers.Adagrad(0.1)
IDS = jnp.array([[1, 2], [3, 1]])
method = method_fixture("reference", "native")


@pytest.fixture(autouse=True)
def _new_reports():
    reports.forget()
    yield
    reports.forget()


class Tower(nnx.Module):
    def __init__(self, **options: Any):
        self.items = jax_tt.EmbedBag(48, 4, optimizer=RULE, rngs=nnx.Rngs(0), **options)
        self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids: Any) -> Any:
        return self.head(self.items(ids))


class Tables(nnx.Module):
    def __init__(self, **options: Any):
        tables = {name: jax_tt.dense_table(48, 4, optimizer=RULE) for name in ("a", "b")}
        lookup = jax_tt.Lookup(bounds="warn", **options)
        features = {name: jax_tt.Feature(name) for name in tables}
        self.embed = jax_tt.EmbedCollection(tables, features, lookup, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids: Any) -> Any:
        return self.head(sum(self.embed({"a": ids, "b": ids}).values()))


def loss(model: Any) -> Any:
    return jnp.mean((model(IDS) - 1) ** 2)


def step(model: Any, opt: Any) -> None:
    opt.update(model, jax_tt.grad(loss)(model))


def plain(model: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
        gc.collect()
    return [str(one.message) for one in found if issubclass(one.category, RuntimeWarning)]


def arrays(module: Any) -> dict[Any, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, jax_tt.FusedParam))
    return {path: np.array(variable[...]) for path, variable in flat}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_plain_optimizer_is_told_that_it_trains_no_table(compiled):
    model = Tower()
    run = nnx.jit(step) if compiled else step
    (message,) = said(lambda: [run(model, plain(model)) for _ in range(3)])
    assert "fused tables items were computed, but never taken" in message
    assert "jax_tt.FusedOptimizer.update" in message and "layer.frozen = True" in message
    assert model.items.step[...] == 0
    (message,) = said(lambda: run(model.items, plain(model.items)))  # of another table
    assert "fused tables the model itself" in message


def test_the_warning_is_that_of_the_line_that_drops_them():
    model = Tower()
    with pytest.warns(RuntimeWarning) as found:
        step(model, plain(model))
    assert found[0].filename == __file__


def trained_by(update: Any) -> Iterator[Any]:
    for make in (Tower, Tables):
        model = make()
        yield functools.partial(update, model, jax_tt.FusedOptimizer(model, optax.sgd(0.1)))


def in_cond(model: Any, opt: Any) -> None:
    grads = jax_tt.grad(loss)(model)
    nnx.cond(
        jnp.asarray(True), lambda m, o: o.update(m, grads) and None, lambda m, o: None, model, opt
    )


def in_scan(model: Any, opt: Any) -> None:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def steps(carry: Any, k: Any) -> Any:
        step(*carry)
        return carry

    steps((model, opt), jnp.arange(3))


def shapes_only(model: Any, opt: Any) -> None:
    nnx.eval_shape(step, model, opt)


def mapped(model: Any, opt: Any) -> None:
    grads = jax.tree.map(lambda g: g / 2, jax_tt.grad(loss)(model))
    norm = optax.global_norm(jax.tree.leaves(nnx.state(grads)))
    opt.update(model, jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads))


def raises(model: Any, opt: Any) -> None:
    @nnx.jit
    def failing(model: Any) -> None:
        grads = jax_tt.grad(loss)(model)
        raise ZeroDivisionError(grads)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing(model)
    grads = jax_tt.grad(loss)(model)
    with pytest.raises(ValueError, match="model is not the one"):
        opt.update(model.head, grads)


def evaluates(model: Any, opt: Any) -> None:
    del opt
    model.eval()
    nnx.jit(loss)(model)
    loss(model)


def stopped(model: Any, opt: Any) -> None:
    del opt

    def of_head(model: Any) -> Any:
        return jnp.sum(model.head(jax.lax.stop_gradient(model.items(IDS))))

    if isinstance(model, Tower):
        plain(model).update(model, jax_tt.grad(of_head)(model))


UPDATES = [step, nnx.jit(step), in_cond, in_scan, mapped, raises, evaluates, shapes_only, stopped]


@pytest.mark.parametrize("update", UPDATES, ids=lambda u: getattr(u, "__name__", "jit"))
def test_nothing_is_said_where_they_are_taken_or_there_are_none(update):
    for call in trained_by(update):
        assert said(call) == []


@pytest.mark.parametrize("make", [Tower, Tables])
def test_a_frozen_table_is_as_it_was_and_nothing_is_said(make, method):
    model = make(method=method)
    for table in [model.items] if make is Tower else model.embed.tables.values():
        table.frozen = True
    before, head = arrays(model), np.array(model.head.kernel[...])
    for opt in (plain(model), jax_tt.FusedOptimizer(model, optax.sgd(0.1))):
        assert said(lambda opt=opt: [step(model, opt), nnx.jit(step)(model, opt)]) == []
    for name, array in arrays(model).items():
        np.testing.assert_array_equal(array, before[name])
    assert not np.array_equal(model.head.kernel[...], head)


def test_one_of_two_tables_is_frozen_and_trains_again_when_it_is_not(method):
    model = Tables(method=method)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    run, a = nnx.jit(step, donate_argnums=(0, 1)), model.embed.tables["a"]
    a.frozen = True
    for freeze, steps in ((True, (0, 1)), (False, (1, 2))):
        a.frozen, before = freeze, np.array(a.embedding[...])
        run(model, opt)
        assert tuple(model.embed.steps[name][...] for name in ("a", "b")) == steps
        assert np.array_equal(a.embedding[...], before) == freeze
    assert model.embed.sentinel[...] == 1


def test_weights_of_bags_have_gradients_where_the_table_is_frozen(method):
    layer = jax_tt.EmbedBag(48, 4, optimizer=RULE, method=method, rngs=nnx.Rngs(0))

    def of_weights(layer: Any, weights: Any) -> Any:
        return jnp.sum(layer(jax_tt.Bags(IDS, None, weights)) ** 2)

    gradients = []
    for layer.frozen in (False, True):
        both = jax_tt.grad(of_weights, argnums=(0, 1))
        gradients.append(both(layer, jnp.ones(IDS.shape))[1])
    np.testing.assert_allclose(*gradients, rtol=1e-6)
    assert np.abs(gradients[1]).max() > 0


def test_a_frozen_hash_table_takes_no_keys():
    layer = jax_tt.TableEmbedBag(jax_tt.hash_table(64, 4, optimizer=RULE), rngs=nnx.Rngs(0))
    keys = layer.host_batch(np.array([[2**40, 5], [7, 7]]))

    def of_keys(layer: Any) -> Any:
        return jnp.sum((layer(keys) - 1) ** 2)

    layer.frozen = True
    before = {name: np.array(array) for name, array in layer.state().items()}
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    nnx.jit(lambda layer, opt: opt.update(layer, jax_tt.grad(of_keys)(layer)))(layer, opt)
    for name, array in layer.state().items():
        np.testing.assert_array_equal(array, before[name], name)
    layer.frozen = False
    opt.update(layer, jax_tt.grad(of_keys)(layer))
    assert jax_tt.dynamic.statistics(layer.table, layer.state())["keys"] == 3


def test_frozen_is_an_attribute_of_fused_tables_alone():
    with pytest.raises(ValueError, match=r"frozen: .*has no fused update"):
        jax_tt.EmbedBag(48, 4, rngs=nnx.Rngs(0)).frozen = True


def test_linen():
    layer = jax_tt.linen.TableEmbed(jax_tt.dense_table(48, 4, optimizer=RULE), combiner="sum")
    variables = layer.init(jax.random.key(0), IDS)
    state = jax_tt.linen.TrainState.create(
        apply_fn=layer.apply, variables=variables, tx=optax.sgd(0.1)
    )

    def of_variables(variables: Any) -> Any:
        return jnp.sum(layer.apply(variables, IDS) ** 2)

    gradients = jax_tt.linen.grad(of_variables)
    assert said(lambda: state.apply_gradients(grads=gradients(state.variables))) == []
    other = train_state.TrainState.create(apply_fn=layer.apply, params={}, tx=optax.sgd(0.1))

    def lost() -> None:
        other.apply_gradients(grads=gradients(variables).params)

    (message,) = said(lost)
    assert "jax_tt.linen.TrainState.apply_gradients" in message
