"""Keys as ids, and what keys without a row read, in lookups of hash tables."""

import dataclasses
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._base import reports
from tests.kinds.hashed.test_hash_tables import EXTREMES

QUIET = jax_tt.hash_table(64, 4, ways=4, safe_check="ignore")
LOOKUP = jax_tt.Lookup()


@partial(jax.jit, static_argnums=0)
def _filled(table, keys):
    return jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), keys)


def filled(table, keys):
    inserted, state = _filled(table, jax_tt.dynamic.split_keys(keys))
    assert int(inserted.counts["refused"]) == 0
    return state


def rows_of(table, state, keys, lookup=LOOKUP):
    # The keys are constants of the program: as arguments, those of 64 bits would be cut.
    return np.asarray(jax.jit(lambda state: jax_tt.lookup(table, state, keys, lookup)[0])(state))


def initial(table, state, keys):
    words = np.asarray(jax_tt.dynamic.split_keys(keys).digits).view(np.uint32)
    return np.asarray(_initial(table, state, words, np.ones(len(words), bool)))


@partial(jax.jit, static_argnums=0)
def _initial(table, state, words, here):
    return table.initial(state, words, here, jnp.float32, "reference")


def trained_state(keys):
    """A state whose rows are not the initial ones."""
    state = filled(QUIET, keys)
    return {**state, "embedding": state["embedding"] + 1}


@pytest.mark.parametrize("x64", [False, True])
def test_all_types_of_ids_are_the_same_keys(x64):
    keys = np.array([*EXTREMES, 2**31, 2**32 - 1, 5], np.uint64)
    with jax.enable_x64(x64):
        state = trained_state(keys)
        want = rows_of(QUIET, state, jax_tt.dynamic.split_keys(keys))
        assert len(np.unique(want, axis=0)) == len(keys)
        np.testing.assert_array_equal(want, initial(QUIET, state, keys) + 1)
        forms = [keys, keys.view(np.int64), keys.view(np.int64).tolist()]
        if x64:
            forms += [jnp.asarray(keys), jnp.asarray(keys.view(np.int64))]
        for form in forms:
            np.testing.assert_array_equal(rows_of(QUIET, state, form), want)
        small = np.array([-1, 5, 0], np.int32)
        expected = want[[2, len(keys) - 1, 0]]
        on_device = jnp.asarray(small)
        for form in (small, jax_tt.dynamic.whole_keys(on_device), small.astype(np.int8)):
            np.testing.assert_array_equal(rows_of(QUIET, state, form), expected)
        unsigned = np.array([2**32 - 1, 2**31], np.uint32)
        np.testing.assert_array_equal(rows_of(QUIET, state, unsigned), want[[-2, -3]])
        if x64:
            np.testing.assert_array_equal(rows_of(QUIET, state, on_device), expected)
            lookup = jax.jit(lambda ids: jax_tt.lookup(QUIET, state, ids, LOOKUP)[0])
            np.testing.assert_array_equal(lookup(keys), want)
            np.testing.assert_array_equal(lookup(keys.view(np.int64)), want)


