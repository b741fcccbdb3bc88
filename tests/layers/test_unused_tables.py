"""Fused tables that a loss does not use stay as they are, and keeping them costs the other programs nothing."""

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jax_tt
import jax_tt.linen
from jax_tt import optimizers
from tests.conftest import native_available
from tests.helpers import TRAINED

N, D = 48, 4
RULE = optimizers.Adagrad(0.1)
IDS = jnp.array([[1, 2], [3, 1], [5, 5]])
OVERWRITTEN = "_overwrite_with_gradient"


def table(kind: str, **kwargs: Any) -> Any:
    rngs = nnx.Rngs(0)
    if kind == "dense":
        return jax_tt.EmbedBag(N, D, optimizer=RULE, rngs=rngs, **kwargs)
    cache = jax_tt.RowCache(8, ways=4) if kind == "cached" else None
    return jax_tt.TTEmbedBag(N, D, tt_ranks=2, optimizer=RULE, cache=cache, rngs=rngs, **kwargs)


class Tasks(nnx.Module):
    """Two tables and a head, for losses that use one, both or neither."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        self.first, self.second = table(kind, **kwargs), table(kind, **kwargs)
        self.head = nnx.Linear(D, 2, rngs=nnx.Rngs(1))

    def rows(self, name: str) -> jax.Array:
        return getattr(self, name)(IDS)


def both(model: Tasks, flag: Any) -> jax.Array:
    return jnp.mean(model.head(model.rows("first") + model.rows("second")) ** 2)


def one(model: Tasks, flag: Any) -> jax.Array:
    return jnp.mean(model.head(model.rows("first")) ** 2)


def neither(model: Tasks, flag: Any) -> jax.Array:
    return jnp.mean(model.head(jnp.ones((3, D))) ** 2)


def under_cond(model: Tasks, flag: Any) -> jax.Array:
    rows = nnx.cond(
        flag, lambda m: m.rows("second"), lambda m: jnp.ones((3, D), jnp.float32), model
    )
    return jnp.mean(model.head(model.rows("first") + rows) ** 2)


def step(loss: Any, model: Tasks, opt: Any, flag: Any = True) -> jax.Array:
    value, grads = jax_tt.value_and_grad(loss)(model, flag)
    opt.update(model, grads)
    return value


def values(layer: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(layer, TRAINED))
    return {".".join(map(str, path)): np.array(variable[...]) for path, variable in flat}


def assert_same(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(("kind", "way"), [("dense", "eager"), ("cached", "donated")])
def test_an_unused_table_stays_and_the_used_one_trains(kind, way):
    model = Tasks(kind)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))

    def run(model, opt):
        return step(one, model, opt)

    if way != "eager":
        run = nnx.jit(run, donate_argnums=(0, 1) if way == "donated" else ())
    before, head = values(model.second), np.array(model.head.kernel[...])
    for _ in range(2):
        run(model, opt)
    assert_same(values(model.second), before)
    assert float(model.first.step[...]) == 2 and float(model.second.step[...]) == 0
    assert not np.array_equal(model.head.kernel[...], head)
    step(both, model, opt)  # the kept table trains on
    assert float(model.second.step[...]) == 1


def test_a_lookup_under_cond():
    model = Tasks("cached")
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    run = nnx.jit(lambda model, opt, flag: step(under_cond, model, opt, flag))
    before = values(model.second)
    run(model, opt, jnp.asarray(False))
    assert_same(values(model.second), before)
    assert float(model.first.step[...]) == 1
    # The branch that looks rows up steps the table as a loss without a cond does.
    twin, twin_opt = nnx.clone((model, opt))
    run(model, opt, jnp.asarray(True))
    step(both, twin, twin_opt)
    got, want = values(model.second), values(twin.second)
    assert got["step"] == 1 == got["sentinel"]
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_layers_of_a_stack_that_are_left_out():
    """As a random depth leaves them out: each keeps its table, and the others train."""

    class Stack(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda key: EmbedBag(rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
            self.layers = make(jax.random.split(jax.random.key(0), 3))

        def __call__(self, flags):
            def add(total, layer, flag):
                zeros = jnp.zeros((3, D), jnp.float32)
                rows = nnx.cond(flag, lambda layer: layer(IDS), lambda layer: zeros, layer)
                return total + rows

            add = nnx.scan(add, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
            return add(jnp.zeros((3, D), jnp.float32), self.layers, flags)

    EmbedBag = partial(jax_tt.EmbedBag, N, D, optimizer=RULE)
    model = Stack()
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))

    @nnx.jit
    def run(model, opt, flags):
        step(lambda model, flags: jnp.sum(model(flags) ** 2), model, opt, flags)

    before = values(model.layers)
    for flags in ([True, False, True], [False, False, True], [False, False, False]):
        run(model, opt, jnp.array(flags))
    after = values(model.layers)
    assert after["step"].tolist() == [1, 0, 2]
    assert after["sentinel"].tolist() == [1, 1, 1]
    same = [
        np.array_equal(a, b) for a, b in zip(after["embedding"], before["embedding"], strict=True)
    ]
    assert same == [False, True, False]


def test_gradients_do_not_leave_their_program():
    model = Tasks("bag")
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    before = values(model)
    grads = nnx.jit(jax_tt.grad(one))(model, True)
    with pytest.raises(ValueError, match="grads left the compiled function that computed them"):
        opt.update(model, grads)
    assert_same(values(model), before)
    # Nor are they taken from one call of a program to the next.
    update = nnx.jit(lambda model, opt, grads: opt.update(model, grads) and None)
    update(model, opt, jax_tt.grad(one)(model, True))
    assert float(model.first.step[...]) == 1
    before = values(model)
    with pytest.raises(ValueError) as error:
        update(model, opt, jax_tt.grad(one)(model, True))
    assert "update in the same jitted function" in str(error.value.__cause__)
    assert_same(values(model), before)


def big_operations(text: str, shape: str) -> list[str]:
    """Instructions of a compiled program that write an array of this shape, but for the fused update."""
    found = re.findall(rf"= \(?[^=]*{re.escape(shape)}[^=]*? ([\w-]+)\(", text)
    free = {"parameter", "get-tuple-element", "tuple", "bitcast", "custom-call", "while"}
    return [name for name in found if name not in free]


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("loss", "scan"), [(both, False), (one, True), (neither, False)], ids=["both", "one", "neither"]
)
def test_a_donated_step_neither_copies_nor_passes_over_a_table(loss, scan):
    if not native_available():
        pytest.skip("the reference updates no table in place")
    rows = 5003  # a number that no other array has
    model = Tasks("dense", method="native")
    model.first, model.second = (
        jax_tt.EmbedBag(rows, D, optimizer=RULE, rngs=nnx.Rngs(0), method="native")
        for _ in range(2)
    )
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))

    def run(model, opt):
        if not scan:
            return step(loss, model, opt)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def steps(carry, _):
            return carry, step(loss, *carry)

        _, losses = steps((model, opt), jnp.arange(3))
        return losses

    donated = nnx.jit(run, donate_argnums=(0, 1))
    text = donated.lower(model, opt).compile().as_text()
    assert f"f32[{rows},{D}]" in text
    assert big_operations(text, f"f32[{rows},{D}]") == []
    places = [t.embedding[...].unsafe_buffer_pointer() for t in (model.first, model.second)]
    donated(model, opt)
    assert places == [t.embedding[...].unsafe_buffer_pointer() for t in (model.first, model.second)]


# --- Linen


class LinenTasks(nn.Module):
    """The same in linen."""

    cache: Any = None

    @nn.compact
    def __call__(self, both: bool) -> jax.Array:
        def rows(name: str) -> jax.Array:
            table = jax_tt.tt_table(N, D, tt_ranks=2, optimizer=RULE, cache=self.cache)
            return jax_tt.linen.TableEmbed(table, combiner="sum", name=name)(IDS)

        found = rows("first")
        return nn.Dense(2)(found + rows("second") if both else found)


def linen_state(cache: Any = None) -> Any:
    model = LinenTasks(cache)
    variables = dict(jax.jit(model.init, static_argnums=1)(jax.random.key(0), True))
    counts = variables.pop("row_cache", {})

    def apply(variables: Any, both: bool) -> jax.Array:
        return model.apply({**variables, "row_cache": counts}, both)

    return jax_tt.linen.TrainState.create(apply_fn=apply, variables=variables, tx=optax.sgd(0.1))


def linen_step(state: Any, both: bool) -> Any:
    grads = jax_tt.linen.grad(lambda v: jnp.mean(state.apply_fn(v, both) ** 2))(state.variables)
    return state.apply_gradients(grads=grads)


def test_the_train_state_of_linen_keeps_an_unused_table():
    state = linen_state(jax_tt.RowCache(8, ways=4))
    run = jax.jit(linen_step, static_argnums=1)
    before = jax.tree.map(np.array, state.fused["second"])
    state = run(run(state, False), False)
    assert_same(state.fused["second"], before)
    assert float(state.fused["first"]["step"]) == 2 and int(state.step) == 2
    assert float(run(state, True).fused["second"]["step"]) == 1


def test_flax_train_state_is_refused_at_the_next_forward_pass():
    state = linen_state()
    theirs = train_state.TrainState.create(
        apply_fn=state.apply_fn, params=state.variables, tx=optax.sgd(0.1)
    )
    grads = jax.grad(lambda v: jnp.mean(state.apply_fn(v, False) ** 2))(theirs.params)
    params = theirs.apply_gradients(grads=grads).params
    assert not np.any(params[OVERWRITTEN]["second"]["core_0"])
    # Used or not, its zeros do not pass for a value to keep.
    zeros = state.replace(params=params["params"], fused=params[OVERWRITTEN])
    if not native_available():
        assert np.isnan(state.apply_fn(params, True)).all()
        with pytest.raises(ValueError, match=r"'second'.*sentinel is 0\.0.*checkpoint"):
            linen_step(zeros, True)
        return
    with pytest.raises(Exception, match=r"'second' was overwritten with zeros.*TrainState"):
        jax.block_until_ready(state.apply_fn(params, True))


def test_params_alone_are_refused_with_what_to_give():
    model = LinenTasks()
    variables = jax.jit(model.init, static_argnums=1)(jax.random.key(0), True)
    for given in (variables["params"], {"params": variables["params"]}):
        for mutable in (False, ["row_cache"]):
            with pytest.raises(ValueError, match=r"first: .*whole dictionary.*not variables"):
                model.apply(given, True, mutable=mutable)
    for given in (variables["params"], {}, {**variables, "batch_stats": {}}, None):
        with pytest.raises(ValueError, match=r"variables: got .*not variables\['params'\]"):
            jax_tt.linen.TrainState.create(apply_fn=model.apply, variables=given, tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"argument 0: got a dict without the collection params"):
        jax_tt.linen.grad(lambda v: 0.0)(variables["params"])


def test_a_linen_model_without_other_parameters():
    layer = jax_tt.linen.TableEmbed(jax_tt.dense_table(N, D, optimizer=RULE), combiner="sum")
    variables = layer.init(jax.random.key(0), IDS)
    state = jax_tt.linen.TrainState.create(
        apply_fn=layer.apply, variables=variables, tx=optax.sgd(0.1)
    )
    grads = jax_tt.linen.grad(lambda v: jnp.sum(state.apply_fn(v, IDS)))(state.variables)
    assert float(state.apply_gradients(grads=grads).fused["step"]) == 1
