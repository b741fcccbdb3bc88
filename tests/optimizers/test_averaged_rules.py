"""Rules that average a whole table now and then, against float64 over 20 steps, in layers and collections."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from jax_tt import Bags, optimizers
from tests.conftest import WAYS
from tests.helpers import f64, fused
from tests.optimizers.rule_models import rowwise_adagrad
from tests.optimizers.test_rules import ROWS, batches, cores, gradients, table_gradient

COLUMNS = 34
RATE = {"learning_rate": 0.05, "eps": 0.5}
ENSEMBLE = functools.partial(optimizers.EnsembleRowWiseAdagrad, **RATE)
IN_PLACE = functools.partial(optimizers.EMAInPlaceRowWiseAdagrad, **RATE)


def ensemble_before(rule, t, values, average):
    """What FBGEMM does at the beginning of the forward pass of step ``t``, counted from 1; in place."""
    if t % rule.average_every == 0:
        decay = 0.0 if t <= max(rule.start, rule.average_every, 2) else rule.decay
        average[...] = average + (1 - decay) * (values - average)
    if t % rule.swap_every == 0:
        values[...] = average


def in_place_before(rule, t, values, average):
    del average
    if t % rule.average_every == 0 and t >= rule.start:
        half = values.shape[1] // 2
        values[:, half:] += rule.rate * (values[:, :half] - values[:, half:])


RULES = {
    "ensemble": (ENSEMBLE(average_every=3, swap_every=6, start=7, decay=0.7), ensemble_before),
    "ensemble_shifted": (ENSEMBLE(average_every=2, swap_every=5, decay=0.4), ensemble_before),
    "ensemble_decayed": (
        ENSEMBLE(average_every=4, swap_every=4, weight_decay=0.1, weight_decay_mode="l2"),
        ensemble_before,
    ),
    "in_place": (IN_PLACE(average_every=3, start=6, rate=0.6), in_place_before),
    "in_place_limited": (IN_PLACE(average_every=2, rate=0.9, max_norm=1.0), in_place_before),
}


def start():
    return jnp.asarray(np.random.default_rng(2).normal(size=(ROWS, COLUMNS)) / 4, jnp.float32)


@functools.cache
def stepper(name, method):
    table, _ = fused(start(), RULES[name][0])

    def loss(state, ids, offsets, g):
        bags = Bags(ids, offsets)
        return jnp.sum(jax_tt.lookup_bags(table, state, bags, method=method)[0] * g)

    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("name", RULES)
def test_20_steps_are_those_of_the_formula(name, method):
    rule, before = RULES[name]
    model = rowwise_adagrad(rule)
    _, state = fused(start(), rule)
    values, total, average = f64(start()), np.zeros(ROWS), np.zeros((ROWS, COLUMNS))
    g = gradients(COLUMNS)
    for t, batch in enumerate(batches(20), start=1):
        before(rule, t, values, average)
        gradient = table_gradient(batch, g, ROWS)
        for i in np.unique(batch[0]):
            values[i], (total[i],) = model(values[i], gradient[i], [total[i]], t)
        state = stepper(name, method)(state, *batch, jnp.float32(g))
    # The table is ready for the next step.
    before(rule, 21, values, average)
    np.testing.assert_allclose(state["embedding"], values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state["slot_sum_0"], total, rtol=1e-4, atol=1e-5)
    if before is ensemble_before:
        np.testing.assert_allclose(state["slot_average_0"], average, rtol=1e-5, atol=1e-5)
    assert state["step"] == 20 and state["sentinel"] == 1


@pytest.mark.parametrize(("dtype", "stochastic"), [("bfloat16", True), ("float16", False)])
def test_averages_of_16_bit_tables_move_at_small_rates(dtype, stochastic):
    """By less than half a unit in the last place in every step, which only stochastic rounding keeps."""
    rule = optimizers.EMAInPlaceRowWiseAdagrad(0.0, average_every=1, rate=1e-4)
    rows = jnp.concatenate([jnp.full((2, 64), 2.0), jnp.ones((2, 64))], axis=1).astype(dtype)
    table, state = fused(rows, rule, stochastic_rounding=stochastic)

    def loss(state):
        return jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[0]]), dtype="float32")[0])

    state = jax.lax.fori_loop(0, 1000, lambda _, state: jax.grad(loss)(state), state)
    moved = f64(state["embedding"])[:, 64:].mean() - 1
    # 999 averages: before the first step there is none.
    assert abs(moved - (1 - (1 - 1e-4) ** 999)) < 0.02 if stochastic else moved == 0


@pytest.mark.parametrize(
    "rule",
    [
        ENSEMBLE(average_every=1, swap_every=2, decay=0.5),
        IN_PLACE(average_every=1, rate=0.5),
    ],
)
def test_a_step_that_is_not_taken_changes_nothing(rule):
    table, state = fused(start(), rule, skip_nonfinite=True)

    def loss(state, factor):
        return factor * jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[1, 2]]))[0])

    step = jax.jit(jax.grad(loss))
    for _ in range(2):
        state = step(state, 1.0)
    skipped = step(state, jnp.inf)
    for a, b in zip(jax.tree.leaves(skipped), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_collections_and_layers_take_the_same_steps():
    rule, sgd = RULES["ensemble"][0], optimizers.SGD(0.1)
    ids = {"own": np.array([[1, 5], [5, 5]]), "other": np.array([[1], [2]])}
    tables = {
        "own": jax_tt.dense_table(50, 8, optimizer=rule),
        "other": jax_tt.dense_table(50, 4, optimizer=sgd),
    }
    features = {key: jax_tt.Feature(key) for key in tables}
    embed = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
    layer = jax_tt.EmbedBag(50, 8, optimizer=rule, rngs=nnx.Rngs(0))
    # A copy, since both are donated.
    layer.embedding[...] = jnp.array(embed.tables["own"].embedding[...], copy=True)
    opts = [jax_tt.FusedOptimizer(model, optax.sgd(0.1)) for model in (embed, layer)]

    def total(rows):
        return jnp.sum(jnp.sin(rows["own"])) + jnp.sum(jnp.sin(rows["other"]))

    @nnx.jit
    def both(embed, layer, first, second):
        first.update(embed, jax_tt.grad(lambda m: total(m(ids)))(embed))
        second.update(layer, jax_tt.grad(lambda m: jnp.sum(jnp.sin(m(ids["own"]))))(layer))

    for _ in range(6):
        both(embed, layer, *opts)
    own, alone = embed.tables["own"].state(), layer.state()
    for array in ("embedding", "slot_sum_0", "slot_average_0"):
        np.testing.assert_allclose(own[array], alone[array], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["ensemble", "in_place"])
@pytest.mark.parametrize("method", WAYS[1:], indirect=True)
def test_the_program_has_no_copy_of_the_table(name, method):
    rule = RULES[name][0]
    table, state = fused(jnp.ones((1237, 24)), rule)

    def loss(state):
        ids = jnp.array([[1, 5], [5, 7]])
        return jnp.sum(jnp.sin(jax_tt.lookup_bags(table, state, ids, method=method)[0]))

    step = jax.jit(jax.grad(loss), donate_argnums=0)
    program = str(step.lower(state).compile().as_text())
    assert not re.findall(r"= f32\[1237(,24)?\][^ ]* copy", program)


def test_what_does_not_fit_is_refused():
    for rule in (RULES["ensemble"][0], RULES["in_place"][0]):
        with pytest.raises(TypeError, match=r"it is for dense tables\. Averages of the cores"):
            fused(cores(), rule)
    with pytest.raises(ValueError, match="features: got 7; EMAInPlaceRowWiseAdagrad needs an even"):
        jax_tt.dense_table(10, 7, optimizer=RULES["in_place"][0])
    with pytest.raises(ValueError, match="average_every"):
        ENSEMBLE(average_every=0)
    for decay in (-1.0, 7.0):
        with pytest.raises(ValueError, match=r"decay: got .*; expected a number in \[0, 1\]"):
            ENSEMBLE(decay=decay)
    for decay in (jnp.float32(0.5), True):
        with pytest.raises(TypeError, match=r"decay: got .*; expected a number, since it is part"):
            ENSEMBLE(decay=decay)
    with pytest.raises(ValueError, match=r"rate: got 5\.0; expected a number in \[0, 1\]"):
        IN_PLACE(rate=5.0)
    with pytest.raises(ValueError, match="swap_every: got 4; expected at least average_every, 10"):
        ENSEMBLE(average_every=10, swap_every=4)


@pytest.mark.parametrize("every", [1, 3])
def test_a_table_that_is_not_trained_keeps_its_size(every):
    """Neither the first average nor later ones contain the zeros that the slot starts with."""
    rule = optimizers.EnsembleRowWiseAdagrad(0.0, average_every=every, swap_every=5)
    table, state = fused(jnp.ones((4, 2)), rule)

    def loss(state):
        return jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[0]]))[0])

    state = jax.lax.fori_loop(0, 20, lambda _, state: jax.grad(loss)(state), state)
    np.testing.assert_array_equal(state["embedding"], 1)
