"""Gradients of fused tables that were computed before another update of them, which they would undo."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from tests.helpers import TRAINED
from tests.layers.test_gradients import (
    IDS,
    Tower,
    _arrays,
    assert_same,
    linen_loss,
    linen_state,
    loss,
    optimizer,
)

OUTDATED = (
    r"grads were computed before another update of the fused tables items.*after the previous"
)


@pytest.mark.parametrize("kind", ["dense", "collection"])
@pytest.mark.parametrize("jit", [True, False])
def test_two_gradients_before_two_updates(kind, jit):
    model = Tower(kind)
    opt = optimizer(model)

    def both(model: Any, opt: Any, again: bool) -> None:
        first, second = (jax_tt.grad(loss)(model) for _ in range(2))
        opt.update(model, first)
        opt.update(model, first if again else second)

    run = nnx.jit(both, static_argnums=2) if jit else both
    with pytest.raises(ValueError, match=OUTDATED):
        run(model, opt, False)
    if not jit:  # nothing of the second one is written
        want = Tower(kind)
        optimizer(want).update(want, jax_tt.grad(loss)(want))
        assert_same(_arrays(model, TRAINED), _arrays(want, TRAINED))
    with pytest.raises(ValueError, match=OUTDATED):
        run(model, opt, True)


@pytest.mark.parametrize("jit", [True, False])
def test_linen(jit):
    def both(state: Any) -> Any:
        for grads in [jax_tt.linen.grad(linen_loss)(state.variables) for _ in range(2)]:
            state = state.apply_gradients(grads=grads)
        return state

    with pytest.raises(ValueError, match=OUTDATED):
        (jax.jit(both) if jit else both)(linen_state())


@pytest.mark.parametrize("jit", [True, False])
def test_keys_that_are_inserted_before_the_update(jit):
    """The rows of new keys would be those of the table before."""
    table = jax_tt.hash_table(64, 4, optimizer=jax_tt.optimizers.SGD(0.1))
    keys, more = (
        jax_tt.dynamic.split_keys(np.array([3, 4])),
        jax_tt.dynamic.split_keys(np.array([5, 6])),
    )

    def step(layer: Any, opt: Any, late: bool) -> None:
        layer.insert(keys)
        grads = jax_tt.grad(lambda layer: jnp.sum(layer(keys)))(layer)
        if late:
            layer.insert(more)
        opt.update(layer, grads)

    layer = jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))
    run = nnx.jit(step, static_argnums=2) if jit else step
    run(layer, optimizer(layer), False)
    with pytest.raises(ValueError, match=r"embedding.* changed after grads were computed"):
        run(layer, optimizer(layer), True)


def test_gradients_of_another_model():
    """Rows that the batch does not contain would become rows of the other model."""
    model, other = Tower(), Tower()
    other.items.embedding[...] += 1
    before = _arrays(model, TRAINED)
    grads = jax_tt.grad(loss)(other)
    with pytest.raises(ValueError, match=r"other arrays than items.embedding of this model"):
        optimizer(model).update(model, grads)
    assert_same(_arrays(model, TRAINED), before)
    state = linen_state()
    variables = jax.tree.map(lambda x: x + 1 if x.ndim == 2 else jnp.copy(x), state.variables)
    with pytest.raises(ValueError, match=r"other arrays than .*of this model"):
        state.apply_gradients(grads=jax_tt.linen.grad(linen_loss)(variables))


def test_gradients_of_a_copy():
    model, want = Tower(), Tower()
    copy = nnx.clone(model)
    grads = jax_tt.grad(loss)(copy)
    optimizer(model).update(model, grads)
    optimizer(want).update(want, jax_tt.grad(loss)(want))
    assert_same(_arrays(model, TRAINED), _arrays(want, TRAINED))


# --- What is allowed


def train(steps: Any, jit: bool) -> Any:
    model = Tower()
    (nnx.jit(steps) if jit else steps)(model, optimizer(model))
    return _arrays(model, TRAINED)


def one_after_the_other(model: Any, opt: Any) -> None:
    for _ in range(2):
        opt.update(model, jax_tt.grad(loss)(model))


def with_a_call_between(model: Any, opt: Any) -> None:
    for _ in range(2):
        dropped, grads = (jax_tt.grad(loss)(model) for _ in range(2))
        nnx.jit(lambda model: model(IDS))(model)  # returns copies of all variables
        opt.update(model, grads)
        del dropped


def under_a_condition(model: Any, opt: Any) -> None:
    for _ in range(2):
        value, grads = jax_tt.value_and_grad(loss)(model)

        def update(model: Any, opt: Any, grads: Any = grads) -> None:
            opt.update(model, grads)

        nnx.cond(jnp.isfinite(value), update, lambda model, opt: None, model, opt)


def with_other_modules(model: Any, opt: Any) -> None:
    graphdef, state = nnx.split(model)
    for _ in range(2):
        copy = nnx.merge(graphdef, state)
        opt.update(copy, jax_tt.grad(loss)(copy))
        state = nnx.state(copy)
    nnx.update(model, state)


@pytest.mark.parametrize("steps", [with_a_call_between, under_a_condition, with_other_modules])
@pytest.mark.parametrize("jit", [True, False])
def test_new_gradients_for_every_update(steps, jit):
    got, want = train(steps, jit), train(one_after_the_other, jit)
    assert got["items.step"] == 2
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("jit", [True, False])
def test_linen_states_are_values(jit):
    """Two steps from one state are two states, also where its step is an operand of a condition."""

    def steps(state: Any) -> Any:
        grads = jax_tt.linen.grad(linen_loss)(state.variables)
        first, second = (state.apply_gradients(grads=grads) for _ in range(2))
        third = jax.lax.cond(
            jnp.array(True), lambda s: s.apply_gradients(grads=grads), lambda s: s, state
        )
        return [jax.tree.map(jnp.asarray, s.fused) for s in (first, second, third)]

    first, *others = (jax.jit(steps) if jit else steps)(linen_state())
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


def test_variables_of_numpy():
    """As a checkpoint may have them; scalars of numpy have no weak references."""
    state = linen_state()
    of_numpy = jax.tree.map(lambda x: np.asarray(x)[()], state.fused)
    assert isinstance(of_numpy["items"]["step"], np.float32)
    state = state.replace(fused=of_numpy)
    for number in (1, 2):
        state = state.apply_gradients(grads=jax_tt.linen.grad(linen_loss)(state.variables))
        assert state.fused["items"]["step"] == number


def test_what_the_trace_does_not_show_is_refused_by_the_sentinel():
    """Both updates are in a branch, whose operands are not what the gradients were computed from."""
    model = Tower()

    @nnx.jit
    def both(model: Any, opt: Any) -> None:
        first, second = (jax_tt.grad(loss)(model) for _ in range(2))

        def update(model: Any, opt: Any, grads: Any) -> None:
            opt.update(model, grads)

        for grads in (first, second):
            nnx.cond(
                jnp.array(True),
                lambda model, opt, grads=grads: update(model, opt, grads),
                lambda model, opt: None,
                model,
                opt,
            )

    both(model, optimizer(model))
    assert np.isnan(model.items.sentinel[...])


def test_models_whose_arrays_are_of_numpy():
    model, want = Tower(), Tower()
    nnx.update(model, jax.tree.map(np.asarray, nnx.state(model)))
    for tower in (model, want):
        opt = optimizer(tower)
        for _ in range(2):
            opt.update(tower, jax_tt.grad(loss)(tower))
    assert_same(_arrays(model, TRAINED), _arrays(want, TRAINED))
