"""Rules in plain JAX, `Custom` and `RowGradients`: against float64, in layers, in collections and in programs."""

import re
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt import Bags, optimizers
from tests.helpers import SHAPES, core_gradients, f64, fused
from tests.optimizers.test_rules import (
    COLUMNS,
    ROWS,
    batches,
    cores,
    gradients,
    rows,
    table_gradient,
)

SHAPE = SHAPES["d3"]
RATE, EPS = 0.05, 0.5


def momentum_adagrad(rows, gradients, slots, step):
    total = slots["total"] + jnp.mean(gradients * gradients, axis=1)
    momentum = 0.5 * slots["momentum"] + gradients / (jnp.sqrt(total) + EPS)[:, None]
    rate = RATE / (1 + 0.1 * step)
    return rows - rate * momentum, {"total": total, "momentum": momentum}


RULE = optimizers.Custom(momentum_adagrad, slots={"momentum": "entry", "total": "row"})
# The same as a rule with native ops, for what only has to agree with these.
SGD = optimizers.SGD(0.1)


def plain_sgd(rows, gradients, slots, step):
    return rows - 0.1 * gradients, {}


PLAIN_SGD = optimizers.Custom(plain_sgd)


def model_step(values, slots, gradient, touched, t):
    """One step in float64 of the rows ``touched`` of ``values`` ``[R, W]``, in place."""
    momentum, total = slots
    for i in touched:
        total[i] += np.mean(gradient[i] ** 2)
        momentum[i] = 0.5 * momentum[i] + gradient[i] / (np.sqrt(total[i]) + EPS)
        values[i] -= RATE / (1 + 0.1 * (t - 1)) * momentum[i]


