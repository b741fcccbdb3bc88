"""The number of the batch near its end: tables go on as those do whose clock is young."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Placement
from jax_tt._directories.batch_clock import KEPT, LAST, WHOLE
from jax_tt._native import hash_backend
from jax_tt._native.hash import Clock

OLD = ("hash_touched", "hash_waiting_touched")


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=1)
def insert(table, state, keys, epoch, method):
    options = {} if epoch is None else {"epoch": epoch}
    done, state = jax_tt.dynamic.insert(table, state, keys, method=method, **options)
    return done.counts, state


def aged(table, state, by):
    """The same state, as many batches later, in which nothing was requested."""

    def later(x):
        return np.where(np.asarray(x) > 0, np.asarray(x) + np.asarray(by, x.dtype), 0)

    after = {name: later(x) if name in OLD else x for name, x in state.items()}
    after["hash_clock"] = state["hash_clock"] + np.int32(by)
    words = {"hash_waiting_scores": 0} | ({"hash_scores": 1} if "lru" in table.policy else {})
    for name, word in words.items():
        if name in state:
            scores = np.array(state[name])
            scores[:, word] = later(scores[:, word])
            after[name] = scores
    return jax.tree.map(jnp.asarray, after)


@pytest.mark.parametrize("policy", ["lfu", "epoch_lru"])
def test_an_old_table_goes_on_as_a_young_one(policy, method):
    table = jax_tt.hash_table(
        16, 4, ways=4, policy=policy, min_age=2, admission=2, safe_check="ignore"
    )
    states = [table.init(jax.random.key(0)) for _ in range(2)]
    draw = np.random.default_rng(0)
    old = LAST - 8
    for step in range(24):
        keys = jax_tt.dynamic.split_keys(draw.integers(0, 40, 12) << 33)
        epoch = jnp.int32(step // 5) if policy == "epoch_lru" else None
        (young, states[0]), (counts, states[1]) = (
            insert(table, state, keys, epoch, method) for state in states
        )
        assert jax.tree.map(int, young) == jax.tree.map(int, counts)
        if step == 3:
            states[1] = aged(table, states[1], old - 4)
    assert int(states[1]["hash_clock"]) == KEPT + 24 - (LAST - (old - 4))
    entries = [np.sort(jax_tt.dynamic.keys_of(table, state)[["key", "slot"]]) for state in states]
    np.testing.assert_array_equal(*entries)
    back = int(states[1]["hash_clock"]) - int(states[0]["hash_clock"])
    expected = aged(table, states[0], back)
    for name, array in expected.items():
        np.testing.assert_array_equal(states[1][name], array, err_msg=name)


def test_ages_above_what_is_kept_become_equal():
    table = jax_tt.hash_table(8, 4, ways=8, safe_check="ignore")
    state = table.init(jax.random.key(0))
    for key in range(3):
        _, state = jax_tt.dynamic.insert(table, state, np.array([key]))
    state = {**state, "hash_clock": jnp.int32(LAST)}
    _, state = jax_tt.dynamic.insert(table, state, np.array([2]))
    entries = np.sort(jax_tt.dynamic.keys_of(table, state), order="key")
    assert entries["touched"].tolist() == [1, 1, KEPT + 1]
    assert int(state["hash_clock"]) == KEPT + 1


@pytest.mark.parametrize("sets, ways", [(7, 3), (1500, 64)])
def test_numbers_of_many_sets_are_set_back(sets, ways, method):
    draw = np.random.default_rng(0)
    arrays = [
        np.where(draw.random(shape) < 0.2, 0, draw.integers(1, LAST, shape)).astype(dtype)
        for shape, dtype in [((sets, ways), np.int32), ((sets, 2, ways), np.uint32)] * 2
    ]
    words = (WHOLE, 1, WHOLE, 0)
    (same,), (after,) = (
        hash_backend.set_back_many(
            [Clock(jnp.int32(clock), list(map(jnp.asarray, arrays)), words)], [method]
        )
        for clock in (LAST - 1, LAST)
    )
    jax.tree.map(np.testing.assert_array_equal, same, arrays)
    for before, got, word in zip(arrays, after, words, strict=True):
        back = np.where(before > 0, np.maximum(before.astype(np.int64) - (LAST - KEPT), 1), 0)
        expected, changed = before.copy(), ... if word == WHOLE else np.s_[:, word]
        expected[changed] = back[changed]
        np.testing.assert_array_equal(got, expected)


def test_only_the_reference_has_a_loop_which_waits_for_the_host_on_a_gpu(method):
    table = jax_tt.hash_table(16, 4, ways=4, safe_check="ignore", admission=2)
    keys = jax_tt.dynamic.split_keys(np.arange(3))
    args = table, table.init(jax.random.key(0)), keys, None, method
    assert ("while" in insert.lower(*args).as_text()) == (method == "reference")


@pytest.mark.slow
def test_tables_over_several_devices():
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    plain = jax_tt.hash_table(16, 4, ways=4, safe_check="ignore")
    table = jax_tt.tables.ShardedTable(plain, mesh, "model", Placement.hashed())
    _, state = insert(
        table,
        table.init(jax.random.key(0)),
        jax_tt.dynamic.split_keys(np.array([1, 2])),
        None,
        "auto",
    )
    state = {**state, "hash_clock": jnp.int32(LAST)}
    for keys in ([3, 1], [4, 2]):
        counts, state = insert(
            table, state, jax_tt.dynamic.split_keys(np.array(keys)), None, "auto"
        )
        assert int(counts["hits"]) == 1
    assert int(state["hash_clock"]) == KEPT + 2
    entries = np.sort(jax_tt.dynamic.keys_of(table, state), order="key")
    assert entries["touched"].tolist() == [KEPT + 1, KEPT + 2, KEPT + 1, KEPT + 2]
