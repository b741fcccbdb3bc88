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
    if kind == "tt":
        op, start = jax_tt.tt.fused_embed_bag, case.cores
    else:
        op, start = jax_tt.functional.fused_embed_bag, jnp.asarray(dense, jnp.float32)
    table = jax_tt.functional.init_fused(start, rule)._replace(step=jnp.float32(3))

    @jax.jit
    def step(table, weights):
        def loss(table, weights):
            given = dataclasses.replace(bags, weights=weights)
            return jnp.sum(op(table, given, rule, combiner=combiner, method=method) * g)

        return jax.grad(loss, argnums=(0, 1))(table, weights)

    new, dweights = step(table, weights)
    _, dtable, want = bag_model(dense, case.rows, case.weights, combiner, g.astype(np.float64))
    gradients = core_gradients(case.cores, dtable) if kind == "tt" else [dtable]
    for after, before, gradient in zip(new.cores, table.cores, gradients, strict=True):
        np.testing.assert_allclose(after, f64(before) - gradient / 4, rtol=2e-4, atol=2e-5)
    if dweights is not None:
        want = np.concatenate(want)
        np.testing.assert_allclose(dweights[: len(want)], want, rtol=1e-3, atol=1e-4)
    assert new.step == 4 and new.sentinel == 1


def _table(rule=RULES["adam"], dtype="float32"):
    return jax_tt.functional.init_fused(make_case(SHAPE, dtype, False).cores, rule)


def _grad(rule, method, **options):
    """A jitted step of a table, ids, a factor of the loss, and the scale that the factor is divided by."""

    def loss(table, ids, factor=1.0, scale=None):
        out = jax_tt.tt.fused_embed_bag(
            table, ids, rule, method=method, grad_scale=scale, **options
        )
        return jnp.sum(out.astype(jnp.float32)) * factor

    return jax.jit(jax.grad(loss))


def test_untouched_slices_stay_and_touched_ones_move_at_zero_gradient(method):
    rule = RULES["adam"]
    table = _table()
    ids = np.array([[0], [1]], np.int32)
    step = _grad(rule, method)
    moved = step(table, ids, 1.0)
    again = step(moved, ids, 0.0)  # touched, gradient 0: the moments decay
    p = SHAPE.row_factors
    seen = [sorted(set(x.tolist())) for x in np.unravel_index(ids.ravel(), p)]
    for k in range(3):
        still = [i for i in range(p[k]) if i not in seen[k]]
        for before, after in ((table, moved), (moved, again)):
            np.testing.assert_array_equal(before.cores[k][still,], after.cores[k][still,])
            assert (np.asarray(before.cores[k] != after.cores[k])[seen[k]]).any()
        ratio = again.slots[k][0][seen[k],] / moved.slots[k][0][seen[k],]
        np.testing.assert_allclose(ratio, 0.9, rtol=1e-5)


def test_grad_scale_divides_and_skip_leaves_everything(method):
    rule = RULES["adagrad"]
    table, ids = _table(rule), np.array([[3, 4], [5, 5]], np.int32)
    step, skipping = _grad(rule, method), _grad(rule, method, skip_nonfinite=True)
    plain, scaled = step(table, ids, 1.0, 1.0), step(table, ids, 1024.0, 1024.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, scaled)
    skipped, kept = skipping(table, ids, np.inf), skipping(table, ids, 1.0)
    jax.tree.map(np.testing.assert_array_equal, skipped, table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), kept, plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding(dtype, method):
    rule = optimizers.SGD(1.0)
    table = jax_tt.functional.init_fused(jnp.ones((2048, 4), dtype), rule)
    ids = np.arange(2048, dtype=np.int32)[:, None]
    tiny = 2.0 ** (-12 if dtype == "bfloat16" else -15)  # far below one unit in the last place

    @functools.partial(jax.jit, static_argnums=1)
    def step(table, stochastic, key=None):
        return jax.grad(
            lambda t: (
                jnp.sum(
                    jax_tt.functional.fused_embed_bag(
                        t, ids, rule, method=method, stochastic_rounding=stochastic, key=key
                    ).astype(jnp.float32)
                )
                * tiny
            )
        )(table)

    def rows(*args):
        after = step(*args).cores[0]
        assert after.dtype == dtype
        return np.asarray(after, np.float64)

    assert (rows(table, False) == 1).all()  # rounded to nearest, the update is lost
    drawn = rows(table, True)
    assert len(np.unique(drawn)) == 2
    assert abs((1 - drawn.mean()) / tiny - 1) < 0.2
    assert (drawn != drawn[:, :1]).any()  # every entry is drawn for itself
    np.testing.assert_array_equal(drawn, rows(table, True))  # keyed, so repeatable
    assert (drawn != rows(table._replace(step=jnp.float32(1)), True)).any()
    assert (drawn != rows(table, True, jax.random.key(5))).any()