def test_20_steps_are_those_of_the_formula(method):
    (table, dense), (train, tt) = (fused(start, RULE) for start in (rows(), cores()))

    @jax.jit
    def step(dense, tt, ids, offsets, g_dense, g_tt):
        def loss(states):
            pairs = zip((table, train), states, (g_dense, g_tt), strict=True)
            return sum(
                jnp.sum(jax_tt.lookup_bags(of, state, Bags(ids, offsets), method=method)[0] * g)
                for of, state, g in pairs
            )

        return jax.grad(loss)((dense, tt))

    g_dense, g_tt = gradients(COLUMNS), gradients(SHAPE.features)
    values = f64(dense["embedding"])
    slots = [f64(slot) for slot in table.spec.slots(dense)[0]]
    shapes = [core.shape for core in train.spec.params(tt)]
    flat = [f64(core).reshape(core.shape[0], -1) for core in train.spec.params(tt)]
    core_slots = [[f64(slot) for slot in own] for own in train.spec.slots(tt)]
    for t, batch in enumerate(batches(20), start=1):
        seen = np.unique(batch[0])
        model_step(values, slots, table_gradient(batch, g_dense, ROWS), seen, t)
        now = tuple(f.reshape(shape) for f, shape in zip(flat, shapes, strict=True))
        of_cores = core_gradients(now, table_gradient(batch, g_tt, SHAPE.num_embeddings))
        digits = np.unravel_index(seen, SHAPE.row_factors)
        for own, own_slots, g, digit in zip(flat, core_slots, of_cores, digits, strict=True):
            model_step(own, own_slots, g.reshape(own.shape), np.unique(digit), t)
        dense, tt = step(dense, tt, *batch, jnp.float32(g_dense), jnp.float32(g_tt))
    np.testing.assert_allclose(dense["embedding"], values, rtol=1e-5, atol=1e-5)
    for got, want in zip(table.spec.slots(dense)[0], slots, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for core, own in zip(train.spec.params(tt), flat, strict=True):
        np.testing.assert_allclose(core.reshape(own.shape), own, rtol=1e-5, atol=1e-5)
    assert dense["step"] == 20 and dense["sentinel"] == 1


def stepped(rule, bags, **options):
    table, state = fused(rows(), rule)

    def loss(state, weights):
        given = Bags(bags.ids, bags.offsets, weights, bags.padded)
        out, _ = jax_tt.lookup_bags(table, state, given, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    argnums = (0, 1) if bags.weights is not None else 0
    found = jax.jit(jax.grad(loss, argnums))(state, bags.weights)
    return found if bags.weights is not None else (found, None)


BATCHES = {
    "weighted": Bags.from_ragged([[5, 29, 5], [], [1]], [[1.0, 2.0, -1.0], [], [0.5]]),
    "padded": Bags.from_padded(np.array([[1, 28, -1], [3, 3, 3], [-1, -1, -1]], np.int8)),
    "no ids": Bags(jnp.zeros(0, jnp.int32), jnp.zeros(4, jnp.int32)),
    "out of range": Bags.from_ragged([[-7, 29, 30], [29, 2_000_000_000]]),
}
BATCHES["moved into the table"] = BATCHES["out of range"]
BOUNDS = {"out of range": "zero", "moved into the table": "clip"}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("combiner", ["sum", "max"])
def test_it_takes_the_steps_of_a_native_rule(name, combiner):
    bags = BATCHES[name]
    if combiner == "max" and bags.weights is not None:
        pytest.skip("maxima have no weights")
    options = {"bounds": BOUNDS.get(name, "error"), "combiner": combiner}
    (got, dweights), (want, wanted) = (stepped(rule, bags, **options) for rule in (PLAIN_SGD, SGD))
    np.testing.assert_allclose(got["embedding"], want["embedding"], rtol=1e-6, atol=1e-7)
    assert got["step"] == want["step"] and got["sentinel"] == want["sentinel"]
    if wanted is not None and dweights is not None:
        np.testing.assert_allclose(dweights, wanted, rtol=1e-5)


def test_options_of_the_update_apply():
    table, state = fused(rows(), PLAIN_SGD)
    skips, _ = fused(rows(), PLAIN_SGD, skip_nonfinite=True)
    bags = Bags.from_ragged([[1, 2], [1]])

    def step(table, factor, **options):
        def loss(state, factor):
            return factor * jnp.sum(jax_tt.lookup_bags(table, state, bags, **options)[0])

        return jax.jit(jax.grad(loss))(state, factor)

    whole, scaled = step(table, 1.0), step(table, 8.0, grad_scale=8.0)
    np.testing.assert_array_equal(whole["embedding"], scaled["embedding"])
    skipped = step(skips, jnp.inf)
    np.testing.assert_array_equal(skipped["embedding"], state["embedding"])
    assert skipped["step"] == 0 and skipped["sentinel"] == 1


def test_16_bit_tables_are_rounded_stochastically():
    rows = jnp.ones((2000, 8), jnp.bfloat16)
    rule = optimizers.Custom(tiny_steps)
    ids = jnp.arange(2000)[:, None]

    def step(ids, **options):
        table, state = fused(rows, rule, **options)

        def loss(state):
            return jnp.sum(jax_tt.lookup_bags(table, state, ids)[0].astype(jnp.float32))

        return jax.jit(jax.grad(loss))(state)["embedding"]

    moved = f64(step(ids))
    assert abs(np.mean(moved) - (1 - 1e-3)) < 1e-4
    # The bits are those of the row, wherever the batch has it.
    part = f64(step(ids[1000:]))
    np.testing.assert_array_equal(part[1000:], moved[1000:])
    assert np.all(f64(step(ids, stochastic_rounding=False)) == 1)


def test_slots_beside_16_bit_rows_stay_float32():
    rule = optimizers.Custom(counting_steps, slots={"sum": "entry", "uses": "row"})
    table, state = fused(jnp.ones((9, 4), jnp.bfloat16), rule)

    def loss(state):
        ids = jnp.array([[1, 2, 1]])
        return jnp.sum(jax_tt.lookup_bags(table, state, ids)[0].astype(jnp.float32))

    ((sums, uses),) = table.spec.slots(jax.jit(jax.grad(loss))(state))
    assert sums.dtype == uses.dtype == jnp.float32
    assert sums[:4, 0].tolist() == [0, 2, 1, 0]
    assert uses[:4].tolist() == [0, 1, 1, 0]


def counting_steps(rows, gradients, slots, step):
    return rows - gradients, {"sum": slots["sum"] + gradients, "uses": slots["uses"] + 1}


def tiny_steps(rows, gradients, slots, step):
    return rows - 1e-3 * gradients, {}


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_sum_their_gradients(check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, ROWS, (16, 5)))
    g = jnp.asarray(np.random.default_rng(1).integers(-8, 9, (16, 1)) / 8, jnp.float32)

    table, state = fused(rows(), RULE)

    def step(state, ids, g, axis=None if check_vma else "data"):
        def loss(state):
            return jnp.sum(jax_tt.lookup_bags(table, state, ids, axis_name=axis)[0] * g)

        return jax.grad(loss)(state)

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "check_vma": check_vma}
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(state, ids, g)
    whole = jax.jit(partial(step, axis=None))(state, ids, g)
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


