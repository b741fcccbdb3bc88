"""Quantized tables whose rows are stepped in the backward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import optimizers
from tests.conftest import WAYS, method_fixture
from tests.helpers import assert_same_bits, to_dense
from tests.kinds.quantized.test_quantized_tables import (
    bytes_of,
    decoded,
    encoded,
    random_rows,
    scales_of,
)

RULES = [
    optimizers.Adagrad(0.1),
    optimizers.RowWiseAdagrad(0.1),
    optimizers.Adam(0.1),
]
BITS = (8, 4)
LOOKUP = jax_tt.Lookup()
N, D = 40, 16
# Row 3 is read three times, row 5 not at all.
BAGS = jax_tt.Bags.from_ragged(
    [[3, 3, 39], [], [0, 3], [7]], [[0.5, 2.0, 1.0], [], [-1.0, 1.5], [3.0]]
)
TOUCHED = np.array([0, 3, 7, 39])

method = method_fixture(*WAYS)


def trained_table(bits, rule, **options):
    update = jax_tt.Update(rule, **options)
    return jax_tt.quantize(random_rows(N, D), bits, update=update)


def trained(table, state):
    return {name: state[name] for name in table.spec.trained_names}


def stepped(table, state, bags=BAGS, lookup=LOOKUP, key=None):
    """The state after a step, and the gradient of the weights."""
    return _step(table, lookup, trained(table, state), state, bags, bags.weights, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(table, lookup, own, state, bags, weights, key):
    def loss(own, weights):
        given = jax_tt.Bags(bags.ids, bags.offsets, weights)
        inputs = jax_tt.extension.StepInputs(key=key)
        out, _ = jax_tt.lookup_bags(table, {**state, **own}, given, lookup, inputs)
        return jnp.sum(jnp.sin(out))

    return jax.grad(loss, argnums=(0, 1))(own, weights)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_step_is_that_of_the_dense_table_rounded(method, bits, rule):
    table, state = trained_table(bits, rule, stochastic_rounding=False)
    dense = jax_tt.tables.DenseTable(N, D, update=jax_tt.Update(rule))
    params = {"embedding": to_dense(table, state)}
    lookup = jax_tt.Lookup(method=method)
    new, of_weights = stepped(table, state, lookup=lookup)
    want, want_weights = stepped(dense, params | dense.init_rest(params))
    np.testing.assert_allclose(of_weights, want_weights, rtol=1e-5, atol=1e-6)
    packed = bytes_of(state).copy()
    packed[TOUCHED] = encoded(np.asarray(want["embedding"])[TOUCHED], bits)
    rows, expected = to_dense(table, new), decoded(packed, D, bits)
    # A number in the middle between two levels may be rounded to either.
    scale = scales_of(packed)
    assert (np.abs(rows - expected) <= 1.01 * scale).all()
    assert (np.abs(rows - expected) <= 1e-3 * scale + 1e-5).mean() > 0.99
    rest = np.setdiff1d(np.arange(N), TOUCHED)
    np.testing.assert_array_equal(bytes_of(new)[rest], packed[rest])
    for name in want:
        if name not in ("embedding", "sentinel", "used"):
            np.testing.assert_allclose(new[name], want[name], rtol=1e-5, atol=1e-6)
    assert float(new["sentinel"]) == float(new["step"]) == 1


def adam_moments(mu, nu, gradient, t):
    """New moments, and the first moment with which a step is the learning rate."""
    mu, nu = 0.9 * mu + 0.1 * gradient, 0.999 * nu + 0.001 * gradient**2
    return mu, nu, (1 - 0.9**t) * (np.sqrt(nu / (1 - 0.999**t)) + 1e-8)


def simulated(rows, steps, bits, rate, rng, adam):
    """SGD or Adam on rows, in float64, each step rounded stochastically; ``steps`` are gradients."""
    highest, mu, nu, unit = 2**bits - 1, 0.0, 0.0, 0.0
    for t, gradient in enumerate(steps, 1):
        if adam:
            mu, nu, unit = adam_moments(mu, nu, gradient, t)
        new = rows - rate * (mu / unit if adam else gradient)
        low = new.min(-1, keepdims=True)
        offset = low.astype(np.float16)
        offset = np.where(offset > low, np.nextafter(offset, np.float16(-np.inf)), offset)
        spread = (new.max(-1, keepdims=True) - offset) / highest
        scale = spread.astype(np.float16)
        scale = np.where(scale < spread, np.nextafter(scale, np.float16(np.inf)), scale)
        scale, offset = scale.astype(np.float64), offset.astype(np.float64)
        at = (new - offset) / scale
        rows = offset + scale * np.clip(np.floor(at + rng.random(at.shape)), 0, highest)
        mu = mu - np.minimum(0.1 / (0.9 * rate), 10 / scale) * (new - rows) * unit
    return rows


def without_rounding(rows, steps, rate, adam):
    """The rows after these steps, in float64."""
    mu, nu = 0.0, 0.0
    for t, gradient in enumerate(steps, 1):
        mu, nu, unit = adam_moments(mu, nu, gradient, t)
        rows = rows - rate * (mu / unit if adam else gradient)
    return rows


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rule", [optimizers.SGD, optimizers.Adam])
def test_training_is_exact_in_expectation(bits, rule):
    """The means of 10,000 trajectories of three steps equal those of a simulation, and those without rounding."""
    draws, rate, adam = 10_000, 0.05, rule is optimizers.Adam
    table, state = trained_table(bits, rule(rate))
    gradients = np.random.default_rng(1).normal(size=(3, D)).astype(np.float32)
    ids, lookup = jnp.array([[3]]), jax_tt.Lookup(method="reference", bounds="zero")
    # Of one row, so that 10,000 tables fit.
    one = jax_tt.tables.QuantizedTable(4, D, bits, table.update)
    start = {**one.init_rest({"packed": state["packed"][:4]}), "packed": state["packed"][:4]}

    def run(key):
        inputs = jax_tt.extension.StepInputs(key=key)

        def step(own, gradient):
            def loss(own):
                rows, _ = jax_tt.lookup_bags(one, own, ids, lookup, inputs)
                return jnp.vdot(rows[0], gradient)

            return jax.grad(loss)(own), None

        return to_dense(one, jax.lax.scan(step, start, gradients)[0])[3]

    found = np.asarray(
        jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(7), draws)), np.float64
    )
    first = np.asarray(to_dense(one, start)[3], np.float64)
    rng = np.random.default_rng(2)
    gradients = gradients.astype(np.float64)
    model = simulated(np.tile(first, (draws, 1)), gradients, bits, rate, rng, adam)
    exact = without_rounding(first, gradients, rate, adam)
    for other, spread in (
        (model.mean(0), np.hypot(found.std(0), model.std(0))),
        (exact, found.std(0)),
    ):
        error = np.abs(found.mean(0) - other)
        assert (error <= 5 * spread / np.sqrt(draws) + 1e-6).all()
    np.testing.assert_allclose(found.std(0), model.std(0), rtol=0.1, atol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def after_steps(table, state, gradients):
    """The state after a step with each of the gradients ``[steps, N, D]`` of all rows."""

    def step(state, gradient):
        def loss(own):
            lookup = jax_tt.Lookup(method="reference")
            rows, _ = jax_tt.lookup_bags(table, own, jnp.arange(N)[:, None], lookup)
            return jnp.vdot(rows, gradient)

        return jax.grad(loss)(state), None

    return jax.lax.scan(step, state, gradients)[0]


@pytest.mark.parametrize(
    "rule",
    [
        optimizers.Adam(0.02),
        pytest.param(optimizers.Adam(0.02, rowwise_bias_correction=True), marks=pytest.mark.slow),
        pytest.param(optimizers.PartialRowWiseAdam(0.02), marks=pytest.mark.slow),
    ],
    ids=["adam", "rowwise", "partial"],
)
def test_errors_of_rules_with_a_first_moment_do_not_add_up(rule):
    """After 200 steps, rows are about as far from those of a dense table as after one rounding."""
    table, state = trained_table(4, rule)
    dense = jax_tt.tables.DenseTable(N, D, update=jax_tt.Update(rule))
    params = {"embedding": to_dense(table, state)}
    gradients = np.random.default_rng(1).normal(0.2, 1, (200, N, D)).astype(np.float32)
    new = after_steps(table, state, gradients)
    want = after_steps(dense, params | dense.init_rest(params), gradients)["embedding"]
    errors = (to_dense(table, new) - want) / scales_of(bytes_of(new))
    # If the rule does not make up for errors, it is 1.9.
    assert np.sqrt(np.mean(errors**2)) < 0.75


def test_an_error_adds_at_most_ten_learning_rates_to_a_step():
    for options in [{"learning_rate": 0.0}, {"learning_rate": 0.1, "b1": 0.0}]:
        rule, (rows, ones) = optimizers.Adam(**options), (jnp.zeros((1, D)), jnp.ones((1, D)))
        hyper = rule.hyperparameters(jnp.int32(0))
        _, slots = rule.update_rows(rows, ones, (rows, rows), hyper)
        # The first moment is now that of a step of the learning rate.
        mu, nu = rule.compensated(slots, 0.5 * ones, ones[:, 0], hyper)
        np.testing.assert_allclose(mu, slots[0] * (1 - 10 * 0.5), rtol=1e-4)
        np.testing.assert_array_equal(nu, slots[1])


# One program for several tests: stochastic rounding, skipped steps, ids out of range.
SKIPPING = jax_tt.Update(optimizers.Adagrad(0.1), skip_nonfinite=True)


def checked(table, state, method, ids, weights, key=0):
    """The state after a step by the ids of `BAGS`, or by others with other weights in its bags."""
    bags = jax_tt.Bags(np.asarray(ids, np.int32), BAGS.offsets, np.asarray(weights, np.float32))
    lookup = jax_tt.Lookup(method=method, bounds="zero")
    return stepped(table, state, bags, lookup, jax.random.key(key))[0]


def test_random_bits_depend_on_key_step_row_and_column_alone(method):
    table, state = jax_tt.quantize(random_rows(N, D), 8, update=SKIPPING)

    def after(ids, key=0):
        # Each bag has one row, as the other ids are out of range.
        return np.asarray(to_dense(table, checked(table, state, method, ids, np.ones(6), key)))

    one, other = after([N, N, 3, N, 7, 20]), after([N, N, 20, N, 5, 3])
    np.testing.assert_array_equal(one[[3, 20]], other[[3, 20]])
    assert (after([N, N, 3, N, 7, 20], key=1)[3] != one[3]).any()


@pytest.mark.parametrize("bits", BITS)
def test_all_bytes_survive(method, bits):
    """Also those that are NaN as float32, in rows that are read and in others."""
    table = jax_tt.tables.QuantizedTable(N, D, bits, SKIPPING)
    packed = np.random.default_rng(0).integers(0, 256, (N, table.row_bytes), np.uint8)
    packed[:20, 4:] = np.resize(
        [0, 0, 0xA0, 0x7F, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0, 0x80, 0xFF], packed[:20, 4:].shape
    )
    packed[:, :4] = np.array([0.25, -1], np.float16).view(np.uint8)
    params = {"packed": jnp.asarray(packed.view(np.float32))}
    state = params | table.init_rest(params)
    new = checked(table, state, method, BAGS.ids, np.zeros(6))
    rest = np.setdiff1d(np.arange(N), TOUCHED)
    np.testing.assert_array_equal(bytes_of(new)[rest], packed[rest])
    # Rows that are read are rounded anew, even by a step of size 0.
    errors = np.abs(to_dense(table, new) - decoded(packed, D, bits))
    assert (errors <= 1.01 * scales_of(bytes_of(new))).all()
    frozen, own = jax_tt.extension.freeze(table, state)
    np.testing.assert_array_equal(own["packed"], packed)
    assert frozen == jax_tt.extension.with_update(table, None)


def test_steps_that_are_refused(method):
    table, state = jax_tt.quantize(random_rows(N, D), 8, update=SKIPPING)
    bad, outside = np.array(BAGS.weights), np.array(BAGS.ids)
    bad[0], outside[0] = np.nan, N
    new = checked(table, state, method, BAGS.ids, bad)
    assert_same_bits({name: new[name] for name in state}, state)
    new = checked(table, state, method, outside, BAGS.weights)
    rest = np.setdiff1d(np.arange(N), TOUCHED)
    np.testing.assert_array_equal(bytes_of(new)[rest], bytes_of(state)[rest])


@pytest.mark.slow
@pytest.mark.optimized
def test_a_donated_table_is_updated_in_place():
    n = 5003  # a number that no other array has
    table = jax_tt.tables.QuantizedTable(n, D, 8, jax_tt.Update(optimizers.RowWiseAdagrad(0.1)))
    state = jax.jit(table.init)(jax.random.key(0))

    @functools.partial(jax.jit, donate_argnums=0)
    @jax.grad
    def step(own, ids):
        return jnp.sum(jax_tt.lookup_bags(table, own, ids)[0] ** 2)

    ids = jnp.arange(12).reshape(3, 4)
    program = step.lower(state, ids).compile()
    text = program.as_text() or ""
    assert f"f32[{n},5]" in text
    assert f"= f32[{n},5]{{1,0}} copy(" not in text
    places = {name: state[name].unsafe_buffer_pointer() for name in ("packed", "slot_sum_0")}
    new = program(state, ids)
    assert places == {name: new[name].unsafe_buffer_pointer() for name in places}


def test_the_first_step_of_quantized_rows_is_in_place(monkeypatch):
    def aligned(shape, dtype=np.float64, *_, **__):
        """Where JAX on the CPU shares the memory of numpy's arrays."""
        memory = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : memory.size - 64 + start].view(dtype).reshape(shape)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", aligned)
        table, state = trained_table(8, optimizers.SGD(0.1))
    place = state["packed"].unsafe_buffer_pointer()
    step = jax.grad(lambda own: jnp.sum(jax_tt.lookup_bags(table, own, BAGS)[0]))
    assert jax.jit(step, donate_argnums=0)(state)["packed"].unsafe_buffer_pointer() == place


