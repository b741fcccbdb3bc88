"""Gradients of models with fused tables: what generic code sees of them, and what it cannot do to the tables."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import optimizers
from tests.conftest import method_fixture
from tests.helpers import TRAINED, raises

N, D = 48, 4
RULE = optimizers.Adagrad(0.1)
IDS = jnp.array([[1, 2], [3, 1], [5, 5]])
method = method_fixture("reference", "native")


class Tower(nnx.Module):
    """A table, alone or in a collection, and a head."""

    def __init__(self, kind: str = "dense", rule: Any = RULE, method: str = "auto") -> None:
        rngs = nnx.Rngs(0)
        if kind == "collection":
            tables = {
                "items": jax_tt.dense_table(N, D, optimizer=rule),
                "plain": jax_tt.dense_table(N, D),
            }
            features = {"a": jax_tt.Feature("items"), "b": jax_tt.Feature("plain")}
            self.items = jax_tt.EmbedCollection(
                tables, features, jax_tt.Lookup(method=method, bounds="warn"), rngs=rngs
            )
        else:
            self.items = jax_tt.EmbedBag(N, D, optimizer=rule, rngs=rngs, method=method)
        self.head = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        if isinstance(self.items, jax_tt.EmbedCollection):
            return self.head(sum(self.items({"a": ids, "b": ids}).values()))
        return self.head(self.items(ids))


def loss(model: Any, scale: Any = 1.0) -> jax.Array:
    return scale * jnp.mean((model(IDS) - 1) ** 2)


def penalised(model: Any) -> jax.Array:
    squares = [jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    return loss(model) + 1e-2 * sum(squares)


def fused(model: nnx.Module) -> dict[str, np.ndarray]:
    return _arrays(model, jax_tt.FusedParam)


def _arrays(model: nnx.Module, kind: Any) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return {".".join(map(str, path)): np.array(variable[...]) for path, variable in flat}


def assert_same(got: Any, want: Any) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], name)


def optimizer(model: Any, **options: Any) -> jax_tt.FusedOptimizer:
    return jax_tt.FusedOptimizer(model, optax.sgd(0.1), **options)


def halved(grads: Any) -> Any:
    return jax.tree.map(lambda g: g / 2, grads)


def clipped(grads: Any) -> Any:
    clip = optax.clip_by_global_norm(1e-3)
    return clip.update(grads, clip.init(grads))[0]


# --- What generic code sees


@pytest.mark.parametrize("kind", ["dense", "collection"])
def test_what_is_meant_for_parameters_does_not_see_a_table(kind):
    model, plain = Tower(kind), Tower("dense", None)
    grads = jax_tt.grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    assert jax.tree.map(jnp.shape, nnx.state(grads)) == jax.tree.map(jnp.shape, params)
    assert isinstance(grads, nnx.State)
    assert grads.head.kernel[...].shape == grads["head"]["kernel"][...].shape == (D, 1)
    grads["head"]["bias"] = grads.head.bias.replace(jnp.full(1, 7.0))
    assert float(grads["head"]["bias"][0]) == 7
    grads = jax_tt.grad(loss)(model)
    (table,) = (name for name in fused(model) if name.endswith("embedding"))
    assert fused(model)[table].shape == (N, D)
    if kind == "dense":
        want = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.PathContains("head")))(plain)
        np.testing.assert_allclose(optax.tree.norm(grads), optax.tree.norm(want), rtol=1e-6)
        assert sum(p.size for p in jax.tree.leaves(params)) == D + 1
    momentum = jax_tt.FusedOptimizer(model, optax.adam(1e-3)).opt_state
    assert all("embedding" not in str(path) or "plain" in str(path) for path in _paths(momentum))


def _paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


@pytest.mark.parametrize("kind", ["dense", "collection"])
@pytest.mark.parametrize("jit", [True, False])
def test_penalties_clipping_and_scaling_leave_the_tables_alone(kind, jit):
    """In a collection, the ordinary table beside the fused one is penalised and clipped."""

    def train(loss: Any, change: Any) -> Any:
        model = Tower(kind)
        # The head stays, so that the tables have the same gradients in all runs.
        wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("head")))
        opt = optimizer(model, wrt=wrt)

        def step(model: Any, opt: Any) -> None:
            opt.update(model, change(jax_tt.grad(loss, wrt=wrt)(model)))

        step = nnx.jit(step) if jit else step
        step(model, opt)
        return model

    want = train(loss, lambda grads: grads)
    for other, change in ((penalised, lambda g: g), (loss, clipped), (loss, halved)):
        got = train(other, change)
        assert_same(fused(got), fused(want))
        if kind == "collection":
            own = got.items.tables["plain"].embedding[...]
            assert not np.array_equal(own, want.items.tables["plain"].embedding[...])


def test_the_mean_over_devices_is_that_of_ordinary_gradients():
    model, single = Tower(), Tower()
    model.items.axis_name = "data"
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    ids = jnp.array([[1, 2], [3, 1], [5, 5], [7, 2]])

    def step(model: Any, ids: jax.Array, mean: Any) -> Any:
        def loss(model: Any) -> jax.Array:
            # The table sums over the devices, so that each of them gives its share of the mean.
            return jnp.mean(model.head(model.items(ids, grad_scale=2.0 if mean else 1.0)) ** 2)

        grads = jax_tt.grad(loss)(model)
        optimizer(model).update(model, jax.lax.pmean(grads, "data") if mean else grads)
        return nnx.state(model, TRAINED)

    graphdef, state = nnx.split(model)
    sharded = jax.shard_map(
        lambda state, ids: step(nnx.merge(graphdef, state), ids, True),
        mesh=mesh,
        in_specs=(whole, rows),
        out_specs=whole,
        check_vma=False,
    )
    nnx.update(model, jax.jit(sharded)(state, ids))
    step(single, ids, False)
    got, want = _arrays(model, TRAINED), _arrays(single, TRAINED)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_forms_of_value_and_grad():
    model, other = Tower(), Tower("collection")

    @jax_tt.value_and_grad(argnums=(0, nnx.DiffState(1, nnx.PathContains("kernel"))), has_aux=True)
    def both(first, second, scale):
        return loss(first, scale) + loss(second, scale), scale

    (value, aux), (of_first, of_second) = both(model, other, 2.0)
    assert aux == 2.0 and float(value) == pytest.approx(float(loss(model, 2.0) + loss(other, 2.0)))
    assert list(nnx.to_flat_state(of_second).paths) == [("head", "kernel")]
    optimizer(model).update(model, of_first)
    optimizer(other, wrt=nnx.PathContains("kernel")).update(other, of_second)
    assert float(model.items.step[...]) == 1 == float(other.items.steps["items"][...])
    grads, aux = jax_tt.grad(lambda m: (loss(m), 3), has_aux=True)(model)
    assert aux == 3 and list(grads) == ["head"]
    _, grads = jax_tt.value_and_grad(functools.partial(loss, scale=2.0))(model)
    by_name = jax_tt.grad(loss)(scale=2.0, model=model)
    jax.tree.map(np.testing.assert_array_equal, dict(by_name), dict(grads))
    with pytest.raises(TypeError, match="argnums: got 0 for a call with 0 positional arguments"):
        jax_tt.grad(functools.partial(loss, scale=2.0))(model=model)
    assert list(grads) == ["head"]
    # A model without fused tables has the gradients of Flax.
    plain = Tower("dense", None)
    for grads in (jax_tt.grad(loss)(plain), nnx.grad(loss)(plain)):
        assert type(grads) is nnx.State
        optimizer(plain).update(plain, grads)


# --- A part of the parameters


def test_a_frozen_backbone_and_lora():
    class Model(nnx.Module):
        def __init__(self):
            self.tower, rngs = Tower(), nnx.Rngs(1)
            self.lora = nnx.LoRA(1, 2, 1, rngs=rngs)

        def __call__(self, ids):
            return self.tower(ids) + self.lora(jnp.ones((len(ids), 1)))

    model = Model()
    for wrt in (
        nnx.All(nnx.Param, nnx.LoRAParam),
        nnx.PathContains("lora"),
        nnx.Not(nnx.PathContains("head")),  # the layer counts ids out of range, in integers
    ):
        before, steps = _arrays(model, TRAINED), float(model.tower.items.step[...])
        optimizer(model, wrt=wrt).update(model, jax_tt.grad(loss, wrt=wrt)(model))
        after = _arrays(model, TRAINED)
        assert_same(*({k: v for k, v in x.items() if "head" in k} for x in (after, before)))
        assert float(model.tower.items.step[...]) == steps + 1
        assert not np.array_equal(after["lora.lora_b"], before["lora.lora_b"])


def test_a_filter_of_fused_tables_alone_is_refused():
    model = Tower()
    selects = r"wrt: got .*, which selects items\.\w+, .* leave it out"
    for wrt in (jax_tt.FusedParam, nnx.PathContains("items")):
        with pytest.raises(ValueError, match=f"FusedOptimizer: {selects}"):
            optimizer(model, wrt=wrt)
        with pytest.raises(ValueError, match=f"value_and_grad: {selects}"):
            jax_tt.grad(loss, wrt=wrt)(model)
        with pytest.raises(ValueError, match=f"value_and_grad: {selects}"):
            jax_tt.grad(loss, argnums=nnx.DiffState(0, wrt))(model)
    # Of a module without parameters, no filter leaves one out.
    optimizer(model.items, wrt=nnx.Not(nnx.PathContains("frozen")))
    grads, of_table = jax_tt.grad(
        lambda model, table: loss(model) + jnp.sum(table(IDS)),
        argnums=(0, 1),
        wrt=nnx.Not(nnx.PathContains("bias")),
    )(model, Tower().items)
    assert list(nnx.to_flat_state(grads).paths) == [("head", "kernel")] and not of_table


def test_a_method_of_a_module_is_refused():
    class WithLoss(Tower):
        def loss(self, scale):
            return loss(self, scale)

    model = WithLoss()
    for method in (model.loss, functools.partial(model.loss, 2.0)):
        with pytest.raises(
            ValueError, match=r"f: got the method loss of a WithLoss; .* WithLoss\.loss"
        ):
            jax_tt.grad(method)
    assert list(jax_tt.grad(WithLoss.loss)(model, 2.0)) == ["head"]


def test_another_wrt_than_that_of_the_optimizer_is_refused():
    model = Tower()
    head = nnx.PathContains("bias")
    before = _arrays(model, TRAINED)
    with pytest.raises(ValueError, match=r"grads lack head\.kernel, but tx updates .*the same wrt"):
        optimizer(model).update(model, jax_tt.grad(loss, wrt=head)(model))
    assert_same(_arrays(model, TRAINED), before)
    # As in Flax, the optimizer takes its part of more.
    optimizer(model, wrt=head).update(model, jax_tt.grad(loss)(model))
    after = _arrays(model, TRAINED)
    assert np.array_equal(after["head.kernel"], before["head.kernel"])
    assert not np.array_equal(after["head.bias"], before["head.bias"])


# --- What would lose or mix the next values


WITHOUT = {
    "nnx.grad": lambda model: nnx.grad(loss)(model),
    "state": lambda model: nnx.state(jax_tt.grad(loss)(model)),
    "merge": lambda model: nnx.merge_state(*nnx.split_state(jax_tt.grad(loss)(model), "head", ...)),
    "DiffState": lambda model: nnx.grad(loss, argnums=nnx.DiffState(0, TRAINED))(model),
}


def test_gradients_without_next_values_are_refused():
    model = Tower()
    opt, before = optimizer(model), _arrays(model, TRAINED)
    for name, gradients in WITHOUT.items():

        def step(model: Any, opt: Any, gradients: Any = gradients) -> None:
            opt.update(model, gradients(model))

        for run in (step, nnx.jit(step)) if name == "merge" else (step,):
            with pytest.raises(
                ValueError, match=r"fused tables items; expected what jax_tt\.value_and_grad"
            ):
                run(model, opt)
    assert_same(_arrays(model, TRAINED), before)


def averaged(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: (a + b) / 2, first, second)


def carried(first: Any, second: Any) -> Any:
    return jax.lax.scan(lambda grads, _: (second, None), first, length=2)[0]


def chosen(first: Any, second: Any) -> Any:
    return jax.lax.cond(jnp.array(True), lambda: first, lambda: second)


@pytest.mark.parametrize("combine", [averaged, carried, chosen])
@pytest.mark.parametrize("jit", [True, False])
def test_two_gradients_are_not_combined(combine, jit):
    def nnx_step(model: Any) -> None:
        combine(jax_tt.grad(loss)(model), jax_tt.grad(loss)(model))

    def linen_step(variables: Any) -> None:
        combine(*(jax_tt.linen.grad(linen_loss)(variables) for _ in range(2)))

    for step, model, compiled in (
        (nnx_step, Tower(), nnx.jit),
        (linen_step, linen_state().variables, jax.jit),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            (compiled(step) if jit else step)(model)
        words = f"{error.value} {error.value.__cause__}"
        assert "Update after every micro-batch and put optax.MultiSteps into tx" in words


def test_gradients_do_not_leave_a_jitted_function():
    state = linen_state()
    for escaped in (
        jax.jit(jax_tt.linen.grad(linen_loss))(state.variables),
        jax.lax.scan(lambda c, _: (c, jax_tt.linen.grad(linen_loss)(state.variables)), 0, length=2)[
            1
        ],
    ):
        with pytest.raises(ValueError, match="grads left the compiled function"):
            state.apply_gradients(grads=escaped)


def with_term(model: Any, scale: float) -> jax.Array:
    """A loss with a term that the trace does not show, since the lookup is in a function of its own."""
    rows = nnx.jit(lambda model: model(IDS))(model)
    return jnp.mean((rows - 1) ** 2) + scale * model.items.sentinel[...]


@pytest.mark.parametrize("kind", ["dense", "collection"])
def test_a_sentinel_that_is_not_exactly_1_is_refused_under_jit(kind, method):
    """Half the tolerance of the forward pass: a term of this size would pass for rounding there."""
    model = Tower(kind, method=method)
    opt = optimizer(model)

    @nnx.jit
    def step(model, opt):
        opt.update(model, jax_tt.grad(with_term)(model, 2.0**-15))

    step(model, opt)
    assert np.isnan(model.items.sentinel[...])
    if raises(method):
        with pytest.raises(Exception, match="sentinel is nan, expected 1"):
            jax.block_until_ready(model(IDS))
    else:
        assert np.isnan(model(IDS)).all()


def test_a_sentinel_that_is_not_exactly_1_is_refused_before_anything_is_written():
    model = Tower()
    before = _arrays(model, TRAINED)
    grads = jax_tt.grad(with_term)(model, 2.0**-20)
    with pytest.raises(ValueError, match=r"sentinel is 1\.000001, expected 1.*weight_decay"):
        optimizer(model).update(model, grads)
    assert_same(_arrays(model, TRAINED), before)


# --- Linen


class LinenTower(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = jax_tt.dense_table(N, D, optimizer=RULE)
        rows = jax_tt.linen.TableEmbed(table, combiner="sum", name="items")(ids)
        return nn.Dense(1, name="head")(rows)


def linen_loss(variables: Any) -> jax.Array:
    return jnp.mean((LinenTower().apply(variables, IDS) - 1) ** 2)


@functools.cache
def linen_variables() -> Any:
    return jax.jit(LinenTower().init)(jax.random.key(0), IDS)


def linen_state(**options: Any) -> jax_tt.linen.TrainState:
    options = {"tx": optax.sgd(0.0, momentum=0.9), **options}
    return jax_tt.linen.TrainState.create(
        apply_fn=LinenTower().apply, variables=linen_variables(), **options
    )


@pytest.mark.parametrize("jit", [True, False])
def test_linen_keeps_tables_and_parameters_apart(jit):
    def penalised(variables: Any) -> jax.Array:
        return linen_loss(variables) + optax.tree.norm(variables["params"], squared=True)

    def train(loss: Any, change: Any) -> Any:
        def step(state: Any) -> Any:
            grads = jax_tt.linen.grad(loss)(state.variables)
            return state.apply_gradients(grads=change(grads))

        return (jax.jit(step) if jit else step)(linen_state())

    state = linen_state()
    assert sorted(state.params) == ["head"] and list(state.fused) == ["items"]
    assert all("items" not in str(path) for path in _paths(state.opt_state))
    grads = jax_tt.linen.grad(linen_loss)(state.variables)
    assert jax.tree.structure(grads.params) == jax.tree.structure(state.params)
    assert grads["head"]["kernel"].shape == (D, 1) and len(jax.tree.leaves(grads)) == 2
    want = train(linen_loss, lambda grads: grads)
    for loss, change in ((penalised, lambda g: g), (linen_loss, clipped), (linen_loss, halved)):
        got = train(loss, change)
        jax.tree.map(np.testing.assert_array_equal, got.fused, want.fused)
    assert float(want.fused["items"]["step"]) == 1


def test_gradients_are_combined_with_parameters():
    def decayed(grads: Any, params: Any) -> Any:
        return jax.tree.map(lambda g, p: g + 0.5 * p, grads, params)

    model, plain = Tower(), Tower()
    grads, want = jax_tt.grad(loss)(model), jax_tt.grad(loss)(plain)
    kernel = decayed(grads.head.kernel[...], model.head.kernel[...])
    nnx.update(grads, decayed(nnx.state(grads), nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(grads.head.kernel[...], kernel)
    optimizer(model).update(model, grads)
    optimizer(plain).update(plain, want)
    assert_same(fused(model), fused(plain))

    state = linen_state(tx=optax.sgd(1.0))
    grads = jax_tt.linen.grad(linen_loss)(state.variables)
    assert repr(grads) == f"Gradients({grads.params!r})"
    after = state.apply_gradients(grads=grads.replace(decayed(grads.params, state.params)))
    want = state.apply_gradients(grads=grads)
    jax.tree.map(np.testing.assert_array_equal, after.fused, want.fused)
    for name, own in state.params["head"].items():
        got = after.params["head"][name]
        np.testing.assert_allclose(got, want.params["head"][name] - 0.5 * own, rtol=1e-5)
    with pytest.raises(ValueError, match="params: got the structure"):
        grads.replace(state.params["head"])


def test_linen_checks_which_argument_holds_the_variables():
    variables = linen_state().variables
    with pytest.raises(TypeError, match=r"argnums: got \(0, 1\)"):
        jax_tt.linen.grad(linen_loss, argnums=(0, 1))
    with pytest.raises(
        TypeError, match=r"0 positional arguments; expected the variables .*by position"
    ):
        jax_tt.linen.grad(linen_loss)(variables=variables)


def test_linen_refuses_what_is_no_next_value():
    state = linen_state()
    whole = jax.grad(linen_loss)(state.variables)
    for given in (whole, whole["params"], dict(jax_tt.linen.grad(linen_loss)(state.variables))):
        with pytest.raises(ValueError, match=r"expected what jax_tt\.linen\.value_and_grad"):
            state.apply_gradients(grads=given)

    def with_term(variables: Any) -> jax.Array:
        table = variables["_overwrite_with_gradient"]["items"]
        return jax.jit(linen_loss)(variables) + 2.0**-20 * table["sentinel"]

    grads = jax_tt.linen.grad(with_term)(state.variables)
    with pytest.raises(ValueError, match=r"'items'.*sentinel is 1\.000001, expected 1"):
        state.apply_gradients(grads=grads)
    step = jax.jit(
        lambda state: state.apply_gradients(grads=jax_tt.linen.grad(with_term)(state.variables))
    )
    assert np.isnan(step(state).fused["items"]["sentinel"])
    plain = linen_state().replace(fused={})
    assert int(plain.apply_gradients(grads=whole["params"]).step) == 1
