"""Every fused rule against float64, with duplicate ids, zero gradients and zero rows."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from tests.conftest import WAYS
from tests.helpers import SHAPES, core_gradients, f64, fused, on_cpu, skip_unless_stored
from tests.optimizers.rule_models import RULES

SHAPE = SHAPES["d3"]
# Two passes over the columns on a GPU, the second of one column.
ROWS, COLUMNS = 30, 33
BAGS, POSITIONS = 6, 128
# Ids of the last bag, whose gradient is zero; the first of them is a row of zeros.
QUIET, ZEROS = (1, 2), (0, 1)


def cores():
    rng = np.random.default_rng(3)
    return tuple(
        jnp.asarray(rng.normal(size=shape) / 2, jnp.float32) for shape in SHAPE.core_shapes
    )


def rows():
    start = np.random.default_rng(2).normal(size=(ROWS, COLUMNS)) / 4
    start[ZEROS,] = 0
    return jnp.asarray(start, jnp.float32)


def batches(count):
    """Bags with a few ids many times, one of them so often that a GPU gives it a block of its own."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        hot = rng.integers(3, ROWS, 5)
        ids = rng.choice(np.append(hot, 0), POSITIONS - len(QUIET), p=(0.7, *[0.06] * 5))
        offsets = [*sorted(rng.integers(0, len(ids) + 1, BAGS - 2)), len(ids), POSITIONS]
        yield np.append(ids, QUIET).astype(np.int32), np.array([0, *offsets], np.int32)


def gradients(features):
    # Exactly representable; the rows that are read most often get gradients of about 1.
    g = np.random.default_rng(1).integers(-8, 9, (BAGS, features)) / 128
    g[-1] = 0
    return g


@functools.cache
def stepper(name, method):
    """One program for a rule and method: a step of both kinds of tables, with hyper-parameters as arrays."""
    tables = [fused(start, RULES[name][0])[0] for start in (rows(), cores())]

    @jax.jit
    def step(dense, tt, ids, offsets, g_dense, g_tt, given):
        bags, options = jax_tt.Bags(ids, offsets), {"method": method, "hyperparameters": given}

        def loss(states):
            pooled, of_tt = (
                jax_tt.lookup_bags(table, state, bags, **options)[0]
                for table, state in zip(tables, states, strict=True)
            )
            return jnp.sum(pooled * g_dense) + jnp.sum(of_tt * g_tt)

        return jax.grad(loss)((dense, tt))

    return step


def take(name, method, dense, tt, batch, scale=1.0, **given):
    g = [jnp.asarray(scale * gradients(n), jnp.float32) for n in (COLUMNS, SHAPE.features)]
    # The same hyper-parameters are arrays in every call, so that the program is the same.
    eps = {"eps": RULES[name][0].eps} if hasattr(RULES[name][0], "eps") else {}
    given = {key: jnp.float32(value) for key, value in {**eps, **given}.items()}
    return stepper(name, method)(dense, tt, *batch, *g, given)


class Modelled:
    """A table of rows in float64 with its slots."""

    def __init__(self, name, values, slots):
        self.step = RULES[name][1]
        self.shape = values.shape
        self.values = np.array(f64(values)).reshape(values.shape[0], -1)
        self.slots = [np.array(f64(slot)) for slot in slots]

    def update(self, gradient, touched, t):
        gradient = gradient.reshape(self.values.shape)
        for i in touched:
            state = [slot[i] for slot in self.slots]
            self.values[i], new = self.step(self.values[i], gradient[i], state, t)
            for slot, value in zip(self.slots, new, strict=True):
                slot[i] = value

    def check(self, values, slots):
        got = f64(values).reshape(self.values.shape)
        np.testing.assert_allclose(got, self.values, rtol=1e-5, atol=1e-5)
        for own, slot in zip(self.slots, slots, strict=True):
            np.testing.assert_allclose(slot, own, rtol=1e-4, atol=1e-5)


def table_gradient(batch, g, rows):
    ids, offsets = batch
    result = np.zeros((rows, g.shape[1]))
    np.add.at(result, ids, np.repeat(g, np.diff(offsets), axis=0))
    return result