def test_minus_one_is_padding_in_padded_bags_alone():
    state = trained_state(np.array([-1, 3]))
    own = rows_of(QUIET, state, np.array([-1, 3]))

    def pooled(bags):
        return jax.jit(lambda state: jax_tt.lookup_bags(QUIET, state, bags, LOOKUP)[0])(state)

    ids = np.array([[-1, 3], [-1, -1]])
    np.testing.assert_allclose(pooled(ids), [own[0] + own[1], 2 * own[0]], rtol=1e-6)
    padded = jax_tt.Bags.from_padded(ids)
    np.testing.assert_allclose(pooled(padded), [own[1], 0 * own[1]], rtol=1e-6)
    for form in (ids.astype(np.uint32), ids.astype(np.uint8), jax_tt.dynamic.split_keys(ids)):
        again = jax_tt.Bags(form, None, None, padded=True)
        np.testing.assert_allclose(pooled(again), [own[1], 0 * own[1]], rtol=1e-6)
    ragged = jax_tt.Bags.from_lengths(jax_tt.dynamic.split_keys(np.array([-1, 3, 3])), [1, 2])
    features = {"a": jax_tt.Feature("t"), "b": jax_tt.Feature("t")}
    collection = jax_tt.Collection({"t": QUIET}, features)
    rows, _ = jax_tt.lookup_features(collection, {"t": state}, {"a": ragged, "b": padded})
    np.testing.assert_allclose(rows["a"], [own[0], 2 * own[1]], rtol=1e-6)
    np.testing.assert_allclose(rows["b"], [own[1], 0 * own[1]], rtol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
def test_missing_keys_read_their_initial_rows(combiner, method):
    keys = np.array([7, 8, 9])
    state = trained_state(keys)
    bags = jax_tt.Bags.from_lengths(np.array([7, 70, 8, 71, 71, 9], np.int32), [3, 0, 2, 1])
    every = rows_of(QUIET, state, np.array([7, 70, 8, 71, 71, 9]))
    np.testing.assert_array_equal(every[[1, 3]], initial(QUIET, state, np.array([70, 71])))
    weights = None if combiner == "max" else jnp.array([1.0, 2.0, -1.0, 0.5, 0.25, 3.0])
    given = dataclasses.replace(bags, weights=weights)
    lookup = jax_tt.Lookup(combiner, method=method)

    def own(table, weights):
        bags = dataclasses.replace(given, weights=weights)
        rows, _ = jax_tt.lookup_bags(QUIET, {**state, "embedding": table}, bags, lookup)
        return jnp.sum(jnp.sin(rows)), rows

    def dense(table, weights):
        bags = jax_tt.Bags(jnp.arange(6), given.offsets, weights)
        rows = jax_tt.functional.embed_bag(table, bags, combiner=combiner, method="reference")
        return jnp.sum(jnp.sin(rows)), rows

    step = jax.jit(jax.value_and_grad(own, argnums=(0, 1), has_aux=True))
    (_, rows), (grad, dweights) = step(state["embedding"], weights)
    other = jax.jit(jax.value_and_grad(dense, argnums=(0, 1), has_aux=True))
    (_, want), (expected, want_weights) = other(jnp.asarray(every), weights)
    np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-6)
    if weights is not None:
        np.testing.assert_allclose(dweights, want_weights, rtol=1e-5, atol=1e-6)
    # Only keys with a row have a gradient.
    slots = {e["key"]: e["slot"] for e in jax_tt.dynamic.keys_of(QUIET, state)}
    known = np.zeros_like(grad)
    for position, key in ((0, 7), (2, 8), (5, 9)):
        known[slots[key]] += expected[position]
    np.testing.assert_allclose(grad, known, rtol=1e-5, atol=1e-6)


def test_serving_reads_what_the_table_says():
    state = trained_state(np.array([7]))
    serving = jax_tt.Lookup(train=False)
    ids = np.array([7, 70])
    known = rows_of(QUIET, state, np.array([7]))[0]
    missing = initial(QUIET, state, np.array([70]))[0]
    for value, want in (("initial", missing), ("zeros", 0 * known), (5, state["embedding"][5])):
        table = dataclasses.replace(QUIET, missing=value)
        rows = rows_of(table, state, ids, serving)
        np.testing.assert_array_equal(rows, [known, want])
        # A frozen table reads the same in a call with train=True.
        frozen = dataclasses.replace(table, frozen=True)
        np.testing.assert_array_equal(rows_of(frozen, state, ids), [known, want])