def test_changed_tables_are_refused():
    table, state = trained_table(8, optimizers.SGD(0.1))
    changed = {**state, "sentinel": jnp.float32(2)}
    pooled = jax.jit(functools.partial(jax_tt.lookup_bags, table), static_argnames="method")
    with pytest.raises(Exception, match="changed by something other than its own update"):
        jax.block_until_ready(pooled(changed, BAGS, method="native"))
    out, _ = pooled(changed, BAGS, method="reference")
    assert np.isnan(out).all()


def test_gradients_whose_squares_overflow_move_no_row():
    table, state = trained_table(4, optimizers.Adam(0.1), skip_nonfinite=True)
    before = np.asarray(to_dense(table, state))

    @jax.jit
    @jax.grad
    def step(own, scale):
        rows, _ = jax_tt.lookup_bags(table, own, BAGS)
        return scale * jnp.sum(rows)

    for scale in (1e20, 1.0):
        state = {**state, **step(trained(table, state), scale)}
        assert np.isfinite(state["slot_mu_0"]).all()
        assert np.isfinite(to_dense(table, state)).all()
    assert np.abs(to_dense(table, state) - before).max() < 1


def test_a_row_that_is_no_longer_finite_is_seen():
    table, state = trained_table(8, optimizers.SGD(1e38))
    new, _ = stepped(table, state)
    rows = np.asarray(to_dense(table, new))
    assert not np.isfinite(rows[3]).any() and np.isfinite(rows[5]).all()


