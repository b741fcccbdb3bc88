"""Fused updates against gradients in numpy float64, and the traps around them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_tt
from jax_tt import optimizers
from tests.helpers import (
    COMBINERS,
    SHAPES,
    WEIGHTABLE,
    bag_model,
    core_gradients,
    dense_table,
    f64,
    fused,
    make_case,
    raises,
)

SHAPE = SHAPES["d3"]
# An eps that is large enough to show where it is added.
RULES = {
    "adagrad": optimizers.Adagrad(0.05, eps=0.5, initial_accumulator_value=0.1),
    "adam": optimizers.Adam(0.01, eps=0.1),
}


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_step_is_that_of_the_gradient(kind, combiner, method):
    """With a rate that depends on the step; `optimizers/test_rules` has the formulas of rules, over 20 steps."""
    rule = optimizers.SGD(lambda step: 1.0 / (1.0 + step))
    case = make_case(SHAPE, "float32", combiner in WEIGHTABLE)
    bags, g = case.bags(), np.float32(case.g)
    weights = None if bags.weights is None else jnp.asarray(bags.weights)
    dense = dense_table(case.cores, SHAPE.num_embeddings)
    table, state = fused(case.cores if kind == "tt" else jnp.asarray(dense, jnp.float32), rule)
    state |= {"step": jnp.float32(3)}

    @jax.jit
    def step(state, weights):
        def loss(state, weights):
            given = dataclasses.replace(bags, weights=weights)
            out, _ = jax_tt.lookup_bags(table, state, given, combiner=combiner, method=method)
            return jnp.sum(out * g)

        return jax.grad(loss, argnums=(0, 1))(state, weights)

    new, dweights = step(state, weights)
    _, dtable, want = bag_model(dense, case.rows, case.weights, combiner, g.astype(np.float64))
    gradients = core_gradients(case.cores, dtable) if kind == "tt" else [dtable]
    for name, gradient in zip(table.spec.param_names, gradients, strict=True):
        want_row = f64(state[name]) - gradient / 4
        np.testing.assert_allclose(new[name], want_row, rtol=2e-4, atol=2e-5)
    if dweights is not None:
        want = np.concatenate(want)
        np.testing.assert_allclose(dweights[: len(want)], want, rtol=1e-3, atol=1e-4)
    assert new["step"] == 4 and new["sentinel"] == 1


def _table(rule=RULES["adam"], dtype="float32", **options):
    return fused(make_case(SHAPE, dtype, False).cores, rule, **options)


def _grad(table, method, **options):
    """A jitted step of a state, ids, a factor of the loss, and the scale that the factor is divided by."""

    def loss(state, ids, factor=1.0, scale=None):
        out, _ = jax_tt.lookup_bags(table, state, ids, method=method, grad_scale=scale, **options)
        return jnp.sum(out.astype(jnp.float32)) * factor

    return jax.jit(jax.grad(loss))


def test_untouched_slices_stay_and_touched_ones_move_at_zero_gradient(method):
    table, state = _table()
    ids = np.array([[0], [1]], np.int32)
    step = _grad(table, method)
    moved = step(state, ids, 1.0)
    again = step(moved, ids, 0.0)  # touched, gradient 0: the moments decay
    p = SHAPE.row_factors
    seen = [sorted(set(x.tolist())) for x in np.unravel_index(ids.ravel(), p)]
    for k in range(3):
        still = [i for i in range(p[k]) if i not in seen[k]]
        core, moment = f"core_{k}", f"slot_mu_{k}"
        for before, after in ((state, moved), (moved, again)):
            np.testing.assert_array_equal(before[core][still,], after[core][still,])
            assert (np.asarray(before[core] != after[core])[seen[k]]).any()
        ratio = again[moment][seen[k],] / moved[moment][seen[k],]
        np.testing.assert_allclose(ratio, 0.9, rtol=1e-5)


def test_grad_scale_divides_and_skip_leaves_everything(method):
    (table, state), ids = _table(RULES["adagrad"]), np.array([[3, 4], [5, 5]], np.int32)
    skips, _ = _table(RULES["adagrad"], skip_nonfinite=True)
    step, skipping = _grad(table, method), _grad(skips, method)
    plain, scaled = step(state, ids, 1.0, 1.0), step(state, ids, 1024.0, 1024.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, scaled)
    skipped, kept = skipping(state, ids, np.inf), skipping(state, ids, 1.0)
    jax.tree.map(np.testing.assert_array_equal, skipped, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), kept, plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding(dtype, method):
    rule = optimizers.SGD(1.0)
    start = jnp.ones((2048, 4), dtype)
    tables = [fused(start, rule, stochastic_rounding=drawn)[0] for drawn in (False, True)]
    _, state = fused(start, rule)
    ids = np.arange(2048, dtype=np.int32)[:, None]
    tiny = 2.0 ** (-12 if dtype == "bfloat16" else -15)  # far below one unit in the last place

    @functools.partial(jax.jit, static_argnums=1)
    def step(state, stochastic, key=None):
        def loss(state):
            out, _ = jax_tt.lookup_bags(tables[stochastic], state, ids, method=method, key=key)
            return jnp.sum(out.astype(jnp.float32)) * tiny

        return jax.grad(loss)(state)

    def rows(*args):
        after = step(*args)["embedding"]
        assert after.dtype == dtype
        return np.asarray(after, np.float64)

    assert (rows(state, False) == 1).all()  # rounded to nearest, the update is lost
    drawn = rows(state, True)
    assert len(np.unique(drawn)) == 2
    assert abs((1 - drawn.mean()) / tiny - 1) < 0.2
    assert (drawn != drawn[:, :1]).any()  # every entry is drawn for itself
    np.testing.assert_array_equal(drawn, rows(state, True))  # keyed, so repeatable
    assert (drawn != rows(state | {"step": jnp.float32(1)}, True)).any()
    assert (drawn != rows(state, True, jax.random.key(5))).any()


@pytest.mark.each_way
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ties_round_to_even(dtype, method):
    """Steps of half a unit in the last place, away from zero."""
    unit = float(jnp.finfo(dtype).eps)
    start = np.array([[1, 1 + unit, -1, -1 - unit]], np.float32)
    rule = optimizers.SGD(1.0)
    table, state = fused(jnp.asarray(start, dtype), rule, stochastic_rounding=False)
    g = -unit / 2 * np.sign(start)

    @jax.jit
    @jax.grad
    def step(state):
        out, _ = jax_tt.lookup_bags(table, state, np.zeros((1, 1), np.int32), method=method)
        return jnp.sum(out.astype(jnp.float32) * g)

    want = [[1, 1 + 2 * unit, -1, -1 - 2 * unit]]
    np.testing.assert_array_equal(f64(step(state)["embedding"]), want)


def test_out_of_range_and_padding_touch_nothing(method):
    table, state = _table(RULES["adagrad"])
    bags = jax_tt.Bags.from_padded(np.array([[-1, -1], [-5, 120]], np.int32))
    out = _grad(table, method, bounds="zero")(state, bags)
    scalars = {name: out[name] for name in ("step", "used")}
    jax.tree.map(np.testing.assert_array_equal, out, state | scalars)


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("combiner", ["mean", "max"])
def test_no_bags_are_a_step_that_moves_nothing(combiner, kind, method):
    rule = RULES["adagrad"]
    table, state = _table(rule) if kind == "tt" else fused(jnp.ones((40, 64)), rule)
    ids, offsets = np.arange(9, dtype=np.int32), np.zeros(1, np.int32)
    forms = [np.zeros((0, 3), np.int32), jax_tt.Bags(ids, offsets)]
    if combiner in WEIGHTABLE:
        forms.append(jax_tt.Bags(ids, offsets, np.ones(9, np.float32)))

    def loss(state, bags):
        out, _ = jax_tt.lookup_bags(table, state, bags, combiner=combiner, method=method)
        assert out.shape[0] == 0
        return out.sum()

    for new in jax.jit(lambda state: [jax.grad(loss)(state, bags) for bags in forms])(state):
        jax.tree.map(np.testing.assert_array_equal, new, state | {"step": state["step"] + 1})


def test_lookup_and_traced_learning_rate(method):
    ids = np.array([7, 7, 9], np.int32)
    table, state = _table(optimizers.SGD(0.1))

    @jax.jit
    def step(state, lr):
        options = {"method": method, "hyperparameters": {"learning_rate": lr}}
        return jax.grad(lambda s: jax_tt.lookup(table, s, ids, **options)[0].sum())(state)

    want = _grad(table, method)(state, ids[None])
    for lr in (0.1, 0.3):
        got = step(state, np.float32(lr))
        for name in table.spec.param_names:
            start, a, b = state[name], got[name], want[name]
            np.testing.assert_allclose(a, start + lr / 0.1 * (b - start), rtol=1e-5, atol=1e-6)


def test_weights_only_leaves_the_table(method):
    table, state = _table()
    bags = make_case(SHAPE, "float32", True).bags()

    def loss(weights, table):
        given = dataclasses.replace(bags, weights=weights)
        return jax_tt.lookup_bags(table, state, given, combiner="mean", method=method)[0].sum()

    tables = table, jax_tt.extension.with_update(table, None)
    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(bags.weights, of) for of in tables)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_moved_sentinel_is_refused(method):
    table, state = _table()
    ids = np.array([[1, 2]], np.int32)

    def once(state):
        return jnp.sum(jax_tt.lookup_bags(table, state, ids, method=method)[0])

    twice = jax.jit(jax.grad(lambda s: once(s) + once(s)))(state)
    unused = jax.tree.map(np.zeros_like, state)
    scaled = jax.tree.map(lambda x: np.float32(0.5) * np.asarray(x), state)
    step = jax.jit(jax.value_and_grad(once))
    for broken in (twice, unused, scaled):
        assert broken["sentinel"] != 1
        if not raises(method):
            value, after = step(broken)
            assert np.isnan(value)
            # Overwriting once more does not make the damage invisible.
            assert after["sentinel"] != 1
        else:
            with pytest.raises(Exception, match=r"sentinel|overwrite|fused"):
                jax.block_until_ready(step(broken))


def test_refused_transformations():
    table, state = _table()
    ids = np.array([[1, 2]], np.int32)

    def loss(state, ids=ids):
        return jnp.sum(jax_tt.lookup_bags(table, state, ids)[0])

    with pytest.raises(ValueError, match=r"jax\.vmap"):
        jax.grad(lambda s: jnp.sum(jax.vmap(lambda i: loss(s, i))(ids[None])))(state)
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        jax.vmap(jax.grad(loss), in_axes=(None, 0))(state, ids[None])
    with pytest.raises(ValueError, match="core_0"):
        loss(jax.tree.map(lambda x: x[None], state))
    with pytest.raises(TypeError, match="higher derivatives"):
        jax.grad(lambda s: jnp.sum(jax.grad(loss)(s)["core_0"]))(state)
    with pytest.raises(ValueError, match="whole table"):
        jax.grad(lambda core: loss(state | {"core_0": core}))(state["core_0"])
    with pytest.raises(TypeError):
        jax.jvp(loss, (state,), (state,))
    # Without a gradient, vmap is fine.
    mapped = jax.vmap(lambda i: loss(state, i))(ids[None])
    np.testing.assert_allclose(mapped[0], loss(state), rtol=1e-6)


def test_bad_arguments_hold_the_fix():
    ids = np.array([[1]], np.int32)
    with pytest.raises(TypeError, match=r"jax_tt\.optimizers"):
        jax_tt.Update("adam")
    with pytest.raises(TypeError, match=r"optimizer=None.*optax"):
        jax_tt.Update(optax.adam(0.1))
    with pytest.raises(TypeError, match="typed key"):
        half, state = _table(dtype="bfloat16")
        jax_tt.lookup_bags(half, state, ids, key=jnp.zeros(2, jnp.uint32))
    with pytest.raises(ValueError, match="learning_rate"):
        optimizers.SGD(-1.0)
    with pytest.raises(TypeError, match="learning_rate"):
        optimizers.Adam("fast")
    with pytest.raises(ValueError, match="b1"):
        optimizers.Adam(0.1, b1=1.0)


def test_no_step_where_the_divisor_vanishes():
    for made in (optimizers.Adagrad, optimizers.RowWiseAdagrad, optimizers.Adam):
        rule, rows = made(0.1, eps=0.0), jnp.ones((2, 3))
        slots = tuple(jnp.zeros((2,) if slot.rowwise else (2, 3)) for slot in rule.slots)
        for gradient in (0.0, 1e-25):
            given = rule.hyperparameters(jnp.zeros(()))
            new, _ = rule.update_rows(rows, jnp.full((2, 3), gradient), slots, given)
            np.testing.assert_array_equal(new, rows, err_msg=f"{rule}, {gradient}")