def test_safe_check():
    warns, fails = (dataclasses.replace(QUIET, safe_check=check) for check in ("warn", "error"))
    state, ids = filled(QUIET, np.array([1])), np.array([1, 2, 3])
    for lookup in (LOOKUP, jax_tt.Lookup(method="reference")):
        reports.forget()
        with pytest.warns(jax_tt.dynamic.MissingKeyWarning, match="2 ids of a training batch"):
            jax.block_until_ready(jax_tt.lookup(warns, state, ids, lookup)[0])
            jax.effects_barrier()
    with pytest.raises(Exception, match="2 ids of a training batch"):
        jax.block_until_ready(jax_tt.lookup(fails, state, ids, LOOKUP)[0])
        jax.effects_barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for table in (warns, fails):
            rows_of(table, state, ids, jax_tt.Lookup(train=False))
            rows_of(table, state, np.array([1, 1]))
        jax.effects_barrier()
    full = jax_tt.hash_table(4, 4, ways=4, policy="none", safe_check="error")
    with pytest.raises(Exception, match="2 new keys of a batch found no room"):
        _, state = jax_tt.dynamic.insert(full, full.init(jax.random.key(0)), np.arange(6))
        jax.block_until_ready(state)
        jax.effects_barrier()


def test_no_ids():
    state = filled(QUIET, np.array([1]))
    for shape in ((0,), (0, 3), (2, 0)):
        ids = np.zeros(shape, np.int64)

        @jax.jit
        def changed(state, ids=ids):
            inserted, after = jax_tt.dynamic.insert(QUIET, state, ids)
            gone, after = jax_tt.dynamic.remove(QUIET, after, ids)
            return inserted.counts, gone.keys, after["hash_keys"]

        counts, gone, keys = changed(state)
        assert int(counts["requests"]) == 0 and gone.shape == (0, 2)
        np.testing.assert_array_equal(keys, state["hash_keys"])
        assert rows_of(QUIET, state, ids).shape == (*shape, 4)
        if len(shape) == 2:
            pooled, _ = jax_tt.lookup_bags(QUIET, state, ids, LOOKUP)
            assert pooled.shape == (shape[0], 4) and not pooled.any()


def test_a_function_as_initializer():
    def first(keys, features):
        return jnp.broadcast_to(keys[:, 1:].astype(jnp.float32), (len(keys), features))

    table = dataclasses.replace(QUIET, initializer=first)
    state = filled(table, np.array([3, 4]))
    np.testing.assert_array_equal(rows_of(table, state, np.array([3, 4, 5]))[:, 0], [3, 4, 5])
    wrong = dataclasses.replace(QUIET, initializer=lambda keys, features: keys)
    with pytest.raises(ValueError, match=r"initializer: got .*shape \(2, 2\); expected"):
        filled(wrong, np.array([3, 4]))


def test_seeds_and_capacities_do_not_change_initial_rows():
    keys = np.array([5, -7])
    tables = [QUIET, jax_tt.hash_table(16, 4), jax_tt.hash_table(64, 4, ways=4, seed=1)]
    rows = [rows_of(table, filled(table, keys), keys) for table in tables]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert (rows[0] != rows[2]).any()