def test_layers():
    table, _ = trained_table(8, optimizers.Adagrad(0.1))
    model = jax_tt.TableEmbedBag(table, rngs=nnx.Rngs(0))
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.01))

    @nnx.jit
    def step(model, opt):
        loss, grads = jax_tt.value_and_grad(lambda m: jnp.sum((m(BAGS) - 1) ** 2))(model)
        opt.update(model, grads)
        return loss

    losses = [float(step(model, opt)) for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    linen = jax_tt.linen.TableEmbed(table, combiner="sum")
    variables = jax.jit(linen.init)(jax.random.key(0), BAGS)
    assert list(variables) == ["_overwrite_with_gradient"]

    @jax.jit
    @jax.value_and_grad
    def step_of_linen(variables: Any) -> jax.Array:
        pooled: Any = linen.apply(variables, BAGS)
        return jnp.sum((pooled - 1) ** 2)

    value, after = step_of_linen(variables)
    assert step_of_linen(after)[0] < value


def test_arguments_that_do_not_fit():
    for make, message in [
        (
            lambda update: jax_tt.tables.QuantizedTable(4, 16, 3, update),
            "bits: got 3 with an update; expected 8 or 4",
        ),
        (
            lambda update: jax_tt.tables.QuantizedTable(4, 6, 8, update),
            "features: got 6 .* a multiple of 4 at 8 bits",
        ),
        (
            lambda update: jax_tt.tables.QuantizedTable(4, 12, 4, update),
            "features: got 12 .* a multiple of 8 at 4 bits",
        ),
        (
            lambda update: jax_tt.tables.QuantizedTable(4, 16, 8, update.optimizer),
            r"update: got SGD.*expected None or a jax_tt\.Update",
        ),
        (
            lambda update: jax_tt.tables.QuantizedTable(
                4,
                16,
                8,
                jax_tt.Update(
                    optimizers.EnsembleRowWiseAdagrad(0.1, average_every=2, swap_every=4)
                ),
            ),
            "update: got EnsembleRowWiseAdagrad, which changes rows",
        ),
        (
            lambda update: jax_tt.files.save(
                "x.safetensors", {"a": trained_table(8, update.optimizer)}
            ),
            r"jax_tt\.extension\.freeze\(table, state\)",
        ),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            make(jax_tt.Update(optimizers.SGD(0.1)))


def test_scores_are_no_part_of_a_loss():
    table, _ = trained_table(8, optimizers.Adagrad(0.1))
    layer = jax_tt.TableEmbed(table, jax_tt.Lookup(dtype=jnp.bfloat16), rngs=nnx.Rngs(0))
    query = jnp.ones((2, D))
    dense = to_dense(table, {"packed": layer.packed[...]})
    want = np.asarray(dense).sum(1)[None].repeat(2, 0)
    found = np.asarray(layer.attend(query), np.float32)
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=0.05)
    with pytest.raises(TypeError, match="attend is part of the loss, but the table is quantized"):
        jax_tt.grad(lambda layer: layer.attend(query).sum().astype(jnp.float32))(layer)


def test_a_batch_over_devices():
    """The step of the whole batch, on replicas of the table."""
    table, state = trained_table(8, optimizers.Adagrad(0.1))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    ids = np.arange(32).reshape(8, 4) % 11

    @jax.jit
    @jax.grad
    def step(own, ids):
        return jnp.sum(jax_tt.lookup_bags(table, own, ids)[0] ** 2)

    found, want = step(state, jax.device_put(ids, sharding)), step(state, ids)
    # Sums are added in another order, and a number next to a level may be rounded to another one.
    errors = np.abs(np.asarray(to_dense(table, found)) - to_dense(table, want))
    assert (errors <= 1.01 * scales_of(bytes_of(want))).all()
    np.testing.assert_allclose(found["slot_sum_0"], want["slot_sum_0"], rtol=1e-5)