@pytest.mark.parametrize("name", RULES)
def test_20_steps_are_those_of_the_formula(name, method):
    rule, _ = RULES[name]
    (table, dense), (train, tt) = (fused(start, rule) for start in (rows(), cores()))
    model = Modelled(name, dense["embedding"], *table.spec.slots(dense))
    parts = zip(train.spec.params(tt), train.spec.slots(tt), strict=True)
    models = [Modelled(name, *pair) for pair in parts]
    g_dense, g_tt = gradients(COLUMNS), gradients(SHAPE.features)
    for t, batch in enumerate(batches(20), start=1):
        seen = np.unique(batch[0])
        model.update(table_gradient(batch, g_dense, ROWS), seen, t)
        now = tuple(core.values.reshape(core.shape) for core in models)
        of_rows = table_gradient(batch, g_tt, SHAPE.num_embeddings)
        digits = np.unravel_index(seen, SHAPE.row_factors)
        of_cores = core_gradients(now, of_rows)
        for core, gradient, digit in zip(models, of_cores, digits, strict=True):
            core.update(gradient, np.unique(digit), t)
        dense, tt = take(name, method, dense, tt, batch)
    model.check(dense["embedding"], *table.spec.slots(dense))
    parts = zip(models, train.spec.params(tt), train.spec.slots(tt), strict=True)
    for core, got, slots in parts:
        core.check(got, slots)
    assert np.any(f64(dense["embedding"][3:]) != f64(rows()[3:]))
    assert dense["step"] == tt["step"] == 20 and dense["sentinel"] == tt["sentinel"] == 1


