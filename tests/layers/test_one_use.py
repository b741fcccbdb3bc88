"""A loss that looks up a fused table twice, or has a term over it, is refused when it is traced, before a step runs."""

import functools
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
(STACK,) = jax_tt.Collection(TABLES, FEATURES).stacks
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

    step.eval_shape(model)


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
    model = jax_tt.linen.TableEmbed(jax_tt.dense_table(10, 4, optimizer=RULE))
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


def test_lookups_that_are_not_trained_and_several_gradients_are_allowed() -> None:
    def loss(model: Any) -> jax.Array:
        metric = jax.lax.stop_gradient(model(IDS + 1))
        del metric
        return jnp.sum(model(IDS)) + jnp.sum(jax.lax.stop_gradient(model(IDS)))

    trace(loss, layer())
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


# --- Terms over the arrays of a table


class Tower(nnx.Module):
    """A layer, one with a row cache, a collection and ordinary parameters."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        cache = jax_tt.RowCache(8, ways=4)
        self.layer = layer()
        self.cached = jax_tt.TTEmbed(10, 4, tt_ranks=2, optimizer=RULE, cache=cache, rngs=rngs)
        self.tables = jax_tt.EmbedCollection(TABLES, FEATURES, rngs=rngs)
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self) -> jax.Array:
        rows = self.layer(IDS) + self.cached(IDS)
        return jnp.sum(self.head(rows)) + sum(map(jnp.sum, self.tables(BATCH).values()))


@functools.cache
def tower() -> Tower:
    """Only traced, and so the same for all tests."""
    return Tower()


def penalty(variables: Any, reached: Any) -> Any:
    """As libraries of other frameworks have it: over all variables, or all matrices among them, or those of a name."""
    leaves = jax.tree.leaves_with_path(variables)
    floats = [(str(path), x) for path, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return 1e-5 * sum(jnp.sum(x**2) for path, x in floats if reached(path, x))


REACHED = {
    "all variables": lambda path, x: True,
    "matrices": lambda path, x: x.ndim >= 2,
    "the cached rows": lambda path, x: "cache_rows" in path,
    "one stack of a collection": lambda path, x: STACK in path,
}


@pytest.mark.parametrize("name", REACHED)
def test_a_penalty_over_fused_tables(name: str) -> None:
    def penalised(model: Any) -> Any:
        return model() + penalty(nnx.state(model), REACHED[name])

    words = r"(?s)not only through one lookup.*nnx\.Param.*weight_decay.*coefficient of 0"
    with pytest.raises(ValueError, match=words):
        trace(penalised, tower())


def test_the_error_names_the_arrays_of_the_table() -> None:
    def norm(model: Any) -> Any:
        return jnp.sum(model.layer.embedding[...] ** 2)

    with pytest.raises(ValueError, match=r"depends on layer\.embedding of fused tables"):
        trace(lambda model: model() + norm(model), tower())


def test_terms_without_a_gradient_and_over_ordinary_parameters_are_allowed() -> None:
    def loss(model: Any) -> Any:
        norm = jnp.sum(jax.lax.stop_gradient(model.layer.embedding[...]) ** 2)
        return model() + norm + penalty(nnx.state(model, nnx.Param), REACHED["all variables"])

    trace(loss, tower())


def test_linen_penalties() -> None:
    model = jax_tt.linen.TableEmbed(jax_tt.dense_table(10, 4, optimizer=RULE))
    variables = jax.jit(model.init)(jax.random.key(0), IDS)

    def loss(variables: Any, name: str) -> Any:
        rows: Any = model.apply(variables, IDS)
        return jnp.sum(rows) + penalty(variables, REACHED[name])

    with pytest.raises(ValueError, match=r"not only through one lookup.*variables\['params'\]"):
        jax_tt.linen.grad(loss)(variables, "all variables")


# --- Arrays of a table without a lookup, such as output weights


READS: dict[str, Any] = {
    "layer.embedding": lambda model: model.layer.embedding[...].T,
    f"tables.stacks.{STACK}.embedding": lambda model: model.tables.tables["a"].embedding.T,
    "cached.core_0": lambda model: model.cached.cores[0].reshape(4, -1),
    "cached.cache_rows": lambda model: model.cached.state()["cache_rows"].reshape(4, -1),
}


@pytest.mark.parametrize("name", READS)
def test_output_weights_without_a_lookup(name: str) -> None:
    def logits(model: Any) -> Any:
        return model.head(jnp.ones((2, 4))) @ READS[name](model)

    def loss(model: Any) -> Any:
        return jnp.sum(logits(model))

    with pytest.raises(ValueError, match=rf"reads {name} of fused.*optimizer=None.*stop_gradient"):
        trace(loss, tower())
    trace(lambda model: jnp.sum(jax.lax.stop_gradient(logits(model))), tower())


def test_metrics_of_a_table_without_a_lookup() -> None:
    def metric(model: Any) -> jax.Array:
        return jnp.sum(jax.lax.stop_gradient(model.layer.embedding[...]))

    def loss(model: Any) -> Any:
        hidden = jnp.sum(model.head(jnp.ones((2, 4))))
        within = jax.lax.cond(hidden > 0, lambda: metric(model), lambda: 1.0)
        summed, _ = jax.lax.scan(
            lambda total, x: (total + x * metric(model), None), within, jnp.ones(3)
        )
        return hidden * jnp.sum(summed)

    trace(loss, tower())


def test_linen_output_weights_without_a_lookup() -> None:
    model = jax_tt.linen.TableEmbed(jax_tt.dense_table(10, 4, optimizer=RULE))
    variables = jax.jit(model.init)(jax.random.key(0), IDS)

    def loss(variables: Any) -> Any:
        return jnp.sum(variables["_overwrite_with_gradient"]["embedding"] ** 2)

    with pytest.raises(ValueError, match=r"reads embedding of fused tables"):
        jax_tt.linen.grad(loss)(variables)
    assert jax_tt.linen.grad(lambda v: jax.lax.stop_gradient(loss(v)))(variables).params == {}
