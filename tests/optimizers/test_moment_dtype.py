"""Moments of the Adam family in bfloat16."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tt
from jax_tt import optimizers
from jax_tt._jax.rounding import fold_key

ROWS, WIDTH = 24, 9
RULES = {
    "adam": optimizers.Adam(0.02, weight_decay=0.01),
    "row-wise correction": optimizers.Adam(0.02, rowwise_bias_correction=True),
    "partial lamb": optimizers.PartialRowWiseLAMB(0.02),
}
KINDS = {
    "dense": jax_tt.dense_table(ROWS, WIDTH),
    "dense, in packets": jax_tt.dense_table(ROWS, 8, param_dtype="bfloat16"),
    "tensor train": jax_tt.tt_table(ROWS, WIDTH, tt_ranks=3),
}


def narrow(rule, dtype="bfloat16"):
    return dataclasses.replace(rule, moment_dtype=dtype)


def of_kind(kind, rule, **options):
    return jax_tt.extension.with_update(KINDS[kind], jax_tt.Update(rule, **options))


@functools.cache
def stepper(table, method):
    """What makes the state of a collection of this table, and a step of it."""
    collection = jax_tt.Collection({"t": table}, {"f": jax_tt.Feature("t")})

    @jax.jit
    def step(state, ids, g):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            lookup = jax_tt.Lookup(method=method)
            rows, _ = jax_tt.lookup_features(collection, arrays, {"f": ids}, lookup)
            return jnp.sum(rows["f"].astype(jnp.float32) * g)

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    return functools.partial(jax.jit(collection.init), jax.random.key(0)), step


def train(table, method, steps=20, g_scale=1.0):
    """The state of a table after steps with ids that repeat, and rows that no step reads."""
    init, step = stepper(table, method)
    state = init()
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.integers(0, ROWS - 4, (5, 3)).astype(np.int32)
        g = g_scale * rng.integers(-8, 9, (5, table.features)).astype(np.float32) / 8
        state = step(state, ids, g)
    return {name: np.asarray(value, np.float64) for name, value in state["t"].items()}


def moments(state):
    return {name: value for name, value in state.items() if name.startswith(("slot_mu", "slot_nu"))}


CASES = [
    *((name, "dense") for name in RULES),
    *(("adam", kind) for kind in KINDS if kind != "dense"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_moments_are_those_of_float32_within_their_rounding(name, kind, method):
    """Rounded to nearest; 20 steps let the errors of 2^-9 each add up to a few of them."""
    found = train(of_kind(kind, narrow(RULES[name]), stochastic_rounding=False), method)
    exact = train(of_kind(kind, RULES[name], stochastic_rounding=False), method)
    table = of_kind(kind, narrow(RULES[name]))
    state = table.init(jax.random.key(0))
    narrow_ones = {array.name for array in table.spec.arrays if array.dtype == jnp.bfloat16}
    for array, value in found.items():
        wide = np.abs(exact[array]).max()
        np.testing.assert_allclose(value, exact[array], rtol=0, atol=0.02 * wide, err_msg=array)
        if array in narrow_ones:
            assert state[array].dtype == jnp.bfloat16
            kept = np.asarray(value, np.float32)
            np.testing.assert_array_equal(kept, kept.astype(jnp.bfloat16).astype(np.float32))
    # It is the narrow state that went through the steps.
    assert any(np.any(value != exact[array]) for array, value in moments(found).items())


@pytest.mark.each_way
@pytest.mark.parametrize("kind", KINDS)
def test_first_step_is_rounded_once(kind, method):
    """From moments of zero, a step to nearest is the step of float32, rounded."""
    found = train(of_kind(kind, narrow(RULES["adam"]), stochastic_rounding=False), method, steps=1)
    exact = train(of_kind(kind, RULES["adam"], stochastic_rounding=False), method, steps=1)
    for array, value in moments(exact).items():
        rounded = value.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
        # Sums of gradients may differ in the last bit of float32, which moves a tie.
        np.testing.assert_allclose(found[array], rounded, rtol=2**-7, atol=0)
        assert np.mean(found[array] == rounded) > 0.95
    np.testing.assert_array_equal(moments(found).keys(), moments(exact).keys())


def test_stochastic_rounding_keeps_small_changes(method):
    """A second moment of constant gradients grows by less than half a unit in the last place in most steps."""
    rule = narrow(optimizers.Adam(0.0, b1=0.0, b2=0.999))
    steps, means = 600, {}
    ids, g = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 256))
    for stochastic in (False, True):
        table = jax_tt.dense_table(1, 256, optimizer=rule, stochastic_rounding=stochastic)
        init, step = stepper(table, method)
        repeated = jax.jit(
            functools.partial(lax.fori_loop, 0, steps, lambda _, s, step=step: step(s, ids, g))
        )
        state = repeated(init())
        means[stochastic] = float(np.mean(np.asarray(state["t"]["slot_nu_0"], np.float64)))
    expected = 1 - 0.999**steps
    # The standard error of the mean over 256 entries is about 0.001.
    assert abs(means[True] - expected) < 0.005
    assert means[False] < 0.8 * expected


@pytest.mark.parametrize("kind", ["dense", "tensor train"])
def test_a_step_that_is_not_taken_changes_no_bit(kind, method):
    init, step = stepper(of_kind(kind, narrow(RULES["adam"]), skip_nonfinite=True), method)
    ids = np.array([[1, 2, 2], [0, 1, 5]], np.int32)
    g = np.ones((2, KINDS[kind].features), np.float32)
    before = step(init(), ids, g)
    kept = {array: np.asarray(before["t"][array], np.float32) for array in before["t"]}
    after = step(before, ids, np.inf * g)
    for array, value in kept.items():
        np.testing.assert_array_equal(np.asarray(after["t"][array], np.float32), value)


def test_cached_rows_have_them_too(method):
    rule = narrow(optimizers.Adam(0.01))
    table = jax_tt.tt_table(200, 8, tt_ranks=2, optimizer=rule, cache=jax_tt.RowCache(20, ways=4))
    state = table.init(jax.random.key(0))
    dtypes = {name: array.dtype for name, array in state.items() if "slot_" in name}
    assert len(dtypes) == 8
    assert set(dtypes.values()) == {np.dtype(jnp.bfloat16)}
    init, step = stepper(table, method)
    whole = step(init(), np.arange(6).reshape(2, 3), np.ones((2, 8), "f4"))
    assert {whole["t"][name].dtype for name in dtypes} == {np.dtype(jnp.bfloat16)}


def test_other_types_are_refused():
    with pytest.raises(
        ValueError,
        match=re.escape("moment_dtype: got 'float16'; expected one of 'float32', 'bfloat16'"),
    ):
        optimizers.Adam(0.1, moment_dtype=jnp.float16)
    with pytest.raises(TypeError, match=re.escape("moment_dtype: got 3")):
        optimizers.Adam(0.1, moment_dtype=3)
    assert optimizers.LAMB(0.1, moment_dtype=jnp.bfloat16) == optimizers.LAMB(
        0.1, moment_dtype="bfloat16"
    )
    with pytest.raises(TypeError, match="moment_dtype: got"):
        optimizers.Adam(0.1, moment_dtype=jnp.zeros(3))
    table = jax_tt.dense_table(5, 4, optimizer=optimizers.Adam(0.1, moment_dtype="bfloat16"))
    state = table.init(jax.random.key(0))
    state["slot_mu_0"] = state["slot_mu_0"].astype(jnp.float32)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "slot_mu_0: got float32 of shape (5, 4); expected bfloat16 of shape (5, 4)"
        ),
    ):
        jax_tt.extension.check_state(table, state)


class TwoTypes(optimizers.Adam):
    """A rule whose slots are of ``dtypes``."""

    dtypes = ("float32", "bfloat16")

    @property
    def slots(self):
        names, rowwise = ("mu", "nu"), (False, self.dtypes[0] == "float32" and len(self.dtypes) > 2)
        return tuple(
            optimizers.Slot(name, each, 0.0, dtype=dtype)
            for name, each, dtype in zip(names, rowwise, self.dtypes, strict=False)
        )


def test_types_of_slots_that_tables_cannot_have(monkeypatch):
    of_one = "slot 'mu' of TwoTypes: got dtype='float16'; expected 'float32' or"
    for dtypes, message in (
        (("float32", "bfloat16"), "slots per entry of TwoTypes: got dtypes"),
        (("float16", "float16"), of_one),
        (("float32", "bfloat16", "row"), "expected 'float32' per row"),
    ):
        monkeypatch.setattr(TwoTypes, "dtypes", dtypes)
        with pytest.raises(ValueError, match=re.escape(message)):
            jax_tt.dense_table(5, 4, optimizer=TwoTypes(0.1))


def test_arrays_of_a_step_are_rounded_by_numbers_of_their_own():
    key = jax.random.key(0)
    words = [jax.random.key_data(fold_key(key, k)).tolist() for k in range(3)]
    assert len({*map(tuple, words)}) == 3
    assert fold_key(None, 1) is None