@pytest.mark.parametrize("name", RULES)
def test_20_steps_in_jax_are_those_of_the_formula(name):
    """The reference of the native rules, which also steps tables that have none, such as those in float64."""
    rule, _ = RULES[name]
    table, state = fused(rows(), rule)
    values, (slots,) = rows(), table.spec.slots(state)
    model, g = Modelled(name, values, slots), gradients(COLUMNS)

    @jax.jit
    def step(values, slots, gradient, touched, t):
        def kept(new, old):
            return jnp.where(touched.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        new = rule.update_rows(values, gradient, slots, rule.hyperparameters(t))
        return jax.tree.map(kept, new, (values, slots))

    for t, batch in enumerate(batches(20), start=1):
        gradient, seen = table_gradient(batch, g, ROWS), np.unique(batch[0])
        model.update(gradient, seen, t)
        touched = np.isin(np.arange(ROWS), seen)
        values, slots = step(values, slots, gradient.astype(np.float32), touched, np.int32(t - 1))
    model.check(values, slots)


def zero_eps(rule):
    """``eps=0`` for rules that take it: one to which an eps is more than a guard of a divisor refuses 0."""
    if not hasattr(rule, "eps"):
        return {}
    try:
        dataclasses.replace(rule, eps=0.0)
    except ValueError:
        return {}
    return {"eps": 0.0}


# One rule of each native kind: options are numbers, for which no kernel is compiled again.
KINDS = {type(rule): name for name, (rule, _) in RULES.items()}.values()


@pytest.mark.parametrize("name", KINDS)
def test_nothing_becomes_nan_without_gradients(name, method):
    """Zero gradients for rows with and without zeros, with eps = 0, then a gradient for all of them."""
    rule, _ = RULES[name]
    dense, tt = (fused(start, rule)[1] for start in (rows(), cores()))
    zero = zero_eps(rule)
    for scale, batch in zip((0.0, 0.0, 1.0), batches(3), strict=True):
        dense, tt = take(name, method, dense, tt, batch, scale, **zero)
        for leaf in jax.tree.leaves((dense, tt)):
            assert np.all(np.isfinite(f64(leaf)))
    assert np.all(f64(dense["embedding"][1]) == 0)
    assert np.any(f64(dense["embedding"][0]) != 0)


def test_every_rule_has_a_model():
    covered = {type(rule).__name__ for rule, _ in RULES.values()}
    elsewhere = {"GlobalDecayRowWiseAdagrad"}  # in test_global_decay
    known = {rule.__name__ for rule in jax_tt.optimizers.RULES.values()}
    assert known == covered | elsewhere
    for rule, _ in RULES.values():
        rowwise = [slot.rowwise for slot in rule.slots]
        assert rowwise == sorted(rowwise), "slots per entry come first"


def test_a_call_switches_off_terms_that_are_on_but_not_the_other_way_round():
    off = jax_tt.optimizers.RowWiseAdagrad(0.1)
    with pytest.raises(ValueError, match="max_norm would switch on"):
        off.with_hyperparameters({"max_norm": 1.0})
    on = jax_tt.optimizers.Adam(0.1, weight_decay=0.5).with_hyperparameters({"weight_decay": 0.0})
    assert on.kind == jax_tt.optimizers.Adam(0.1, weight_decay=0.5).kind and on.weight_decay == 0
    with pytest.raises(ValueError, match="weight_decay_mode"):
        jax_tt.optimizers.RowWiseAdagrad(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="'decoupled'"):
        jax_tt.optimizers.RowWiseAdagrad(0.1, weight_decay_mode="adamw")


DTYPES = itertools.cycle(["bfloat16", "float32", "float16"])
STORED = list(zip([*KINDS, "global_decay"], DTYPES, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), STORED)
@pytest.mark.parametrize("method", WAYS[2:], indirect=True)
def test_cuda_kernels_of_every_storage_type_step_as_those_of_the_cpu(name, dtype, method):
    """Rows that packets of four numbers fill and others, and slices that are stepped with their sums and after them."""
    rule = optimizers.GlobalDecayRowWiseAdagrad(0.1, weight_decay=1.0)
    rule = RULES[name][0] if name in RULES else rule
    tables = {"wide": rows()[:, :8].astype(dtype), "odd": rows()[:, :5].astype(dtype)}
    if not isinstance(rule, optimizers.ReadsScaled):
        train = tuple(core.astype(dtype) for core in cores())
        tables |= {"at once": train, "afterwards": train}
    made = {
        key: fused(start, rule, skip_nonfinite=key == "afterwards", stochastic_rounding=False)
        for key, start in tables.items()
    }
    states = {key: state for key, (_, state) in made.items()}
    (ids, offsets), *_ = batches(1)
    bags = jax_tt.Bags(ids, offsets)

    def stepped(method):
        def loss(states):
            out = []
            for key, (table, _) in made.items():
                own, _ = jax_tt.lookup_bags(
                    table, states[key], bags, method=method, dtype="float32"
                )
                out.append(jnp.sum(own * gradients(own.shape[1])))
            return sum(out)

        return jax.jit(jax.grad(loss))(states)

    # An entry of 16 bits may be rounded to the other side.
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    with on_cpu():
        want = stepped("native")
    got = stepped(method)
    for key, state in states.items():
        first = made[key][0].spec.param_names[0]
        assert np.any(f64(want[key][first]) != f64(state[first]))
        for a, b in zip(jax.tree.leaves(got[key]), jax.tree.leaves(want[key]), strict=True):
            np.testing.assert_allclose(f64(a), f64(b), rtol=tolerance, atol=tolerance / 10)


@pytest.mark.slow(but="lamb")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["partial_lamb", "rowwise_decoupled", "ftrl", "cow_clip"])
@pytest.mark.parametrize("method", WAYS[1:], indirect=True)
def test_other_storage_takes_the_steps_of_the_reference(name, dtype, method, x64):
    skip_unless_stored(dtype, method)
    rule, _ = RULES[name]
    g = jnp.asarray(gradients(8), jnp.float64 if dtype == "float64" else jnp.float32)

    def steps(method):
        table, state = fused(rows()[:, :8].astype(dtype), rule, stochastic_rounding=False)

        def loss(state, bags):
            out, _ = jax_tt.lookup_bags(table, state, bags, method=method)
            return jnp.sum(out.astype(g.dtype) * g)

        step = jax.jit(jax.grad(loss))
        for ids, offsets in batches(3):
            state = step(state, jax_tt.Bags(ids, offsets))
        return state

    # Slots are float32; an entry of bfloat16 may be rounded to the other side.
    tolerance = 1e-6 if dtype == "float64" else 2e-2
    got, want = steps(method), steps("reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(f64(a), f64(b), rtol=tolerance, atol=tolerance / 10)


def test_what_would_have_no_effect_is_refused():
    for rule in (optimizers.RowWiseAdagrad, optimizers.CounterRowWiseAdagrad, optimizers.CowClip):
        with pytest.raises(ValueError, match="weight_decay: it has no effect"):
            rule(0.1, weight_decay=0.5)
        message = "weight_decay_mode: got 'cosine'; expected one of 'none', 'l2'"
        with pytest.raises(ValueError, match=message):
            rule(0.1, weight_decay_mode="cosine")


def test_tails_need_the_largest_counter():
    for options in (
        {"learning_rate_mode": "tail_id_increase"},
        {"tail_id_threshold_is_ratio": True},
    ):
        with pytest.raises(ValueError, match="max_counter: got None"):
            optimizers.CounterRowWiseAdagrad(0.1, **options)
        optimizers.CounterRowWiseAdagrad(0.1, max_counter=10.0, **options)