def test_out_of_range_and_padding_touch_nothing(method):
    rule, table = RULES["adagrad"], _table(RULES["adagrad"])
    bags = jax_tt.Bags.from_padded(np.array([[-1, -1], [-5, 120]], np.int32))
    out = _grad(rule, method, bounds="zero")(table, bags)
    jax.tree.map(np.testing.assert_array_equal, (out.cores, out.slots), (table.cores, table.slots))


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("combiner", ["mean", "max"])
def test_no_bags_are_a_step_that_moves_nothing(combiner, kind, method):
    rule = RULES["adagrad"]
    if kind == "tt":
        op, table = jax_tt.tt.fused_embed_bag, _table(rule)
    else:
        op, table = (
            jax_tt.functional.fused_embed_bag,
            jax_tt.functional.init_fused(jnp.ones((40, 64)), rule),
        )
    ids, offsets = np.arange(9, dtype=np.int32), np.zeros(1, np.int32)
    forms = [np.zeros((0, 3), np.int32), jax_tt.Bags(ids, offsets)]
    if combiner in WEIGHTABLE:
        forms.append(jax_tt.Bags(ids, offsets, np.ones(9, np.float32)))

    def loss(table, bags):
        out = op(table, bags, rule, combiner=combiner, method=method)
        assert out.shape[0] == 0
        return out.sum()

    for new in jax.jit(lambda table: [jax.grad(loss)(table, bags) for bags in forms])(table):
        jax.tree.map(np.testing.assert_array_equal, new, table._replace(step=table.step + 1))


def test_lookup_and_traced_learning_rate(method):
    ids = np.array([7, 7, 9], np.int32)

    @jax.jit
    def step(table, lr):
        rule = optimizers.SGD(lr)
        out = jax.grad(lambda t: jax_tt.tt.fused_lookup(t, ids, rule, method=method).sum())
        return out(table)

    table = _table(optimizers.SGD(0.1))
    want = _grad(optimizers.SGD(0.1), method)(table, ids[None])
    for lr in (0.1, 0.3):
        got = step(table, np.float32(lr))
        for start, a, b in zip(table.cores, got.cores, want.cores, strict=True):
            np.testing.assert_allclose(a, start + lr / 0.1 * (b - start), rtol=1e-5, atol=1e-6)


def test_weights_only_leaves_the_table(method):
    table, rule = _table(), RULES["adam"]
    case = make_case(SHAPE, "float32", True)
    bags = case.bags()

    def fused(w):
        given = dataclasses.replace(bags, weights=w)
        return jax_tt.tt.fused_embed_bag(table, given, rule, combiner="mean", method=method).sum()

    def plain(w):
        given = dataclasses.replace(bags, weights=w)
        return jax_tt.tt.embed_bag(table.cores, given, combiner="mean", method=method).sum()

    got, want = (jax.jit(jax.grad(loss))(bags.weights) for loss in (fused, plain))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_moved_sentinel_is_refused(method):
    table, rule = _table(), RULES["adam"]
    ids = np.array([[1, 2]], np.int32)

    def once(table):
        return jnp.sum(jax_tt.tt.fused_embed_bag(table, ids, rule, method=method))

    twice = jax.jit(jax.grad(lambda t: once(t) + once(t)))(table)
    unused = jax.tree.map(np.zeros_like, table)
    scaled = jax.tree.map(lambda x: np.float32(0.5) * np.asarray(x), table)
    step = jax.jit(jax.value_and_grad(once))
    for broken in (twice, unused, scaled):
        assert broken.sentinel != 1
        if not raises(method):
            value, after = step(broken)
            assert np.isnan(value)
            # Overwriting once more does not make the damage invisible.
            assert after.sentinel != 1
        else:
            with pytest.raises(Exception, match=r"sentinel|overwrite|fused"):
                jax.block_until_ready(step(broken))


def test_refused_transformations():
    table, rule = _table(), RULES["adam"]
    ids = np.array([[1, 2]], np.int32)

    def loss(table, ids=ids):
        return jnp.sum(jax_tt.tt.fused_embed_bag(table, ids, rule))

    with pytest.raises(ValueError, match=r"jax\.vmap"):
        jax.grad(lambda t: jnp.sum(jax.vmap(lambda i: loss(t, i))(ids[None])))(table)
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        jax.vmap(jax.grad(loss), in_axes=(None, 0))(table, ids[None])
    with pytest.raises(ValueError, match=r"leading dimensions|cores"):
        stacked = jax.tree.map(lambda x: x[None], table)
        loss(stacked)
    with pytest.raises(TypeError, match="higher derivatives"):
        jax.grad(lambda t: jnp.sum(jax.grad(loss)(t).cores[0]))(table)
    with pytest.raises(ValueError, match="whole table"):
        jax.grad(lambda cores: loss(table._replace(cores=cores)))(table.cores)
    with pytest.raises(TypeError):
        jax.jvp(loss, (table,), (table,))
    # Without a gradient, vmap is fine.
    mapped = jax.vmap(lambda i: loss(table, i))(ids[None])
    np.testing.assert_allclose(mapped[0], loss(table), rtol=1e-6)


def test_bad_arguments_hold_the_fix():
    rule, table, ids = RULES["adam"], _table(), np.array([[1]], np.int32)
    with pytest.raises(TypeError, match="init_fused"):
        jax_tt.tt.fused_embed_bag(table.cores, ids, rule)
    with pytest.raises(TypeError, match=r"jax_tt\.optimizers"):
        jax_tt.tt.fused_embed_bag(table, ids, "adam")
    with pytest.raises(TypeError, match=r"optimizer=None.*optax"):
        jax_tt.tt.fused_embed_bag(table, ids, optax.adam(0.1))
    with pytest.raises(ValueError, match="SGD expects"):
        jax_tt.tt.fused_embed_bag(table, ids, optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"tt\.fused_embed_bag"):
        jax_tt.functional.fused_embed_bag(table, ids, rule)
    with pytest.raises(TypeError, match="typed key"):
        half = _table(dtype="bfloat16")
        jax_tt.tt.fused_embed_bag(half, ids, rule, key=jnp.zeros(2, jnp.uint32))
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