class Tower(nnx.Module):
    def __init__(self, table):
        self.table = table
        self.head = nnx.Linear(8, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return jnp.sum(self.head(self.table(ids)))


def loss_of(rows: Any, weights: jax.Array) -> jax.Array:
    return jnp.sum(rows @ weights)


def test_nnx_and_linen_take_the_same_steps():
    ids = jnp.array([[1, 5], [5, 5]])
    start = jax.random.normal(jax.random.key(0), (50, 8))
    options = {"embedding_init": lambda key, shape, dtype: start, "optimizer": RULE}
    model = Tower(jax_tt.EmbedBag(50, 8, **options, rngs=nnx.Rngs(0)))
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.0))
    step = nnx.jit(lambda m, o: o.update(m, jax_tt.grad(lambda m: m(ids))(m)))
    layer = jax_tt.linen.TableEmbed(jax_tt.dense_table(50, 8, **options), combiner="sum")
    state = jax_tt.linen.TrainState.create(
        apply_fn=layer.apply, variables=layer.init(jax.random.key(0), ids), tx=optax.sgd(0.0)
    )
    weights = model.head.kernel[...]

    @jax.jit
    def linen_step(state):
        grad = jax_tt.linen.grad(lambda v: loss_of(layer.apply(v, ids), weights))
        return state.apply_gradients(grads=grad(state.variables))

    for _ in range(3):
        step(model, opt)
        state = linen_step(state)
    own: Any = state.fused
    for name in ("embedding", "slot_momentum_0", "slot_total_0", "step"):
        np.testing.assert_allclose(getattr(model.table, name)[...], own[name], rtol=1e-6)
    assert np.all(f64(own["embedding"])[[0, 2, 49]] == f64(start)[[0, 2, 49]])
    assert np.any(f64(own["embedding"])[5] != f64(start)[5])


def collection_step(rules, layout, donate=False):
    tables = {
        name: jax_tt.dense_table(1009, 16, optimizer=rule) for name, rule in rules.items()
    } | {"train": jax_tt.tt_table(60, 8, tt_ranks=3, optimizer=next(iter(rules.values())))}
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})

    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(
                collection, arrays, batch, layout=layout, bounds="error"
            )
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(rows))

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    return collection, jax.jit(step, donate_argnums=0 if donate else ())


BATCH = {
    name: np.random.default_rng(k).integers(0, 60, (4, 30)).astype(np.int32)
    for k, name in enumerate(("own", "native", "train"))
}


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_in_a_collection_it_takes_the_steps_of_a_native_rule(layout):
    states = []
    for rule in (PLAIN_SGD, SGD):
        collection, step = collection_step({"own": rule, "native": SGD}, layout)
        state = jax.jit(collection.init)(jax.random.key(0))
        for _ in range(3):
            state = step(state, BATCH)
        states.append(collection.separated(state))
    got, want = states
    assert [float(got[name]["step"]) for name in collection.sharing] == [3, 3, 3]
    for name in ("own", "native", "train"):
        for array, value in want[name].items():
            np.testing.assert_allclose(got[name][array], value, rtol=1e-5, atol=1e-6)


