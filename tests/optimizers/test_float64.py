"""Tables in float64: hyper-parameters, slots and steps are in float64, too, natively and in the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from jax_tt import optimizers
from tests.conftest import native_available
from tests.helpers import core_gradients, f64, fused
from tests.optimizers.rule_models import RULES
from tests.optimizers.test_rules import KINDS, SHAPE, Modelled

ROWS, COLUMNS, STEPS, SCALE = 12, 5, 6, 1000.0  # 1 / 1000 is not exact in float32
WAYS = ("native", "reference")
CASES = [("native", name) for name in RULES] + [("reference", name) for name in KINDS]
EXACT = {"rtol": 1e-12, "atol": 1e-13}

pytestmark = pytest.mark.skipif(not native_available(), reason="the native module is not built")


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape) / 4


def batches():
    rng = np.random.default_rng(5)
    return [rng.integers(0, ROWS - 1, (3, 4)) for _ in range(STEPS)]


def stepper(table, method):
    @jax.jit
    def step(state, ids, g):
        def loss(state):
            pooled, _ = jax_tt.lookup_bags(table, state, ids, method=method, grad_scale=SCALE)
            return SCALE * jnp.sum(pooled * g)

        return jax.grad(loss)(state)

    return step


def types(state):
    return jax.tree.map(lambda array: array.dtype, state)


def check(model, values, slots):
    np.testing.assert_allclose(f64(values).reshape(model.values.shape), model.values, **EXACT)
    for own, slot in zip(model.slots, slots, strict=True):
        assert slot.dtype == jnp.float64
        np.testing.assert_allclose(slot, own, **EXACT)


@pytest.mark.parametrize(("method", "name"), CASES)
def test_steps_are_those_of_the_formula(method, name):
    rule, _ = RULES[name]
    table, state = fused(jnp.asarray(random(ROWS, COLUMNS)), rule)
    model, g = Modelled(name, state["embedding"], *table.spec.slots(state)), random(3, COLUMNS)
    step = stepper(table, method)
    for t, ids in enumerate(batches(), start=1):
        gradient = np.zeros((ROWS, COLUMNS))
        np.add.at(gradient, ids.reshape(-1), np.repeat(g, 4, axis=0))
        model.update(gradient, np.unique(ids), t)
        state = step(state, ids, g)
    check(model, state["embedding"], *table.spec.slots(state))


@pytest.mark.parametrize("method", WAYS)
def test_steps_of_tensor_trains_are_those_of_the_formula(method):
    rule, _ = RULES["adam_decayed"]
    table, state = fused(tuple(random(*s) for s in SHAPE.core_shapes), rule)
    parts = zip(table.spec.params(state), table.spec.slots(state), strict=True)
    models = [Modelled("adam_decayed", *pair) for pair in parts]
    g = random(3, SHAPE.features)
    step = stepper(table, method)
    for t, ids in enumerate(batches(), start=1):
        now = tuple(core.values.reshape(core.shape) for core in models)
        of_rows = np.zeros((SHAPE.num_embeddings, SHAPE.features))
        np.add.at(of_rows, ids.reshape(-1), np.repeat(g, 4, axis=0))
        digits = np.unravel_index(np.unique(ids), SHAPE.row_factors)
        for core, gradient, digit in zip(models, core_gradients(now, of_rows), digits, strict=True):
            core.update(gradient, np.unique(digit), t)
        state = step(state, ids, g)
    parts = zip(models, table.spec.params(state), table.spec.slots(state), strict=True)
    for model, values, slots in parts:
        check(model, values, slots)


@pytest.mark.parametrize("method", WAYS)
def test_hyperparameters_are_not_rounded(method):
    """Given as a number, a schedule, an argument of the call and a variable; 0.1 has no exact float32."""
    rows, ids = jnp.zeros((4, 2)), jnp.array([[1]])

    def stepped(rule, **given):
        table, state = fused(rows, rule)

        def loss(state):
            return jnp.sum(jax_tt.lookup_bags(table, state, ids, method=method, **given)[0])

        return jax.jit(jax.grad(loss))(state)["embedding"][1]

    for rate in (0.1, lambda step: 0.1 + 0 * step):
        assert np.all(np.asarray(stepped(optimizers.SGD(rate))) == -0.1)
    given = {"learning_rate": jnp.asarray(0.1)}
    assert np.all(np.asarray(stepped(optimizers.SGD(0.5), hyperparameters=given)) == -0.1)
    for rule in (optimizers.SGD(0.5), optimizers.RowWiseAdagrad(0.5, max_norm=0.5)):
        name = "learning_rate" if rule == optimizers.SGD(0.5) else "max_norm"
        own = rule.with_hyperparameters({name: 0.1}).hyperparameters(jnp.float64(0))
        assert own[name].dtype == jnp.float64 and own[name] == np.float64(0.1)
    layer = jax_tt.EmbedBag(
        4,
        2,
        param_dtype=jnp.float64,
        embedding_init=nnx.initializers.zeros,
        optimizer=optimizers.SGD(nnx.Variable(0.1)),
        method=method,
        rngs=nnx.Rngs(0),
    )
    optimizer = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    optimizer.update(layer, jax_tt.grad(lambda m: jnp.sum(m(ids)))(layer))
    assert np.all(np.asarray(layer.embedding[...])[1] == -0.1)


@pytest.mark.parametrize("method", WAYS)
def test_tables_of_both_types_are_stepped_in_one_collection(method, monkeypatch):
    monkeypatch.setenv("JAX_TT_METHOD", method)
    rule = optimizers.Adam(0.1)
    kinds = {"wide": jnp.float64, "narrow": jnp.float32, "half": jnp.bfloat16}
    tables = {
        f"{name} {kind}": make(30, 6, param_dtype=dtype, optimizer=rule, **options)
        for name, dtype in kinds.items()
        for kind, make, options in (
            ("dense", jax_tt.dense_table, {}),
            ("train", jax_tt.tt_table, {"tt_ranks": 2}),
        )
    }
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})
    state = collection.init(jax.random.key(0))
    batch = {name: jnp.array([[1, 2], [2, 29]]) for name in tables}

    @jax.jit
    def step(state):
        def loss(trained):
            rows, _ = jax_tt.lookup_features(collection, collection.replaced(state, trained), batch)
            return sum(jnp.sum(leaf).astype(jnp.float64) for leaf in rows.values())

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    after = step(step(state))
    for name, table in tables.items():
        accum = jnp.float64 if "wide" in name else jnp.float32
        for slots in table.spec.slot_names:
            assert {after[name][slot].dtype for slot in slots} == {jnp.dtype(accum)}
        (first, *_) = table.spec.param_names
        assert np.any(f64(after[name][first]) != f64(state[name][first])), name
    # Statistics and counts keep their types.
    assert after["wide dense"].keys() == state["wide dense"].keys()
    assert types(after) == types(state)


@pytest.mark.parametrize(
    "table",
    [
        jax_tt.hash_table(64, 4, ways=8, param_dtype=jnp.float64, optimizer=optimizers.Adam(0.1)),
        jax_tt.tt_table(
            40,
            4,
            tt_ranks=2,
            param_dtype=jnp.float64,
            cache=jax_tt.RowCache(8, ways=4),
            optimizer=optimizers.Adam(0.1),
        ),
        jax_tt.dense_table(
            40,
            4,
            param_dtype=jnp.float64,
            optimizer=optimizers.Custom(
                lambda rows, grads, slots, step: (
                    rows - 0.1 * grads,
                    {"sum": slots["sum"] + grads},
                ),
                slots={"sum": "entry"},
            ),
        ),
        jax_tt.dense_table(
            40, 4, param_dtype=jnp.float64, optimizer=optimizers.RowGradients(capacity=4)
        ),
        jax_tt.dense_table(
            40,
            4,
            param_dtype=jnp.float64,
            optimizer=optimizers.Adam(0.1, moment_dtype="bfloat16"),
        ),
    ],
    ids=["hash", "cached", "custom", "gradients", "bfloat16 moments"],
)
@pytest.mark.parametrize("method", WAYS)
def test_states_keep_their_types(table, method):
    state = table.init(jax.random.key(0))
    ids = jnp.array([[1, 2], [2, 3]], jnp.uint32 if table.ids.takes_keys else jnp.int32)
    if table.ids.takes_keys:
        _, state = jax_tt.dynamic.insert(table, state, ids)

    @jax.jit
    def step(state):
        trained = {name: state[name] for name in table.spec.trained_names}

        def loss(trained):
            rows, after = jax_tt.lookup_bags(table, {**state, **trained}, ids, method=method)
            return jnp.sum(rows), after

        new, after = jax.grad(loss, has_aux=True)(trained)
        return {**after, **new}

    after = step(state)
    jax_tt.extension.check_state(table, after)
    assert types(after) == types(dict(state))
    assert after["step"].dtype == jnp.float32 and after["step"] == 1


def test_slots_of_another_type_are_refused():
    table = jax_tt.dense_table(9, 4, param_dtype=jnp.float64, optimizer=optimizers.Adam(0.1))
    state = table.init(jax.random.key(0))
    old = {**state, "slot_mu_0": state["slot_mu_0"].astype(jnp.float32)}
    with pytest.raises(ValueError, match=r"slot_mu_0: got float32 .*; expected float64"):
        jax_tt.lookup(table, old, jnp.array([1]))
