"""Fused NNX tables: training, what may surround it, and what must be refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_tt
from jax_tt import optimizers
from tests.conftest import method_fixture
from tests.helpers import TRAINED

N, D = 60, 4
FACTORS: dict[str, Any] = {"tt_ranks": 3, "row_factors": (3, 4, 5), "col_factors": (1, 2, 2)}
SGD, ADAGRAD = optimizers.SGD(0.1), optimizers.Adagrad(0.1)

# The layers hold no arithmetic of their own: one implementation beside the reference is enough.
method = method_fixture("reference", "native")


class Tower(nnx.Module):
    """A table and a dense layer, so that both kinds of parameters are there."""

    def __init__(self, kind: str, rule: optimizers.Optimizer | None, **kwargs: Any) -> None:
        rngs = nnx.Rngs(0)
        if kind == "dense":
            self.items = jax_tt.EmbedBag(N, D, optimizer=rule, rngs=rngs, **kwargs)
        else:
            layer = {"lookup": jax_tt.TTEmbed, "bag": jax_tt.TTEmbedBag}[kind]
            self.items = layer(N, D, optimizer=rule, rngs=rngs, **FACTORS, **kwargs)
        self.head = nnx.Linear(D, 2, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        rows = self.items(ids)
        return self.head(rows if rows.ndim == 2 else rows.sum(1))


def batch(k: int) -> tuple[jax.Array, jax.Array]:
    """Ids with duplicates in and across the bags."""
    rng = np.random.default_rng(k)
    ids = rng.integers(0, N, (6, 3))
    ids[1] = ids[0, 0]
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)


def loss_fn(model: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(ids) - y) ** 2)


@nnx.jit
def train_step(model: Any, opt: Any, ids: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = jax_tt.value_and_grad(loss_fn)(model, ids, y)
    opt.update(model, grads)
    return loss


def arrays(model: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, TRAINED))
    return {".".join(map(str, path)): np.array(variable[...]) for path, variable in flat}


def assert_same(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float = 0
) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(
            got[name], want[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def refuses(model: Any, ids: jax.Array) -> bool:
    """Whether the forward pass refuses: an error on CPU, NaN elsewhere."""
    try:
        return bool(jnp.all(jnp.isnan(model(ids))))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return "sentinel" in str(error)


# --- Training


@pytest.mark.parametrize("kind", ["lookup", "bag", "dense"])
def test_sgd_equals_optax(kind, method):
    fused, plain = Tower(kind, SGD, method=method), Tower(kind, None, method=method)
    fused_opt = jax_tt.FusedOptimizer(fused, optax.sgd(0.1))
    plain_opt = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    for k in range(3):
        loss = train_step(fused, fused_opt, *batch(k))
        want = train_step(plain, plain_opt, *batch(k))
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    got = arrays(fused)
    assert float(got.pop("items.step")) == 3
    assert float(got.pop("items.sentinel")) == 1 == float(got.pop("items.used"))
    assert_same(got, arrays(plain), 1e-5)


@pytest.mark.parametrize("kind", ["bag", "dense"])
def test_donated_step(kind, method):
    model = Tower(kind, ADAGRAD, method=method)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    other = Tower(kind, ADAGRAD, method=method)
    other_opt = jax_tt.FusedOptimizer(other, optax.sgd(0.1))
    donated = nnx.jit(train_step.__wrapped__, donate_argnums=(0, 1))
    name = "embedding" if kind == "dense" else "core_1"
    donated(model, opt, *batch(0))
    before = getattr(model.items, name)[...]
    address = before.unsafe_buffer_pointer()
    donated(model, opt, *batch(1))
    assert before.is_deleted()
    if method == "native":
        assert getattr(model.items, name)[...].unsafe_buffer_pointer() == address
    for k in range(2):
        train_step(other, other_opt, *batch(k))
    assert_same(arrays(model), arrays(other), 1e-6)


def test_step_does_not_recompile():
    traces = []
    model = Tower("bag", ADAGRAD)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(model, opt, ids, y):
        traces.append(None)
        opt.update(model, jax_tt.grad(loss_fn)(model, ids, y))

    for k in range(3):
        step(model, opt, *batch(k))
    assert len(traces) == 1


def test_schedule_reads_the_step():
    schedule = optax.piecewise_constant_schedule(0.1, {2: 0.5})
    scheduled = Tower("dense", optimizers.SGD(schedule)).items
    with_optax = Tower("dense", None).items
    opt = jax_tt.FusedOptimizer(scheduled, optax.sgd(0.1))
    plain = nnx.Optimizer(with_optax, optax.sgd(schedule), wrt=nnx.Param)

    @nnx.jit
    def one_step(layer, opt, ids):
        opt.update(layer, jax_tt.grad(lambda m: jnp.sum(m(ids) ** 2))(layer))

    for k in range(4):
        # optax counts in int32 and mixes that with floats.
        with jax.numpy_dtype_promotion("standard"):
            for layer, step in ((scheduled, opt), (with_optax, plain)):
                one_step(layer, step, batch(k)[0])
    np.testing.assert_allclose(scheduled.embedding[...], with_optax.embedding[...], rtol=1e-5)
    assert float(scheduled.step[...]) == 4


# --- What may surround a fused step


def test_clipping_and_accumulation_inside_tx():
    model = Tower("bag", SGD)
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1))
    opt = jax_tt.FusedOptimizer(model, optax.MultiSteps(tx, 2).gradient_transformation())
    head = model.head.kernel[...]
    with jax.numpy_dtype_promotion("standard"):
        train_step(model, opt, *batch(0))
        np.testing.assert_array_equal(model.head.kernel[...], head)
        train_step(model, opt, *batch(1))
    assert bool(jnp.any(model.head.kernel[...] != head))
    assert not refuses(model, batch(2)[0])
    assert float(model.items.step[...]) == 2


def test_a_table_behind_stop_gradient_stays_as_it_is():
    model = Tower("bag", SGD)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    before = arrays(model)

    def loss(model, ids, y):
        return jnp.mean((model.head(jax.lax.stop_gradient(model.items(ids))) - y) ** 2)

    opt.update(model, jax_tt.grad(loss)(model, *batch(0)))
    after = arrays(model)
    assert_same(after, before | {name: after[name] for name in after if "head" in name})
    assert not np.array_equal(before["head.kernel"], after["head.kernel"])


# --- Wrong uses


def test_wrong_gradients_are_refused_before_they_are_written():
    model = Tower("dense", ADAGRAD)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    before = arrays(model)
    # In functions of their own, where the trace of the loss does not show that it is the same table.
    call, (ids, y) = nnx.jit(lambda model, ids: model(ids)), batch(0)
    grads = jax_tt.grad(lambda m: jnp.mean((call(m, ids) - call(m, ids[::-1]) - y) ** 2))(model)
    with pytest.raises(ValueError, match=r"fused table 'items'.*more than once"):
        opt.update(model, grads)
    assert_same(arrays(model), before)


def test_gradient_of_a_part_of_the_table_is_refused():
    model = Tower("bag", SGD)
    part = nnx.DiffState(0, nnx.PathContains("core_1"))
    with pytest.raises(ValueError, match="part of its table"):
        nnx.grad(loss_fn, argnums=part)(model, *batch(0))


def test_attend_in_the_loss_of_a_fused_table_is_refused():
    model = Tower("lookup", SGD)
    query = jnp.ones((2, D))
    assert model.items.attend(query).shape == (2, N)
    with pytest.raises(TypeError, match=r"attend is part of the loss.*optimizer=None"):
        jax_tt.grad(lambda m: jnp.sum(m.items.attend(query)))(model)

    def with_metric(model, ids, y):
        return loss_fn(model, ids, y), jnp.mean(model.items.attend(query))

    grads, metric = jax_tt.grad(with_metric, has_aux=True)(model, *batch(0))
    jax_tt.FusedOptimizer(model, optax.sgd(0.1)).update(model, grads)
    assert metric.shape == () and float(model.items.step[...]) == 1


def test_grad_scale_without_optimizer_is_refused():
    for kind in ("lookup", "bag", "dense"):
        with pytest.raises(ValueError, match=r"grad_scale.*optimizer=None"):
            Tower(kind, None).items(batch(0)[0], grad_scale=2.0)


def test_fused_optimizer_refuses_a_fused_rule():
    model = Tower("bag", SGD)
    with pytest.raises(
        TypeError, match=r"FusedOptimizer: tx: got .*; expected an optax transformation"
    ):
        jax_tt.FusedOptimizer(model, ADAGRAD)  # pyright: ignore[reportArgumentType]


class Pair(nnx.Module):
    """Tables alone, so that optax sees no parameter in one or in both."""

    def __init__(self) -> None:
        self.first, self.second = (
            jax_tt.EmbedBag(N, D, optimizer=SGD, rngs=nnx.Rngs(k)) for k in range(2)
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        return (self.first(ids) + self.second(ids))[:, :2]


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("make", [Pair, lambda: Tower("bag", ADAGRAD)], ids=["pair", "tower"])
def test_another_model_than_that_of_the_optimizer_is_refused(make, jit):
    model = make()
    part = model.first if isinstance(model, Pair) else model.items
    before = arrays(model)
    of_part, of_whole = (jax_tt.FusedOptimizer(m, optax.adam(1e-3)) for m in (part, model))

    def step(model, opt, given):
        grads = jax_tt.grad(lambda m: jnp.sum(m(batch(0)[0]) ** 2))(given)
        opt.update(model, grads)

    if jit:
        step = nnx.jit(step)
    with pytest.raises(ValueError, match="model is not the one that the optimizer was made for"):
        step(model, of_part, model)
    with pytest.raises(ValueError, match="model is not the one that the optimizer was made for"):
        step(part, of_whole, part)
    with pytest.raises(ValueError, match=r"grads hold .*, which model lacks"):
        step(model, of_whole, part)
    if isinstance(model, Tower):
        model.other = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"does not know: other\.bias, other\.kernel"):
            step(model, of_whole, model)
        del model.other
    assert_same(arrays(model), before)


def test_a_table_that_came_later_is_trained():
    model = Pair()
    later, model.second = model.second, jax_tt.EmbedBag(N, D, rngs=nnx.Rngs(2))
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    model.third = later
    opt.update(
        model, jax_tt.grad(lambda m: jnp.sum(m(batch(0)[0]) + m.third(batch(0)[0])[:, :2]))(model)
    )
    assert float(model.third.step[...]) == 1 == float(model.first.step[...])


# --- Checkpoints


@pytest.mark.optimized
def test_orbax_round_trip_continues_bit_equal(tmp_path):
    def make() -> tuple[Tower, jax_tt.FusedOptimizer]:
        model = Tower("bag", optimizers.Adam(0.05))
        return model, jax_tt.FusedOptimizer(model, optax.sgd(0.1, momentum=0.9))

    model, opt = make()
    for k in range(3):
        train_step(model, opt, *batch(k))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(nnx.state((model, opt))))
        for k in range(3, 5):
            train_step(model, opt, *batch(k))
        checkpointer.wait_until_finished()
        graphdef, abstract = nnx.split(nnx.eval_shape(make))
        restored = checkpointer.restore(tmp_path / "state", nnx.to_pure_dict(abstract))
    nnx.replace_by_pure_dict(abstract, restored)
    again, again_opt = nnx.merge(graphdef, abstract)
    assert float(again.items.step[...]) == 3
    for k in range(3, 5):
        train_step(again, again_opt, *batch(k))
    assert_same(arrays(again), arrays(model))