def test_the_program_has_no_copy_of_the_table():
    collection, step = collection_step({"own": RULE, "native": SGD}, "features", donate=True)
    state = jax.jit(collection.init)(jax.random.key(0))
    compiled = step.lower(state, BATCH).compile()
    assert not re.findall(r"= f32\[1009(,16)?\][^ ]* copy", str(compiled.as_text()))
    address = state["own"]["embedding"].unsafe_buffer_pointer()
    after = compiled(state, BATCH)
    assert after["own"]["embedding"].unsafe_buffer_pointer() == address


@pytest.mark.parametrize("rule", [RULE, optimizers.RowGradients(16)])
def test_the_program_of_one_table_has_no_copy_of_it(rule):
    # A loss whose gradient does not depend on the lookup, so that nothing else orders the step after it.
    table, state = fused(jnp.ones((1237, 24)), rule)
    ids = jnp.array([[1, 5], [5, 7]])

    def loss(state):
        out, _ = jax_tt.lookup_bags(table, state, ids)
        return jnp.sum(out), out

    step = jax.jit(lambda state: jax.grad(loss, has_aux=True)(state), donate_argnums=0)
    program = str(step.lower(state).compile().as_text())
    assert not re.findall(r"= f32\[1237(,24)?\][^ ]* copy", program)
    # No gradient of the size of the table either.
    assert not re.findall(r"= f32\[1237,24\][^ ]* broadcast", program)


def test_what_a_function_returns_is_checked():
    bags = Bags.from_ragged([[1, 2]])
    for function, error, match in (
        (lambda rows, g, slots, step: rows, TypeError, "the pair"),
        (lambda rows, g, slots, step: (rows[0], {}), ValueError, "rows of shape"),
        (lambda rows, g, slots, step: (rows, {"sum": rows}), ValueError, r"\['sum'\]"),
    ):
        rule = optimizers.Custom(function)
        with pytest.raises(error, match=match):
            stepped(rule, bags)
    with pytest.raises(TypeError, match="function: got 3"):
        optimizers.Custom(cast("Any", 3))
    with pytest.raises(ValueError, match="'per_row'; expected one of 'row', 'entry'"):
        optimizers.Custom(plain_sgd, slots={"sum": "per_row"})
    with pytest.raises(ValueError, match=r"slots: got the name 'a sum'"):
        optimizers.Custom(plain_sgd, slots={"a sum": "row"})


# RowGradients


@pytest.mark.parametrize("capacity", [8, 200])
def test_sums_are_left_and_the_table_is_not_touched(capacity, method):
    rule = optimizers.RowGradients(capacity)
    table, state = fused(rows(), rule)
    assert rule.read(state).distinct == 0
    g = gradients(COLUMNS)

    def loss(state, bags):
        return jnp.sum(jax_tt.lookup_bags(table, state, bags, method=method)[0] * jnp.float32(g))

    step = jax.jit(jax.grad(loss))
    for batch in batches(3):
        state = step(state, Bags(*batch))
        found = rule.read(state)
        seen = np.unique(batch[0])
        assert found.distinct == len(seen) <= capacity
        np.testing.assert_array_equal(found.rows[: len(seen)], seen)
        want = table_gradient(batch, g, ROWS)
        np.testing.assert_allclose(found.gradients[: len(seen)], want[seen], rtol=1e-6)
        assert np.all(f64(found.gradients[len(seen) :]) == 0)
        # What the rows are for: a step by hand, in which marks are dropped.
        by_hand = state["embedding"].at[found.rows].add(-found.gradients, mode="drop")
        np.testing.assert_allclose(by_hand, f64(rows()) - want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state["embedding"], rows())
    assert state["step"] == 3 and state["sentinel"] == 1


