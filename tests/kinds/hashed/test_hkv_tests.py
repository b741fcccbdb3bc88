"""The tests of HierarchicalKV that apply to hash tables, under their names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt

ROWS, D = 64, 4
EXTREMES = np.array([0, -1, 2**63 - 1, -(2**63), 1], np.int64)


def table_of(**options):
    options = {"ways": 8, "safe_check": "ignore", "optimizer": jax_tt.optimizers.SGD(1.0)} | options
    table = jax_tt.hash_table(ROWS, D, **options)
    return table, table.init(jax.random.key(0))


def insert(table, state, keys, **options):
    return jax_tt.dynamic.insert(
        table, state, jax_tt.dynamic.split_keys(np.asarray(keys, np.int64)), **options
    )


def rows_of(table, state, keys, train=False):
    lookup = jax_tt.Lookup(train=train)
    return jax_tt.lookup(table, state, jax_tt.dynamic.split_keys(np.asarray(keys)), lookup)[0]


def stepped(table, state, keys, grads):
    """A step of SGD with rate 1 on rows, whose gradients are given."""
    ids = jax_tt.dynamic.split_keys(np.asarray(keys))

    def loss(own):
        rows, _ = jax_tt.lookup(table, {**state, **own}, ids)
        return jnp.sum(rows * grads)

    own = {name: state[name] for name in table.spec.trained_names}
    return {**state, **jax.grad(loss)(own)}


def keys_in(table, state):
    return {int(key) for key in jax_tt.dynamic.keys_of(table, state)["key"].astype(np.int64)}


def scores_in(table, state):
    entries = jax_tt.dynamic.keys_of(table, state)
    return dict(
        zip(entries["key"].astype(np.int64).tolist(), entries["score"].tolist(), strict=True)
    )


def test_basic():
    table, state = table_of()
    assert not keys_in(table, state)
    done, state = insert(table, state, EXTREMES)
    assert keys_in(table, state) == set(EXTREMES.tolist())
    assert int(done.counts["inserted"]) == 5
    done, state = insert(table, state, EXTREMES)
    assert int(done.counts["inserted"]) == 0
    assert int(done.counts["hits"]) == 5


def test_basic_when_full():
    table, state = table_of(policy="none")
    done, state = insert(table, state, np.arange(4 * ROWS))
    kept = keys_in(table, state)
    assert int(done.counts["inserted"]) == len(kept) > 0.9 * ROWS
    assert int(done.counts["refused"]) == 4 * ROWS - len(kept)
    rest = [key for key in range(4 * ROWS) if key not in kept]
    # A key without room reads its initial value.
    fresh, empty = table_of()
    assert (rows_of(table, state, rest) == rows_of(fresh, empty, rest)).all()


def test_find_or_insert():
    table, state = table_of()
    _, state = insert(table, state, [3, 3, 4])
    known = rows_of(table, state, [3, 4, 5])
    done, state = insert(table, state, [5, 4, 3, 5])
    assert int(done.counts["unique"]) == 3
    assert int(done.counts["inserted"]) == 1
    assert (rows_of(table, state, [3, 4, 5]) == known).all()


def test_insert_or_assign(tmp_path):
    table, state = table_of()
    _, state = insert(table, state, [1, 2, 3])
    changed = stepped(table, state, [2, 3], jnp.ones((2, D)))
    _, changed = insert(table, changed, [9])
    jax_tt.files.dump(table, changed, tmp_path / "rows")
    _, state = jax_tt.files.load_dump(table, state, tmp_path / "rows")
    keys = [1, 2, 3, 9]
    assert (rows_of(table, state, keys) == rows_of(table, changed, keys)).all()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_insert_and_evict(policy):
    table, state = table_of(policy=policy)
    evicted = 0
    for step in range(6):
        alive = sorted(keys_in(table, state))
        before = (
            dict(zip(alive, np.asarray(rows_of(table, state, alive)), strict=True)) if alive else {}
        )
        done, state = insert(table, state, np.arange(40) + 40 * step, return_evicted=True)
        there = np.asarray(done.evicted.touched) > 0
        left = np.asarray(done.evicted.keys)[there, 1].tolist()
        rows = np.asarray(done.evicted.arrays["embedding"])[there]
        assert len(set(left)) == int(done.counts["evicted"])
        assert all((row == before[key]).all() for key, row in zip(left, rows, strict=True))
        assert not keys_in(table, state) & set(left)
        evicted += len(left)
    assert evicted > 0


def test_accum_or_assign():
    table, state = table_of()
    _, state = insert(table, state, [7, 8])
    before = rows_of(table, state, [7, 8])
    # Gradients of equal keys are summed, and the row is stepped once.
    grads = jnp.arange(12.0).reshape(3, D)
    state = stepped(table, state, [7, 8, 7], grads)
    after = rows_of(table, state, [7, 8])
    expected = before - jnp.stack([grads[0] + grads[2], grads[1]])
    assert (after == expected).all()


def test_assign_scores():
    table, state = table_of(policy="custom")
    _, state = insert(table, state, [1, 2], scores=np.array([5, 6], np.uint64))
    _, state = insert(table, state, [2], scores=np.array([2**64 - 1], np.uint64))
    assert scores_in(table, state) == {1: 5, 2: 2**64 - 1}


def test_erase():
    table, state = table_of()
    _, state = insert(table, state, EXTREMES)
    gone, state = jax_tt.dynamic.remove(table, state, jax_tt.dynamic.split_keys(EXTREMES[:2]))
    assert keys_in(table, state) == set(EXTREMES[2:].tolist())
    assert int((gone.touched > 0).sum()) == 2


def test_erase_if():
    table, state = table_of(policy="lfu")
    _, state = insert(table, state, [1, 1, 2, 3, 3, 3])
    often = lambda view: view.scores[:, 1] < 2  # noqa: E731
    gone, state = jax_tt.dynamic.remove(table, state, where=often, size=4)
    assert keys_in(table, state) == {1, 3}
    assert gone.keys[:, 1].tolist()[0] == 2


def test_export_batch(tmp_path):
    table, state = table_of()
    _, state = insert(table, state, np.arange(40))
    jax_tt.files.dump(table, state, tmp_path / "rows", rows_per_file=7)
    assert len(list((tmp_path / "rows").glob("keys-*"))) == 6
    counts, found = jax_tt.files.load_dump(table, table.init(jax.random.key(1)), tmp_path / "rows")
    assert counts.rows == 40
    assert keys_in(table, found) == set(range(40))


def test_export_batch_if(tmp_path):
    table, state = table_of()
    _, state = insert(table, state, np.arange(10))
    last = int(state["hash_clock"])
    jax_tt.files.dump(table, state, tmp_path / "rows")
    _, state = insert(table, state, [3, 20])
    assert jax_tt.files.dump(table, state, tmp_path / "new", since=tmp_path / "rows") == 2
    entries = jax_tt.dynamic.keys_of(table, state)
    assert set(entries["key"][entries["touched"] > last]) == {3, 20}
    found = table.init(jax.random.key(1))
    for name in "rows", "new":
        _, found = jax_tt.files.load_dump(table, found, tmp_path / name)
    assert keys_in(table, found) == {*range(10), 20}


def test_rehash_on_big_batch():
    table, state = table_of(policy="none", max_capacity=8 * ROWS)
    _, state = insert(table, state, np.arange(40))
    before = rows_of(table, state, np.arange(40))
    table, state = jax_tt.dynamic.grow_if_full(table, state, max_load=0.1)
    assert table.num_embeddings == 8 * ROWS
    assert keys_in(table, state) == set(range(40))
    assert (rows_of(table, state, np.arange(40)) == before).all()
    for keys in np.arange(300).reshape(6, 50):
        done, state = insert(table, state, keys)
        assert int(done.counts["refused"]) == 0


def test_find_with_missed_keys():
    table, state = table_of(missing="zeros")
    _, state = insert(table, state, [5])
    rows = rows_of(table, state, [5, 6])
    assert rows[0].any()
    assert not rows[1].any()


def test_save_and_load(tmp_path):
    table, state = table_of()
    _, state = insert(table, state, EXTREMES)
    state = stepped(table, state, EXTREMES, jnp.ones((5, D)))
    jax_tt.files.dump(table, state, tmp_path / "rows")
    _, found = jax_tt.files.load_dump(table, table.init(jax.random.key(9)), tmp_path / "rows")
    assert (rows_of(table, found, EXTREMES) == rows_of(table, state, EXTREMES)).all()


def full(policy, **options):
    """A table of one set, with the keys 0 to 7 in it."""
    table = jax_tt.hash_table(8, D, policy=policy, ways=8, safe_check="ignore")
    _, state = insert(table, table.init(jax.random.key(0)), np.arange(8), **options)
    return table, state


def test_evict_strategy_lru():
    table, state = full("lru")
    _, state = insert(table, state, [0, 1, 2])
    _, state = insert(table, state, [8, 9])
    assert {0, 1, 2, 8, 9} < keys_in(table, state)


def test_evict_strategy_lfu():
    table, state = full("lfu")
    _, state = insert(table, state, [0, 0, 1, 1, 2, 3, 4, 5, 6])
    _, state = insert(table, state, [8])
    assert keys_in(table, state) == {0, 1, 2, 3, 4, 5, 6, 8}
    # A key that was requested less often than all others is refused.
    _, state = insert(table, state, [0, 1, 2, 3, 4, 5, 6, 8])
    done, state = insert(table, state, [9])
    assert int(done.counts["refused"]) == 1


def test_evict_strategy_epochlru():
    table, state = full("epoch_lru", epoch=1)
    _, state = insert(table, state, [0, 1], epoch=2)
    _, state = insert(table, state, np.arange(8, 14), epoch=2)
    assert keys_in(table, state) == {0, 1, *range(8, 14)}


def test_evict_strategy_epochlfu():
    table, state = full("epoch_lfu", epoch=1)
    _, state = insert(table, state, [0, 0, 0, 1], epoch=1)
    _, state = insert(table, state, np.arange(8, 15), epoch=2)
    # The keys of the last epoch leave, the least frequent ones first.
    assert keys_in(table, state) == {0, *range(8, 15)}


def test_evict_strategy_customized():
    given = np.arange(10, 18, dtype=np.uint64)
    table, state = full("custom", scores=given)
    done, state = insert(table, state, [8, 9], scores=np.array([5, 50], np.uint64))
    assert int(done.counts["refused"]) == 1
    assert keys_in(table, state) == {*range(1, 8), 9}