def test_bad_input():
    state = QUIET.init(jax.random.key(0))

    def lookup(ids, table=QUIET):
        return jax_tt.lookup(table, state, ids, LOOKUP)

    with pytest.raises(ValueError, match="ids: got dtype float64; expected integers"):
        lookup(np.array([1.0]))
    with pytest.raises(ValueError, match="ids: got -1 and 9223372036854775808"):
        lookup([-1, 2**63])
    with pytest.raises(ValueError, match=r"digits: got int32 of shape \(1, 3\); expected int32"):
        lookup(jax_tt.SplitIds(np.zeros((1, 3), np.int32)))
    with pytest.raises(ValueError, match="got traced int32 ids for a table of 64-bit keys"):
        jax.jit(lambda ids: lookup(ids)[0])(np.array([2**40]))
    with pytest.raises(ValueError, match=r"jax_tt\.dynamic\.split_keys"):
        jax_tt.Bags.from_ragged([[2**40]])
    with pytest.raises(TypeError, match="keys: got a traced array"):
        jax.jit(lambda ids: jax_tt.dynamic.split_keys(ids).digits)(np.array([1]))
    with pytest.raises(ValueError, match="state: has no hash_clock"):
        jax_tt.lookup(QUIET, {"embedding": state["embedding"]}, [1], LOOKUP)
    short = {**state, "hash_keys": state["hash_keys"][:-1]}
    with pytest.raises(ValueError, match="hash_keys: got uint32 of shape"):
        jax_tt.lookup(QUIET, short, [1], LOOKUP)
    for table, options in ((QUIET, {"scores": [1]}), (QUIET, {"epoch": 1})):
        with pytest.raises(ValueError, match="expected None"):
            jax_tt.dynamic.insert(table, state, [1], **options)
    custom = dataclasses.replace(QUIET, policy="custom")
    for scores, message in (
        (None, "scores: got None"),
        ([1, 2], r"scores: got .*shape \(2,\); expected one score per key, \(1,\)"),
        ([-1], "scores: got -1; expected integers from 0"),
        ([0.5], "scores: got dtype float64"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_tt.dynamic.insert(custom, state, [1], scores=scores)
    epochs = dataclasses.replace(QUIET, policy="epoch_lfu")
    for epoch, message in ((None, "epoch: got None"), (-1, "epoch: got -1"), (0.5, "got float64")):
        with pytest.raises(ValueError, match=message):
            jax_tt.dynamic.insert(epochs, state, [1], epoch=epoch)
    with pytest.raises(TypeError, match="table: got a DenseTable; expected a HashTable"):
        jax_tt.dynamic.insert(jax_tt.tables.DenseTable(4, 4), state, [1])
    with pytest.raises(ValueError, match="keys, where: got neither"):
        jax_tt.dynamic.remove(QUIET, state)
    with pytest.raises(ValueError, match="where: returned int32"):
        jax_tt.dynamic.remove(QUIET, state, where=lambda view: view.age)
    for where, got in (True, "got a bool"), (lambda view: None, "returned None; expected an array"):
        with pytest.raises(TypeError, match=f"where: {got}"):
            jax_tt.dynamic.remove(QUIET, state, where=where)


BAD_OPTIONS = [
    ({"capacity": 0}, "capacity: got 0"),
    ({"ways": 7}, "ways: got 7 for a capacity of 64; expected a divisor of it. Use the capac"),
    ({"ways": 0}, "ways: got 0"),
    ({"max_capacity": 100}, "max_capacity: got 100 for a capacity of 64.*e.g. 64 or 128"),
    ({"max_capacity": 192}, "max_capacity: got 192 for a capacity of 64.*e.g. 128 or 256"),
    ({"capacity": 256, "ways": 128}, "ways: got 128; expected an integer from 1 to 64"),
    ({"policy": "fifo"}, "policy: got 'fifo'; expected one of"),
    ({"min_age": 0}, "min_age: got 0"),
    ({"min_age": 2**31}, r"min_age: got 2147483648; expected an integer from 1 to 1073741824"),
    ({"admission": 0}, "requests: got 0"),
    ({"admission": 0.5}, "admission: got 0.5"),
    ({"max_capacity": 32}, "max_capacity: got 32 for a capacity of 64"),
    ({"max_capacity": 2**31}, r"max_capacity: got 2147483648 .* less than 2\*\*31"),
    ({"seed": 2**64}, "seed: got"),
    ({"initializer": 3}, "initializer: got 3"),
    ({"missing": "nothing"}, "missing: got 'nothing'; expected one of"),
    ({"missing": 64}, "missing: got 64; expected an integer from 0 to 63"),
    ({"safe_check": "raise"}, "safe_check: got 'raise'"),
]


def test_bad_tables():
    for options, message in BAD_OPTIONS:
        given = {"capacity": 64, "features": 4, **options}
        with pytest.raises((ValueError, TypeError), match=message):
            jax_tt.hash_table(given.pop("capacity"), given.pop("features"), **given)


def test_wrappers_that_do_not_fit():
    order = jax_tt.order.IdOrder(np.arange(64)[::-1])
    with pytest.raises(TypeError, match="got an OrderedTable around a DenseTable"):
        jax_tt.tables.HashTable(jax_tt.tables.OrderedTable(jax_tt.tables.DenseTable(64, 4), order))
    with pytest.raises(TypeError, match="table: got a HashTable"):
        jax_tt.tables.HashTable(QUIET)
    with pytest.raises(TypeError, match="table: got a HashTable"):
        jax_tt.tables.OrderedTable(QUIET, order)
