"""Weight decay that makes up for missed steps when a row is read, against float64 over 20 steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from jax_tt import Bags, optimizers
from tests.helpers import f64, fused
from tests.optimizers.test_rules import BAGS, COLUMNS, ROWS, batches, cores, gradients, rows

RULES = {
    "plain": optimizers.GlobalDecayRowWiseAdagrad(0.1, eps=0.5, weight_decay=1.0),
    "bounded": optimizers.GlobalDecayRowWiseAdagrad(
        0.2, eps=0.5, weight_decay=1.0, lower_bound=0.6
    ),
    "late": optimizers.GlobalDecayRowWiseAdagrad(0.1, eps=0.5, weight_decay=1.0, start=8.0),
}


class Model:
    """The table in float64."""

    def __init__(self, rule):
        self.rule = rule
        self.keep = 1 - rule.learning_rate * rule.weight_decay
        self.values, self.total, self.last = f64(rows()), np.zeros(ROWS), np.zeros(ROWS)

    def late(self, t):
        missed = np.maximum(t - self.last - 1, 0)
        decay = np.maximum(self.rule.lower_bound, self.keep**missed)
        return np.where((self.last == 0) | (t < self.rule.start), 1.0, decay)

    def step(self, gradient, touched, t):
        late = self.late(t)
        for i in touched:
            self.total[i] += np.mean(gradient[i] ** 2)
            rate = self.rule.learning_rate / (np.sqrt(self.total[i]) + self.rule.eps)
            self.values[i] = self.keep * late[i] * self.values[i] - rate * gradient[i]
            if t >= self.rule.start:
                self.last[i] = t


def sparse_batches(count):
    """Batches in which rows miss several steps, some of them being in every third batch only."""
    rng = np.random.default_rng(5)
    for t, (ids, offsets) in enumerate(batches(count)):
        ids = np.where(rng.random(len(ids)) < 0.1, 3 * rng.integers(1, 9, len(ids)) + t % 3, ids)
        yield ids.astype(np.int32), offsets


@functools.cache
def stepper(name, method):
    table, _ = fused(rows(), RULES[name])

    def loss(state, weights, ids, offsets, g):
        bags = Bags(ids, offsets, weights)
        pooled, _ = jax_tt.lookup_bags(table, state, bags, method=method)
        return jnp.sum(pooled * g), pooled

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("name", RULES)
def test_20_steps_are_those_of_the_formula(name, method):
    model = Model(RULES[name])
    _, state = fused(rows(), RULES[name])
    g, rng = gradients(COLUMNS), np.random.default_rng(4)
    scaled = 0
    for t, (ids, offsets) in enumerate(sparse_batches(20), start=1):
        weights = rng.integers(1, 5, len(ids)) / 4
        bag = np.repeat(np.arange(BAGS), np.diff(offsets))
        read = model.late(t)[:, None] * model.values
        scaled += np.any(model.late(t)[ids] < 0.99)
        want = np.zeros((BAGS, COLUMNS))
        np.add.at(want, bag, weights[:, None] * read[ids])
        gradient = np.zeros((ROWS, COLUMNS))
        np.add.at(gradient, ids, weights[:, None] * g[bag])
        dweights = np.sum(read[ids] * g[bag], axis=1)
        (state, got), pooled = stepper(name, method)(
            state, jnp.float32(weights), ids, offsets, jnp.float32(g)
        )
        np.testing.assert_allclose(pooled, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got, dweights, rtol=1e-4, atol=1e-5)
        model.step(gradient, np.unique(ids), t)
    assert scaled > 5, "rows miss steps"
    np.testing.assert_allclose(state["embedding"], model.values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state["slot_sum_0"], model.total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["slot_last_step_0"], model.last, rtol=1e-4, atol=1e-5)
    assert state["step"] == 20 and state["sentinel"] == 1


def used_twice(rule, **options):
    """A layer whose row 1 has missed two steps, and whose row 2 has not."""
    layer = jax_tt.EmbedBag(10, 4, optimizer=rule, rngs=nnx.Rngs(0), **options)
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))

    @nnx.jit
    def step(layer, opt, ids):
        opt.update(layer, jax_tt.grad(lambda m: jnp.sum(m(ids)))(layer))

    for ids in ([[1]], [[2]], [[2]]):
        step(layer, opt, np.array(ids, np.int32))
    return layer


@pytest.mark.parametrize("combiner", ["mean", "max"])
def test_lookups_decay_in_training_alone(combiner):
    rule = RULES["plain"]
    layer = used_twice(rule, combiner=combiner)
    stored = layer.embedding[...]
    ids = jnp.array([[1], [2], [3]])
    # The learning rate and the decay are 0.1 and 1, and row 3 was never used.
    want = stored[ids[:, 0]] * jnp.array([[0.9**2], [1.0], [1.0]])
    np.testing.assert_allclose(layer(ids), want, rtol=1e-6)
    layer.eval()
    np.testing.assert_array_equal(layer(ids), stored[ids[:, 0]])


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_in_a_collection_it_reads_and_steps_as_alone(layout):
    rule, ids = RULES["plain"], np.array([[1, 5], [5, 5]])
    tables = {
        "own": jax_tt.dense_table(50, 8, optimizer=rule),
        "other": jax_tt.dense_table(50, 4, optimizer=optimizers.SGD(0.1)),
    }
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})
    state = jax.jit(collection.init)(jax.random.key(0))
    table, alone = fused(jnp.array(state["own"]["embedding"]), rule)

    @jax.jit
    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            out = jax_tt.lookup_features(collection, arrays, batch, layout=layout)[0]
            if layout == "concatenated":
                out = {"own": out[:, :8], "other": out[:, 8:]}
            return sum(jnp.sum(jnp.sin(rows)) for rows in out.values()), out["own"]

        grads, out = jax.grad(loss, has_aux=True)(collection.trained(state))
        return collection.overwritten(state, grads)[0], out

    @jax.jit
    def step_alone(state, ids):
        def loss(state):
            out, _ = jax_tt.lookup_bags(table, state, ids)
            return jnp.sum(jnp.sin(out)), out

        return jax.grad(loss, has_aux=True)(state)

    for shift in (0, 1, 0, 2, 0):
        state, got = step(state, {"own": ids + shift, "other": ids})
        alone, want = step_alone(alone, ids + shift)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(state["own"]["embedding"], alone["embedding"], rtol=1e-6)
    np.testing.assert_allclose(state["own"]["slot_last_step_0"], alone["slot_last_step_0"])


def test_the_program_has_no_copy_of_the_table():
    table, state = fused(jnp.ones((1237, 24)), RULES["plain"])

    def loss(state):
        return jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[1, 5]]))[0])

    step = jax.jit(jax.grad(loss), donate_argnums=0)
    program = str(step.lower(state).compile().as_text())
    assert not [line for line in program.split("\n") if "f32[1237" in line and " copy(" in line]


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="GlobalDecayRowWiseAdagrad; it is for dense tables"):
        fused(cores(), RULES["plain"])
    with pytest.raises(ValueError, match=r"lower_bound: got 2\.0"):
        dataclasses.replace(RULES["plain"], lower_bound=2.0)
