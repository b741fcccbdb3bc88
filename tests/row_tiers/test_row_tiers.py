"""Rows beyond the device: training through tiers equals training one table."""

import errno
import functools
import random
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from jax_tt._base import ffi
from jax_tt._directories.batch_clock import KEPT, LAST
from jax_tt._directories.initial import Normal, initial_rows
from jax_tt._directories.placing import words_of_keys
from jax_tt._tiers import block_file, disk
from jax_tt._tiers.places import DevicePlaces
from tests.row_tiers import row_tiers_run

RULE = jax_tt.optimizers.Adagrad(0.1)


def collection_of(rows, rule=RULE, takes_slots=True):
    tables = {
        "item": jax_tt.dense_table(rows, 8, optimizer=rule, takes_slots=takes_slots),
        "user": jax_tt.dense_table(10, 8, optimizer=rule),
    }
    specs = {"seen": jax_tt.Feature("item", combiner="mean"), "cart": jax_tt.Feature("item")}
    return jax_tt.Collection(tables, {**specs, "user": jax_tt.Feature("user")}, stack=False)


def stream(count, seed, pool=200):
    """Batches whose popular ids drift: pairs of one for tiers, and one with numbers from 0 for a large table."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 2**64, pool, dtype=np.uint64)
    ids[:4] = 0, 2**64 - 1, 2**63, 1
    for k in range(count):
        ranks = (draw.zipf(1.3, size=14) + k) % pool
        offsets = np.array([0, 3, 3, 8, 10], np.int32)
        pair = []
        for items in (ids[ranks], ranks):
            pair.append(
                {
                    "seen": jax_tt.Bags(items[:10], offsets),
                    "cart": items[10:].reshape(4, 1),
                    "user": np.arange(4)[:, None],
                }
            )
        yield ids, *pair


@pytest.mark.parametrize(
    ("rows", "host", "depth", "disk"),
    [(32, 512, 0, False), (32, 64, 3, True)],
)
def test_equals_one_table(tmp_path, rows, host, depth, disk):
    small, large = collection_of(rows), collection_of(200, takes_slots=False)
    tier = jax_tt.Tier(host_rows=host, ways=8, seed=7)
    path = tmp_path / "rows" if disk else None
    steps = step_on(rows), row_tiers_run.step_of(large)
    state = small.init(jax.random.key(0))
    batches = list(stream(60, 1))
    (ids, *_) = batches[0]
    whole = row_tiers_run.large_state(large, ids, 7)
    with jax_tt.Tiers(small, {"item": tier}, path=path, depth=depth) as tiers:
        for (_, _, numbered), staged in zip(
            batches, tiers.prefetch(b for _, b, _ in batches), strict=True
        ):
            state = tiers.load(state, staged)
            state, got = steps[0](state, staged.batch)
            whole, expected = steps[1](whole, numbered)
            assert got == expected
        assert (tiers.read(state, "item", ids) == whole["item"]["embedding"]).all()
        counts = tiers.statistics()["item"]
        assert counts.loaded == counts.created + counts.host_hits + counts.disk_hits
        assert counts.evicted > 0
        assert (counts.disk_hits > 0) == disk


def test_without_a_native_module(tmp_path, monkeypatch):
    """The rows are where they are with one, and initial rows are the same."""
    batches, found = [batch_of((np.arange(9) * k) % 60) for k in range(20)], []
    for _ in range(2):
        tiers, state = small_tiers(tmp_path / str(len(found)), rows=24, host_rows=16, policy="lfu")
        for staged in tiers.prefetch(batches):
            state = tiers.load(state, staged)
        found.append((tiers.read(state, "item", np.arange(60)), tiers.statistics()))
        tiers.close()
        monkeypatch.setattr(ffi, "load", lambda platform: None)
    assert (found[0][0] == found[1][0]).all()
    assert found[0][1] == found[1][1]


@pytest.mark.slow
def test_killed_training_goes_on(tmp_path):
    steps, draw = 200, random.Random(5)
    command = [sys.executable, "-m", "tests.row_tiers.row_tiers_run", "--steps", str(steps)]
    command.append(str(tmp_path))
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, 4)):
                assert process.stdout.readline().strip().isdigit()
            time.sleep(draw.random() / 20)
            process.kill()
    last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(last) < steps // row_tiers_run.EVERY  # it did not begin again
    assert last[-1] == row_tiers_run.digest_of_one_table(steps)


def small_tiers(path=None, depth=0, rows=16, **tier):
    collection = collection_of(rows)
    return jax_tt.Tiers(
        collection,
        {"item": jax_tt.Tier(**{"host_rows": 64, "ways": 8, **tier})},
        path=path,
        depth=depth,
    ), collection.init(jax.random.key(0))


@functools.cache
def step_on(rows):
    """One program for all tables of so many rows."""
    return row_tiers_run.step_of(collection_of(rows))


def batch_of(ids):
    """Features with these ids of the tiered table."""
    ids = np.asarray(ids)
    return {"seen": ids[:, None], "cart": ids[:, None], "user": np.zeros((len(ids), 1), int)}


def trained(tiers, state, batches, rows=16):
    step = step_on(rows)
    for staged in tiers.prefetch(batches):
        state, _ = step(tiers.load(state, staged), staged.batch)
    return state


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_batches_as_large_as_the_device(policy):
    """Most of their sets are full of keys of the batch itself, or of more frequent ones."""
    tiers, state = small_tiers(policy=policy, host_rows=512, depth=1)
    others, whole = small_tiers(rows=512, host_rows=512)
    draw, ids = np.random.default_rng(0), np.arange(100)
    batches = [batch_of(draw.permutation(100)[: draw.choice([5, 16])]) for _ in range(60)]
    state, whole = trained(tiers, state, batches), trained(others, whole, batches, 512)
    assert (tiers.read(state, "item", ids) == others.read(whole, "item", ids)).all()
    counts = tiers.statistics()["item"]
    assert counts.requests == sum(2 * len(batch["seen"]) for batch in batches)
    assert counts.loaded == counts.host_hits + counts.created


def test_rows_that_leave_with_one_batch_and_come_back_with_the_next(tmp_path):
    """They stay on the device, also if they leave and come back twice before a batch is loaded."""
    tiers, state = small_tiers(tmp_path / "rows", depth=3, host_rows=32)
    others, whole = small_tiers(rows=48)
    batches = [batch_of(np.arange(12) + 8 * (k % 3 // 2)) for k in range(12)]
    batches += [batch_of(np.arange(12) + 12 * (k % 2)) for k in range(12)]
    leaving, step = tiers._rows["item"]._leaving, step_on(16)
    returned = 0
    for k, staged in enumerate(tiers.prefetch(batches)):
        until = time.monotonic() + 10
        while time.monotonic() < until and max(leaving) < min(k + 2, len(batches) - 1):
            time.sleep(0.001)
        returned += sum(len(own.left.plan.loaded) > 0 for own in leaving[k].returned)
        state, _ = step(tiers.load(state, staged), staged.batch)
    whole = trained(others, whole, batches, 48)
    ids = np.arange(30)
    assert returned > 5
    assert (tiers.read(state, "item", ids) == others.read(whole, "item", ids)).all()
    counts = tiers.statistics()["item"]
    assert counts.loaded == counts.host_hits + counts.disk_hits + counts.created
    tiers.close()


def test_half_of_the_rows_fit_at_once():
    """Some sets get more keys than they have rows; without the overflow this fails."""
    rows, draw = 49_152, np.random.default_rng(0)
    places, left = DevicePlaces(rows, 8, "lru", "table"), np.zeros(0, np.uint64)
    for _ in range(2):
        keys = draw.integers(0, 2**64, rows // 2, dtype=np.uint64)
        slots, plan = places.place(keys, np.ones(len(keys), bool), np.zeros(0, np.uint64))
        assert len(np.unique(slots)) == len(keys)
        assert plan.slots.tolist() == sorted(slots.tolist())
        assert (plan.loaded == keys[np.argsort(slots)]).all()
        assert plan.slots[0] >= 0 and plan.slots[-1] < rows
        assert np.isin(plan.evicted[plan.full], left).all()
        left = keys
    assert plan.counts["refused"] > 0


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_places_go_on_where_numbers_of_batches_end(policy):
    """As those do whose numbers are small, also of keys that were requested before and after."""
    draw, nothing = np.random.default_rng(0), np.zeros(0, np.uint64)
    young, old = (DevicePlaces(24, 4, policy, "table") for _ in range(2))
    old._clock = LAST - 9
    for _ in range(30):
        keys = draw.integers(0, 40, 12).astype(np.uint64)
        placed = [places.place(keys, keys > 3, nothing) for places in (young, old)]
        jax.tree.map(np.testing.assert_array_equal, *placed)
    assert old._clock == KEPT + 21
    assert placed[0][1].counts["evicted"] > 0 and len(old._overflow) > 0


def test_narrow_rows_and_layouts():
    dtype = jnp.bfloat16
    rule = jax_tt.optimizers.Adam(0.05, moment_dtype="bfloat16")
    update = jax_tt.Update(rule, stochastic_rounding=False)
    ids = np.arange(40, dtype=np.int64)[::-1] - 20
    found = []
    for rows in (16, 48):
        table = jax_tt.tables.DenseTable(rows, 6, dtype, update, takes_slots=True)
        collection = jax_tt.Collection({"item": table}, {"seen": jax_tt.Feature("item")})
        step, state = row_tiers_run.step_of(collection), collection.init(jax.random.key(0))
        tiers = jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=64, ways=8)}, depth=1)
        batches = [
            {"seen": jax_tt.Bags(ids[[k, k, (7 * k + 1) % 40, 19]][None], padded=True)}
            for k in range(40)
        ]
        for staged in tiers.prefetch(batches):
            state, _ = step(tiers.load(state, staged), staged.batch)
        found.append(tiers.read(state, "item", ids))
    assert found[0].dtype == dtype
    assert (found[0] == found[1]).all()


def test_keyed_bags_and_lfu():
    ids = np.array([5, 5, 9, 2**30, 7], np.int64)
    offsets = np.array([0, 1, 3, 4, 4, 5, 5], np.int32)
    batch = jax_tt.KeyedBags.from_offsets(("seen", "cart", "user"), [*ids[:4], 7], offsets)
    tiers, state = small_tiers(policy="lfu")
    (staged,) = [
        staged for staged in tiers.prefetch([batch]) if (state := tiers.load(state, staged))
    ]
    slots = staged.batch.ids
    assert slots[0] == slots[1] != slots[2]
    assert slots[4] == 7
    initial = tiers.read(state, "item", ids)
    assert (np.asarray(state["item"]["embedding"])[slots[:4]] == initial[:4]).all()
    assert (tiers.read(state, "item", ids[:0]).shape) == (0, 8)


@pytest.mark.parametrize("depth", [0, 2])
def test_ended_early(depth):
    tiers, state = small_tiers(depth=depth)
    step = step_on(16)
    batches = [batch_of(np.arange(4) + 3 * k) for k in range(30)]
    others, whole = small_tiers()
    whole = trained(others, whole, [*batches[:10], *batches[20:]])
    for k, staged in enumerate(tiers.prefetch(batches)):
        state, _ = step(tiers.load(state, staged), staged.batch)
        if k == 9:
            break
    state = trained(tiers, state, batches[20:])
    ids = np.arange(100)
    assert (tiers.read(state, "item", ids) == others.read(whole, "item", ids)).all()


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_are_right_after_a_batch_that_failed(depth):
    tiers, state = small_tiers(depth=depth)
    with pytest.raises(ValueError, match="17 distinct ids"):
        for staged in tiers.prefetch([batch_of(np.arange(4)), batch_of(np.arange(20, 37))]):
            state = tiers.load(state, staged)
    ids = np.array([20, 21, 22, 23, 0, 1, 2, 3])
    expected = tiers.read(state, "item", ids)
    for first in (0, 4):
        for staged in tiers.prefetch([batch_of(ids[first : first + 4])]):
            state = tiers.load(state, staged)
        rows = np.asarray(state["item"]["embedding"])[staged.batch["seen"].numbers[:, 0]]
        assert (rows == expected[first : first + 4]).all()


def test_batches_that_were_dropped_are_refused():
    tiers, state = small_tiers()
    iteration = tiers.prefetch([batch_of([1])])
    dropped = next(iteration)
    iteration.close()
    with pytest.raises(ValueError, match="staged: got batch 0; expected 1"):
        tiers.load(state, dropped)
    state = trained(tiers, state, [batch_of([2])])
    with pytest.raises(ValueError, match="staged: got batch 0; expected 2"):
        tiers.load(state, dropped)


def test_split_keys():
    keys = np.array([[2**63 - 1, -1], [0, -7]], np.int64)
    found = []
    for ids in (keys, jax_tt.dynamic.split_keys(keys)):
        tiers, state = small_tiers()
        bags = jax_tt.Bags(ids, padded=True)
        batch = {
            "seen": bags,
            "cart": ids[:, :1] if ids is keys else jax_tt.dynamic.split_keys(keys[:, :1]),
        }
        state = trained(tiers, state, [{**batch, "user": np.zeros((2, 1), int)}])
        assert tiers.statistics()["item"].created == 3
        found.append(tiers.read(state, "item", keys[:, 0]))
    assert (found[0] == found[1]).all()


def test_batches_without_ids_and_empty_streams():
    tiers, state = small_tiers()
    assert list(tiers.prefetch([])) == []
    nothing = batch_of(np.zeros(0, int))
    state = trained(tiers, state, [nothing, batch_of([3]), nothing])
    assert tiers.statistics()["item"].created == 1


def test_other_entries_travel_with_a_batch():
    tiers, state = small_tiers(depth=1)
    batches = [{**batch_of([k]), "label": np.array([k])} for k in range(5)]
    labels = []
    for staged in tiers.prefetch(batches):
        state = tiers.load(state, staged)
        labels.append(int(staged.other["label"][0]))
        assert "label" not in staged.batch
    assert labels == [0, 1, 2, 3, 4]


def test_errors_of_batches():
    tiers, state = small_tiers(depth=1, num_embeddings=50)
    for bad, message in (
        ([0.5], r"batch\['seen'\]: got float64 .*; expected integers"),
        ([50], r"batch\['seen'\]: got the id 50; expected 0 to 49"),
        (np.arange(17), "17 distinct ids of a batch do not fit into the 16 rows"),
        (None, "batch: got None; expected KeyedBags, or a dict"),
        ({}, "batch: got no feature 'seen' .* expected 'seen', 'cart', 'user'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trained(tiers, state, [batch_of(bad) if isinstance(bad, list | np.ndarray) else bad])
    batches = [batch_of([1]), batch_of([2])]
    with pytest.raises(RuntimeError, match=r"batch \d+ was not loaded before"):
        list(tiers.prefetch(batches))
    iteration = tiers.prefetch(batches)
    first = next(iteration)
    with pytest.raises(RuntimeError, match="another iteration has not ended"):
        next(tiers.prefetch(batches))
    state = tiers.load(state, first)
    message = f"staged: got batch {first.number}; expected {first.number + 1}"
    with pytest.raises(ValueError, match=message):
        tiers.load(state, first)
    iteration.close()


def test_seeds_are_those_of_hash_tables(tmp_path):
    keys = np.array([1, 2**63], np.uint64)
    for seed in (np.int64(3), -(2**63), 2**64 - 1, 2**64 - 1):
        words = np.array([int(seed) >> 32 & 0xFFFFFFFF, int(seed) & 0xFFFFFFFF], np.uint32)
        tiers, state = small_tiers(tmp_path / str(seed), seed=seed)
        rows = initial_rows(Normal(8**-0.5), words, words_of_keys(keys), 8)
        assert (tiers.read(state, "item", keys) == rows).all()
        tiers.save(state)
        tiers.close()


def test_errors_of_options():
    collection = collection_of(20)
    tier = jax_tt.Tier(host_rows=64, ways=8)
    for options, message in (
        ({"host_rows": 0}, "host_rows: got 0"),
        ({"host_rows": 64, "policy": "fifo"}, "policy: got 'fifo'; expected one of 'lru', 'lfu'"),
        ({"host_rows": 64, "initializer": 3}, "initializer: got 3"),
        ({"host_rows": 64, "ways": 65}, "ways: got 65; expected an integer from 1 to 64"),
        ({"host_rows": 64, "seed": 2**64}, "seed: got 18446744073709551616; expected an integer"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_tt.Tier(**options)
    decays = jax_tt.optimizers.EMAInPlaceRowWiseAdagrad(0.1)
    for rule, given, message in (
        (RULE, {"items": tier}, "got the table 'items'; expected some of 'item', 'user'"),
        (RULE, {"item": 64}, "expected a jax_tt.Tier"),
        (RULE, {}, "tiers: got {}"),
        (RULE, {"item": tier}, "20 rows; expected a multiple of ways=8"),
        (None, {"item": tier}, "without an optimizer"),
        (decays, {"item": tier}, "which changes all rows between steps"),
    ):
        own = collection if rule is RULE else collection_of(16, rule)
        with pytest.raises((TypeError, ValueError), match=message):
            jax_tt.Tiers(own, given)
    with pytest.raises(ValueError, match="depth: got -1"):
        jax_tt.Tiers(collection_of(16), {"item": tier}, depth=-1)


def test_full_host_memory():
    tiers, state = small_tiers(host_rows=8, depth=2)
    step, batches = (
        step_on(16),
        [batch_of(np.arange(8) + 8 * k) for k in range(8)],
    )
    done = 0
    with pytest.raises(
        jax_tt.files.StoreError, match="8 rows in host memory are full; make room by"
    ):
        for staged in tiers.prefetch(batches):
            state, _ = step(tiers.load(state, staged), staged.batch)
            done += 1
    # Nothing is lost: the rows can be read, and training goes on once there is room.
    others, whole = small_tiers()
    ids = np.arange(64)
    whole = trained(others, whole, batches[:done])
    assert (tiers.read(state, "item", ids) == others.read(whole, "item", ids)).all()
    with pytest.raises(ValueError, match="rows: got 7; expected at least 8"):
        tiers.grow_host("item", 7)
    tiers.grow_host("item", 64)
    state, whole = (trained(*pair, batches[done:]) for pair in ((tiers, state), (others, whole)))
    assert (tiers.read(state, "item", ids) == others.read(whole, "item", ids)).all()
    with pytest.raises(jax_tt.files.StoreError, match=r"there is no tier on disk; expected Tiers"):
        tiers.save(state)


def test_errors_of_disks(tmp_path):
    tiers, state = small_tiers(tmp_path / "rows")
    assert tiers.restore(state) is None
    with pytest.raises(jax_tt.files.StoreError, match="is open in another process or store"):
        small_tiers(tmp_path / "rows")
    state = trained(tiers, state, [batch_of(np.arange(8))])
    tiers.save(state, b"first")
    with pytest.raises(RuntimeError, match="restore: rows have changed"):
        tiers.restore(state)
    before = tiers.read(state, "item", np.arange(8))
    tiers.close()
    with pytest.raises(jax_tt.files.StoreError, match="the store is closed"):
        tiers.save(state)
    message = r"about\.item\.seed: got 1, and 0 was written"
    with pytest.raises(jax_tt.files.StoreError, match=message):
        small_tiers(tmp_path / "rows", seed=1)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(jax_tt.files.StoreError, match="expected a directory that can be created"):
        small_tiers(tmp_path / "file")
    same = jax_tt.dynamic.Normal(1 / 8**0.5)  # the default
    tiers, state = small_tiers(tmp_path / "rows", initializer=same)
    other, state = tiers.restore(state)
    assert other == b"first"
    assert max(state["updates"]["step"]) == 1
    assert (tiers.read(state, "item", np.arange(8)) == before).all()
    tiers.close()


def test_tiers_go_on_after_a_full_disk(tmp_path, monkeypatch):
    """Training, reading and saving, and nothing is lost of what was on its way to the disk."""

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 10)
    tiers, state = small_tiers(tmp_path, host_rows=8, depth=1)
    others, whole = small_tiers(host_rows=512)
    draw, ids, step, done = np.random.default_rng(0), np.arange(100), step_on(16), 0
    batches = [batch_of(draw.permutation(100)[:8]) for _ in range(40)]
    tiers.save(state, b"first")
    message = "No space left on device. The last committed state is intact"
    for _ in range(3):
        before = done
        with monkeypatch.context() as patch:
            patch.setattr(block_file.os, "pwrite", full)
            with pytest.raises(jax_tt.files.StoreError, match=message):
                for staged in tiers.prefetch(batches[done:]):
                    state, _ = step(tiers.load(state, staged), staged.batch)
                    done += 1
            for call in (tiers.save, lambda _: tiers.remove("item", ids)):
                with pytest.raises(jax_tt.files.StoreError, match=message):
                    call(state)
        for staged in tiers.prefetch(batches[done : done + 1]):  # there is room again
            state, _ = step(tiers.load(state, staged), staged.batch)
            done += 1
        assert before < done < len(batches)
        whole = trained(others, whole, batches[before:done])
        assert (tiers.read(state, "item", ids) == others.read(whole, "item", ids)).all()
    tiers.save(state, b"second")
    tiers.close()
    tiers, state = small_tiers(tmp_path, host_rows=8)
    other, state = tiers.restore(state)
    assert other == b"second"
    state, whole = (trained(*pair, batches[done:]) for pair in ((tiers, state), (others, whole)))
    assert (tiers.read(state, "item", ids) == others.read(whole, "item", ids)).all()
    tiers.close()


def test_tables_that_have_grown_are_restored_with_their_capacities(tmp_path):
    """The table beside those with tiers has 512 rows in the store, and the one with tiers 72 in host memory."""

    def collection_with(rows, most=512):
        options = {"max_capacity": most, "policy": "none"}
        tables = {
            "item": jax_tt.dense_table(32, 8, optimizer=RULE, takes_slots=True),
            "word": jax_tt.hash_table(rows, 8, **options),
        }
        features = {name: jax_tt.Feature(name) for name in tables}
        return jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))

    batch = {"item": np.arange(8)[:, None], "word": np.arange(8)[:, None] * 2**40}
    embed = collection_with(64)
    embed.insert(batch)
    embed.grow_if_full(max_load=0.02)
    assert embed.tables["word"].num_embeddings == 512
    tier = jax_tt.Tier(host_rows=64, num_embeddings=50)
    with jax_tt.nnx.LayerTiers(embed, {"item": tier}, path=tmp_path, depth=0) as tiers:
        tiers.grow_host("item", 72)
        tiers.save(b"saved")
    expected = jax.device_get(embed.arrays())

    other = collection_with(64)
    opt = jax_tt.FusedOptimizer(other, optax.sgd(0.1, momentum=0.9))
    with jax_tt.nnx.LayerTiers(other, {"item": jax_tt.Tier()}, path=tmp_path, depth=0) as tiers:
        with pytest.raises(ValueError, match="a module without this layer"):
            tiers.restore(opt=opt, model=nnx.Dict())
        assert tiers.restore(opt=opt) == b"saved"
        assert other.tables["word"].num_embeddings == 512
        jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(other.arrays()))
        placed = {**batch, "item": jax_tt.pipeline.Slots(batch["item"])}
        grads = jax_tt.grad(lambda embed: embed(placed)["word"].sum())(other)
        opt.update(other, grads)
        assert int(other.insert(batch)["word"].counts["hits"]) == 8
        with pytest.raises(ValueError, match="got the id 50; expected 0 to 49"):
            next(tiers.prefetch([{**batch, "item": np.array([[50]])}]))
        with pytest.raises(ValueError, match="expected at least 72"):
            tiers.grow_host("item", 64)

    for given, message in (
        ((64, 256), r"holds 'word' with 512 rows; .*expected at most max_capacity, 256"),
        ((96, None), r"holds 'word' with 512 rows; .*96 times a power of 2"),
        ((1024, 1024), r"shape \(512, 8\).*shape \(1024, 8\)"),
    ):
        embed = collection_with(*given)
        before = jax.device_get(embed.arrays())
        tier = {"item": jax_tt.Tier()}
        with (
            jax_tt.nnx.LayerTiers(embed, tier, path=tmp_path, depth=0) as tiers,
            pytest.raises(jax_tt.files.StoreError, match=message),
        ):
            tiers.restore()
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(embed.arrays()))


def test_sizes_of_tiers_are_those_of_the_store(tmp_path):
    with pytest.raises(ValueError, match="host_rows: got None; expected a number of rows"):
        small_tiers(tmp_path, host_rows=None)
    tiers, state = small_tiers(tmp_path, host_rows=40, num_embeddings=50)
    tiers.save(trained(tiers, state, [batch_of(np.arange(40, 48))]))
    tiers.close()
    with pytest.raises(ValueError, match="num_embeddings: got 49; expected at least 50, or None"):
        small_tiers(tmp_path, num_embeddings=49)
    for given, most in ({"num_embeddings": 60}, 60), ({}, 60), ({"host_rows": 8}, 60):
        tiers, state = small_tiers(tmp_path, **{"host_rows": None, **given})
        _, state = tiers.restore(state)
        with pytest.raises(ValueError, match=f"expected 0 to {most - 1}"):
            trained(tiers, state, [batch_of([most])])
        with pytest.raises(ValueError, match=f"expected at least {given.get('host_rows', 40)}"):
            tiers.grow_host("item", 1)
        tiers.save(state)
        tiers.close()


def test_saves_and_dumps_are_by_table(tmp_path):
    """What stands beside the rows, such as step counts and tables in a stack, fits whatever holds it."""
    adam = jax_tt.optimizers.Adam(0.1)
    tables = {
        "item": jax_tt.dense_table(32, 4, optimizer=adam, takes_slots=True),
        "b": jax_tt.dense_table(10, 4, optimizer=adam),
        "a": jax_tt.dense_table(12, 4, optimizer=adam),
    }
    features = {name: jax_tt.Feature(name) for name in tables}
    stacked = jax_tt.Collection(tables, features)
    apart = jax_tt.Collection(dict(reversed(tables.items())), features, stack=False)
    assert [[*stack.tables] for stack in stacked.stacks.values()] == [["a", "b"]]
    step, tier = row_tiers_run.step_of(stacked), {"item": jax_tt.Tier(host_rows=64)}
    batch = {
        "item": np.arange(8)[:, None] * 2**40,
        "a": np.ones((8, 1), int),
        "b": np.ones((8, 1), int),
    }
    path, dump = tmp_path / "rows", tmp_path / "dump"
    state = stacked.init(jax.random.key(0))
    with jax_tt.Tiers(stacked, tier, path=path) as tiers:
        for staged in tiers.prefetch([batch] * 3):
            state, _ = step(tiers.load(state, staged), staged.batch)
        tiers.save(state)
        tiers.dump(state, "item", dump, progress=False)
    want = stacked.separated(state)
    for collection in (stacked, apart):
        with jax_tt.Tiers(collection, tier, path=path) as tiers:
            _, restored = tiers.restore(collection.init(jax.random.key(1)))
        got = collection.separated(restored)
        jax.tree.map(np.testing.assert_array_equal, [got["a"], got["b"]], [want["a"], want["b"]])
        assert float(got["item"]["step"]) == 3
        with jax_tt.Tiers(collection, tier) as tiers:
            loaded = tiers.load_dump(
                collection.init(jax.random.key(1)), "item", dump, progress=False
            )
        steps = {name: float(collection.of(loaded, name)["step"]) for name in tables}
        assert steps == {"item": 3, "a": 0, "b": 0}
