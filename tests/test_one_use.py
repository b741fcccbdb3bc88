"""A loss that looks up a fused table twice is refused when it is traced, before a step runs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen

RULE = jax_tt.optimizers.SGD(0.1)
IDS = jnp.array([[1, 2], [3, 4]])
TABLES = {
    "a": jax_tt.dense_table(10, 4, optimizer=RULE),
    "b": jax_tt.dense_table(8, 4, optimizer=RULE),
}
FEATURES = {name: jax_tt.Feature(name) for name in TABLES}
BATCH = dict.fromkeys(TABLES, IDS)
REFUSED = pytest.raises(ValueError, match="the loss looks up this fused table more than once")


def layer() -> Any:
    return jax_tt.Embed(10, 4, optimizer=RULE, rngs=nnx.Rngs(0))


def trace(loss: Any, model: Any, times: int = 1) -> None:
    """Traces the gradient without running it."""

    @nnx.jit
    def step(model: Any) -> jax.Array:
        for _ in range(times):
            jax_tt.grad(loss)(model)
        return jnp.zeros(())

    step.lower(model)


def test_two_lookups_of_a_layer() -> None:
    with REFUSED:
        trace(lambda model: jnp.sum(model(IDS) * model(IDS + 1)), layer())
    with REFUSED:  # also eagerly, before the update
        jax_tt.value_and_grad(lambda model: jnp.sum(model(IDS) * model(IDS + 1)))(layer())


def test_two_calls_of_a_collection() -> None:
    embed = jax_tt.EmbedCollection(TABLES, FEATURES, rngs=nnx.Rngs(0))
    trace(lambda embed: jnp.sum(embed.concatenated(BATCH)), embed)
    with REFUSED:
        trace(lambda embed: sum(jnp.sum(embed(BATCH)[name]) for name in TABLES), embed)


def test_linen() -> None:
    model = jax_tt.linen.Embed(10, 4, optimizer=RULE)
    variables = jax.jit(model.init)(jax.random.key(0), IDS)

    def loss(variables: Any, times: int) -> Any:
        rows: list[Any] = [model.apply(variables, IDS) for _ in range(times)]
        return sum(map(jnp.sum, rows))

    grad = jax.jit(
        lambda variables, times: jax_tt.linen.value_and_grad(loss)(variables, times)[0],
        static_argnums=1,
    )
    grad.lower(variables, 1)
    with REFUSED:
        grad.lower(variables, 2)


def test_lookups_that_are_not_trained_are_allowed() -> None:
    def loss(model: Any) -> jax.Array:
        metric = jax.lax.stop_gradient(model(IDS + 1))
        del metric
        return jnp.sum(model(IDS)) + jnp.sum(jax.lax.stop_gradient(model(IDS)))

    trace(loss, layer())


def test_several_gradients_of_one_state_are_allowed() -> None:
    trace(lambda model: jnp.sum(model(IDS)), layer(), times=2)


def test_equal_layers_are_not_the_same() -> None:
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.left, self.right = layer(), layer()

    trace(lambda model: jnp.sum(model.left(IDS) * model.right(IDS)), Two())
    model = Two()
    model.right = model.left  # one layer in two places
    with REFUSED:
        trace(lambda model: jnp.sum(model.left(IDS) * model.right(IDS)), model)
