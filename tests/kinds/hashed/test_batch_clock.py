"""The number of the batch near its end: tables go on as those do whose clock is young."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Placement
from jax_tt._sets.batch_clock import KEPT, LAST
from tests.conftest import method_fixture

method = method_fixture("reference", "native")
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


@pytest.mark.parametrize("policy", ["lru", "lfu", "epoch_lru"])
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


@pytest.mark.full
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