def test_too_many_rows_are_an_error_and_nan():
    rule = optimizers.RowGradients(2)
    table, state = fused(rows(), rule)
    ids = jnp.array([[1, 2, 3]])
    state = jax.jit(jax.grad(lambda s: jax_tt.lookup_bags(table, s, ids)[0].sum()))(state)
    with pytest.raises(ValueError, match="capacity: got 2; the last batch had 3 distinct rows"):
        rule.read(state)
    found = jax.jit(lambda state: rule.read(state))(state)
    assert found.distinct == 3 and np.all(np.isnan(found.gradients))


def test_a_refused_step_leaves_no_gradients():
    rule = optimizers.RowGradients(4)
    table, state = fused(rows(), rule, skip_nonfinite=True)

    def loss(state, factor):
        return factor * jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[1, 2]]))[0])

    step = jax.jit(jax.grad(loss))
    state = step(state, 1.0)
    assert rule.read(state).distinct == 2
    state = step(state, jnp.inf)
    assert rule.read(state).distinct == 0 and state["step"] == 1


def test_row_gradients_of_a_layer_and_of_a_train():
    rule = optimizers.RowGradients(8)
    model = Tower(jax_tt.EmbedBag(50, 8, optimizer=rule, rngs=nnx.Rngs(0)))
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    step = nnx.jit(
        lambda m, o: o.update(m, jax_tt.grad(lambda m: m(np.array([[1, 5], [5, 5]])))(m))
    )
    step(model, opt)
    found = rule.read(model.table.state())
    assert found.distinct == 2
    np.testing.assert_allclose(found.gradients[1], 3 * found.gradients[0], rtol=1e-6)
    with pytest.raises(TypeError, match="RowGradients; it is for dense tables"):
        fused(cores(), rule)
    with pytest.raises(ValueError, match="capacity"):
        optimizers.RowGradients(0)


def test_other_slots_are_refused():
    rule = optimizers.RowGradients(8)
    _, other = fused(rows(), optimizers.Adam(0.1))
    _, smaller = fused(rows(), optimizers.RowGradients(4))
    for given in (other, smaller, {}):
        with pytest.raises(ValueError, match=r"state: got slots .*; expected the state of a table"):
            rule.read(given)


def test_results_that_are_no_floating_point_numbers_are_refused():
    for change in (lambda rows: jax.lax.complex(rows, rows), lambda rows: rows > 0):
        rule = optimizers.Custom(lambda rows, g, slots, step, change=change: (change(rows), {}))
        with pytest.raises(
            TypeError, match=r"function: returned rows of type .*; expected floating"
        ):
            stepped(rule, Bags.from_ragged([[1]]))


def test_a_step_with_64_bit_types():
    with jax.enable_x64(True):
        table = jax_tt.dense_table(5, 3, param_dtype="float64", optimizer=PLAIN_SGD)
        state = table.init(jax.random.key(0))

        def loss(arrays):
            return jnp.sum(jax_tt.lookup(table, {**state, **arrays}, np.array([1, 3, 1]))[0])

        trained = {name: state[name] for name in table.spec.trained_names}
        after = jax.jit(jax.grad(loss))(trained)["embedding"]
        expected = f64(state["embedding"]).copy()
        expected[1] -= 0.2
        expected[3] -= 0.1
        np.testing.assert_allclose(after, expected, rtol=1e-12)


@pytest.mark.slow
def test_a_row_cache_is_stepped_as_by_a_native_rule():
    ids = jnp.array([[1, 5], [5, 7]])
    found = []
    for rule in (PLAIN_SGD, SGD):
        cache = jax_tt.RowCache(20, ways=4, refresh_every=1, gradients="rows")
        layer = jax_tt.TTEmbedBag(60, 8, tt_ranks=3, optimizer=rule, cache=cache, rngs=nnx.Rngs(0))
        opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
        for shift in (0, 1):
            opt.update(
                layer, jax_tt.grad(lambda m, ids: jnp.sum(jnp.sin(m(ids))))(layer, ids + shift)
            )
        found.append(layer.state())
    assert np.any(f64(found[0]["cache_rows"]) != 0)
    for name, value in found[1].items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=1e-6)
