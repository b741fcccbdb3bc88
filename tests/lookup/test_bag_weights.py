"""Weights of bags: their gradients, which no limit of an update changes, and weights of ids that read no row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags, optimizers
from tests.helpers import f64

N, WIDTH = 40, 8
FORMS = [
    ("rectangular", "sum"),
    ("ragged", "mean"),
    ("rectangular", "sqrtn"),
    ("ragged", "mean_count"),
]
# All that an update can do to gradients, or to the rows that a lookup returns.
UPDATES = {
    "plain": (optimizers.SGD(0.5), {}),
    "limited": (optimizers.SGD(0.5), {"max_gradient": 0.01}),
    "limited, skipping": (optimizers.Adam(0.1), {"max_gradient": 0.01, "skip_nonfinite": True}),
    "custom": (
        optimizers.Custom(lambda rows, grads, slots, step: (rows - grads, {})),
        {"max_gradient": 0.01},
    ),
}
IDS = jnp.array([[3, 9, 3], [0, 39, 7]])
RAGGED = jnp.array([5, 5, 31, 2]), jnp.array([0, 3, 4])
WEIGHTS = jnp.array([[0.5, -2.0, 3.0], [1.0, 1.0, 0.25]])
ROWS = np.random.default_rng(0).normal(size=(N, WIDTH)).astype(np.float32)
G = np.random.default_rng(1).normal(size=(2, WIDTH)).astype(np.float32)


def given_rows(key, shape, dtype):
    del key
    return jnp.asarray(ROWS[: shape[0], : shape[1]], dtype)


def tables(update, **options):
    """A table of each kind that takes steps in a way of its own; options of the update are left out without one."""
    rule, limits = (None, {}) if update is None else UPDATES[update]
    given = {"optimizer": rule, **limits, **options}
    made = {
        "dense": jax_tt.dense_table(N, WIDTH, embedding_init=given_rows, **given),
        "train": jax_tt.tt_table(N, WIDTH, tt_ranks=3, **given),
        "cached": jax_tt.tt_table(N, WIDTH, tt_ranks=3, cache=jax_tt.RowCache(8, ways=4), **given),
    }
    return made if rule is None or rule.kind is not None else {"dense": made["dense"]}


def gradients(table, method, form, combiner, scale):
    """Of the weights of a bag, with the table trained."""
    state = table.init(jax.random.key(0))
    trained = {name: state[name] for name in table.spec.trained_names}

    def loss(trained, weights):
        ragged = Bags(*RAGGED, weights.reshape(-1)[:4])
        bags = ragged if form == "ragged" else Bags(IDS, None, weights)
        inputs = {} if scale is None else {"grad_scale": scale}
        out, _ = jax_tt.lookup_bags(
            table, {**state, **trained}, bags, combiner=combiner, method=method, **inputs
        )
        return jnp.sum(out * G)

    return jax.jit(jax.grad(loss, (0, 1)))(trained, WEIGHTS)


@pytest.mark.parametrize(("form", "combiner"), FORMS)
@pytest.mark.parametrize("update", UPDATES)
def test_gradients_of_weights_do_not_depend_on_the_update(update, form, combiner, method):
    scale = 4.0 if update == "limited" else None
    plain = tables(None)
    for name, table in tables(update).items():
        new, got = gradients(table, method, form, combiner, scale)
        _, want = gradients(plain[name], method, form, combiner, None)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)
        assert new["step"] == 1


@pytest.mark.parametrize("layout", ["features", "concatenated"])
@pytest.mark.parametrize("combiners", [("sum", "sum"), ("mean", "sqrtn")], ids=str)
@pytest.mark.parametrize("update", ["limited", "custom"])
def test_nor_do_they_in_a_collection(update, combiners, layout, method, monkeypatch):
    """Features of one table with other combiners, beside a table whose features have no limit."""
    monkeypatch.setenv("JAX_TT_METHOD", method)
    names = ("first", "second", "other")

    def gradients_of(update, limit):
        rule, limits = (None, {}) if update is None else UPDATES[update]
        limits = limits if limit else {}
        shared = jax_tt.dense_table(N, WIDTH, embedding_init=given_rows, optimizer=rule, **limits)
        other = jax_tt.dense_table(N, 4, embedding_init=given_rows)
        features = {
            "first": jax_tt.Feature("shared", combiner=combiners[0]),
            "other": jax_tt.Feature("other", combiner="sum"),
            "second": jax_tt.Feature("shared", combiner=combiners[1]),
        }
        collection = jax_tt.Collection({"shared": shared, "other": other}, features)
        state = collection.init(jax.random.key(0))

        def loss(trained, weights):
            arrays = collection.replaced(state, trained)
            ragged = Bags(*RAGGED, weights["second"].reshape(-1)[:4])
            batch = {name: Bags(IDS, None, weights[name]) for name in ("first", "other")}
            out, _ = jax_tt.lookup_features(
                collection, arrays, batch | {"second": ragged}, layout=layout
            )
            return sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(out))

        weights = dict.fromkeys(names, WEIGHTS)
        return jax.jit(jax.grad(loss, (0, 1)))(collection.trained(state), weights)

    new, got = gradients_of(update, True)
    free, want = gradients_of(update, False)
    _, plain = gradients_of(None, False)
    for name in names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[name], plain[name], rtol=1e-5, atol=1e-5)
    moved, free = (f64(x["shared"]["embedding"]) - ROWS for x in (new, free))
    assert 0 < np.abs(moved).max() < np.abs(free).max()


def test_limited_tables_are_still_changed_in_place(method):
    table = jax_tt.dense_table(5000, 8, optimizer=optimizers.Adam(0.1), max_gradient=0.1)

    def step(state, weights):
        def loss(state, weights):
            out, _ = jax_tt.lookup_bags(table, state, Bags(IDS, None, weights), method=method)
            return jnp.sum(out**2)

        return jax.grad(loss, (0, 1))(state, weights)

    state = table.init(jax.random.key(0))
    program = jax.jit(step, donate_argnums=0).lower(state, WEIGHTS).compile()
    before = state["embedding"].unsafe_buffer_pointer()
    state, _ = program(state, WEIGHTS)
    if method != "reference":
        assert state["embedding"].unsafe_buffer_pointer() == before
        assert "= f32[5000,8]{1,0} copy" not in str(program.as_text())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("combiner", ["sum", "mean_count"])
@pytest.mark.parametrize("update", [None, "plain", "limited"])
def test_a_weight_of_an_id_that_reads_no_row_may_be_anything(update, combiner, bad, method):
    ids = jnp.array([[3, -1, 9], [N, 2**30, 7]])
    weights = jnp.array([[0.5, bad, 3.0], [bad, -bad, 2.0]])
    weighed = jnp.array([[True, False, True], [False, False, True]])
    for name, table in tables(update).items():
        state = table.init(jax.random.key(0))
        trained = {key: state[key] for key in table.spec.trained_names}

        def loss(trained, weights, table=table, state=state):
            out, _ = jax_tt.lookup_bags(
                table,
                {**state, **trained},
                Bags(ids, None, weights),
                combiner=combiner,
                bounds="zero",
                method=method,
            )
            return jnp.sum(out * G), out

        results = []
        for given in (weights, jnp.where(weighed, weights, 0)):
            grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
            results.append(grad(trained, given))
        for got, want in zip(*map(jax.tree.leaves, results), strict=True):
            assert np.all(np.isfinite(got)), name
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_gradient_that_is_not_finite_does_not_reach_the_weight_of_an_id_that_reads_no_row(method):
    table = jax_tt.dense_table(N, WIDTH)
    state = table.init(jax.random.key(0))

    def loss(weights):
        bags = Bags(jnp.array([[3, N]]), None, weights)
        out, _ = jax_tt.lookup_bags(table, state, bags, bounds="zero", method=method)
        return jnp.inf * jnp.sum(out)

    (_, unread) = jax.jit(jax.grad(loss))(jnp.ones((1, 2)))[0]
    assert unread == 0
