"""Hash tables in their steady state, full and with all that waits for admission, move over other numbers of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_tt
from jax_tt._directories.hash_directory import CLOCK, KEYS, POLICIES, WAITING, KeyDirectory
from jax_tt._directories.placing import entries_of
from jax_tt._directories.relocate import by_device, relocated, sets_of
from jax_tt._table.checkpoint import by_row, of_rows
from tests.kinds.hashed.hash_model import staying

CAPACITY, WAYS, BATCH = 256, 4, 256


def _steady(plain):
    """The state after batches of frequent keys and of keys that come once, which leave few slots empty."""
    draw = np.random.default_rng(1)

    @jax.jit
    def insert(state, ids, scores, epoch):
        own = {"scores": scores} if plain.policy == "custom" else {}
        own |= {"epoch": epoch} if plain.policy.startswith("epoch") else {}
        return jax_tt.dynamic.insert(plain, state, ids, **own)[1]

    state = plain.init(jax.random.key(0))
    for batch in range(12):
        keys, scores = draw.integers(0, 2**64, (2, BATCH), np.uint64)
        keys[: BATCH // 2] = draw.integers(0, 300, BATCH // 2, np.uint64) << np.uint64(40)
        ids, scores = map(jax_tt.dynamic.split_keys, (keys, scores))
        state = insert(state, ids, scores, np.int32(batch // 4))
    rows = {n: draw.random(state[n].shape, np.float32) for n in plain.table.spec.row_arrays}
    return {**state, **jax.device_put(rows)}


def _content(plain, state):
    """Scores, last batches and rows by key, and scores and last batches of keys that wait, as `by_row` has them."""
    entries, of_key = _entries(state, KEYS)
    arrays = [np.asarray(state[name])[entries["slot"]] for name in plain.table.spec.row_arrays]
    rows = dict(zip(entries["key"].tolist(), np.concatenate(arrays, axis=1), strict=True))
    return of_key, rows, _entries(state, WAITING)[1] if plain.waiting_sets else {}


def _entries(state, names):
    sets = sets_of(state[names[2]])
    keys, scores, touched = (np.asarray(state[name]) for name in names)
    words = sets.sets, 2, WAYS
    flat = KeyDirectory(keys.reshape(words), scores.reshape(words), touched.reshape(-1, WAYS))
    entries = entries_of(flat)
    assert (sets.homes(entries["key"]) == entries["slot"] // WAYS).any(axis=0).all()
    return entries, {key: (score, touched) for key, _, score, touched in entries.tolist()}


def _table(plain, devices):
    if devices == 1:
        return plain
    kind = (AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("model",), kind, devices=jax.devices()[:devices])
    return jax_tt.shard_tables({"item": plain}, mesh, "model")["item"]


def _on_eight(plain, state):
    """The state on 8 devices, which are more than the tests have, as `by_row` returns it."""
    after = relocated(plain, state, 8)
    return {**after, **by_device({n: after[n] for n in (*KEYS, *WAITING) if n in after}, 8)}


@pytest.mark.parametrize("admission", [None, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_steady_tables_lose_the_keys_that_a_model_loses(policy, admission, tmp_path):
    """By states and by dumps, which make the same tables."""
    plain = jax_tt.hash_table(
        CAPACITY,
        2,
        policy=policy,
        min_age=3 if policy in ("lfu", "epoch_lru") else 1,
        admission=admission,
        ways=WAYS,
        optimizer=jax_tt.optimizers.Adagrad(0.1),
        safe_check="ignore",
    )
    empty = plain.init(jax.random.key(0))
    table, state = plain, _steady(plain)
    whole, lost, refused = state, np.zeros(2, int), 0
    assert len(_content(plain, whole)[0]) > 0.9 * CAPACITY
    for devices in (2, 4, 8, 1, 4):
        keys, rows, waiting = _content(plain, whole)
        sizes, now = (CAPACITY // WAYS, WAYS, devices), int(whole[CLOCK])
        kept = staying(keys, *sizes, now=now, min_age=plain.min_age)
        waits = staying(waiting, *sizes)
        fewer = len(keys) - len(kept), len(waiting) - len(waits)
        other = None if devices == 8 else _table(plain, devices)
        if policy == "none" and fewer[0]:
            with pytest.raises(ValueError, match=rf"{fewer[0]} of {len(keys)} keys find no room"):
                _on_eight(plain, whole) if other is None else of_rows(other, whole)
            refused += 1
            continue
        if other is None:
            after = moved = _on_eight(plain, whole)
        else:
            after = of_rows(other, whole)
            moved = by_row(other, after)
        found = _content(plain, moved)
        assert found[0] == {key: keys[key] for key in kept}
        assert found[2] == {key: waiting[key] for key in waits}
        assert all((found[1][key] == rows[key]).all() for key in kept)
        if table is not None and other is not None:
            path = tmp_path / str(devices)
            jax_tt.files.dump(table, state, path, progress=False, overwrite=True)
            start = of_rows(other, empty)
            counts, loaded = jax_tt.files.load_dump(other, start, path, progress=False)
            assert counts == (len(kept), 0, *fewer)
            for name in KEYS if admission is None else (*KEYS, *WAITING):
                np.testing.assert_array_equal(loaded[name], after[name], err_msg=name)
            loaded = _content(plain, by_row(other, loaded))[1]
            assert all((loaded[key] == rows[key]).all() for key in kept)
        table, state, whole = other, after, moved
        lost += fewer
    assert (lost[0] == 0) == (refused > 0) == (policy == "none")
    assert (lost[1] > 0) == (admission is not None)
