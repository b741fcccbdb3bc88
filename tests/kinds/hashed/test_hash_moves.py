"""Hash tables on other devices and of other capacities: every key that has room is there, or nothing has changed."""

import contextlib
import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jax_tt
from jax_tt import Placement
from jax_tt._directories import placing
from jax_tt._directories.hash_directory import (
    KEYS,
    WAITING,
    Eviction,
    MissingKeyWarning,
    directory_of,
)
from jax_tt._directories.placing import ENTRY, Sets, entries_of, placed
from jax_tt._layers.nnx.collection import write_arrays
from jax_tt._table.checkpoint import by_row, in_pieces, of_pieces, of_rows
from jax_tt.tables import ShardedTable
from tests.kinds.hashed.hash_model import homes, staying, with_room
from tests.kinds.hashed.table_model import sizes_of

FEATURES = {"item": jax_tt.Feature("item")}
PLAIN = jax_tt.hash_table(1024, 4, optimizer=jax_tt.optimizers.Adagrad(0.1), name="item")


def mesh(devices, kind=AxisType.Auto):
    return jax.make_mesh(
        (devices,), ("model",), axis_types=(kind,), devices=jax.devices()[:devices]
    )


def divided(table, devices, kind=AxisType.Auto):
    return ShardedTable(table, mesh(devices, kind), "model", Placement.hashed())


@functools.partial(jax.jit, static_argnums=0)
def start_of(table, seed=0):
    return table.init(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def insert(table, state, ids):
    return jax_tt.dynamic.insert(table, state, ids)


def filled(table, keys, state=None, seed=0):
    """A state with at least so many keys, inserted batch by batch."""
    state = start_of(table) if state is None else state
    draw = np.random.default_rng(seed)
    while jax_tt.dynamic.statistics(table, state)["keys"] < keys:
        some = draw.integers(0, 2**64, 256, dtype=np.uint64)
        _, state = insert(table, state, jax_tt.dynamic.split_keys(some))
    return state


@pytest.fixture(scope="module")
def two():
    return divided(PLAIN, 2)


@pytest.fixture(scope="module")
def full(two):
    return two, filled(two, 1024)


@pytest.fixture(scope="module", params=["well filled", "full"])
def source(request, two, full):
    return full if request.param == "full" else (two, filled(two, 700))


def same(found, expected, names=None):
    for name in names or expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def same_keys(table, found, other, expected, names=tuple(PLAIN.table.spec.row_arrays), kept=None):
    """All keys of a state that is expected, or those of them that are ``kept``."""
    pair = []
    for own, state in ((table, found), (other, expected)):
        entries = np.sort(jax_tt.dynamic.keys_of(own, state), order="key")
        if kept is not None and own is other:
            entries = entries[np.isin(entries["key"], list(kept))]
        rows = [np.asarray(state[name])[entries["slot"]] for name in names]
        pair.append([entries["key"], entries["score"], entries["touched"], *rows])
    for new, old in zip(*pair, strict=True):
        np.testing.assert_array_equal(new, old)


def test_dumps_come_back_to_the_same_devices_bit_for_bit(full, tmp_path):
    table, state = full
    jax_tt.files.dump(table, state, tmp_path / "keys", rows_per_file=300, progress=False)
    start = start_of(table, 1)
    counts, found = jax_tt.files.load_dump(table, start, tmp_path / "keys", progress=False)
    keys = jax_tt.dynamic.keys_of(table, state)
    assert counts == (len(keys), 0, 0, 0)
    same(found, state, [name for name in state if name not in PLAIN.table.spec.row_arrays])
    for name in PLAIN.table.spec.row_arrays:
        np.testing.assert_array_equal(found[name][keys["slot"]], state[name][keys["slot"]])
        assert found[name].sharding.is_equivalent_to(start[name].sharding, 2)


def staying_in(other, table, state):
    """The keys of a table that find room in another one of as many rows."""
    entries = jax_tt.dynamic.keys_of(table, state)[["key", "score", "touched"]].tolist()
    return staying({key: rest for key, *rest in entries}, *sizes_of(other)[::2], sizes_of(other)[3])


@contextlib.contextmanager
def loses(count):
    """Whether a move says that it loses so many keys; nothing where it is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(one.message) for one in caught if one.category is MissingKeyWarning]
    assert len(said) == (count > 0)
    assert all(one.startswith("item: state: ") for one in said)
    assert all(f"lost {count} of its keys, with the lowest scores, for" in one for one in said)


@pytest.mark.parametrize("devices", [1, 4])
def test_dumps_of_other_devices(source, tmp_path, devices):
    """All keys have room, but for a few of a full table on more devices."""
    table, state = source
    jax_tt.files.dump(table, state, tmp_path / "keys", progress=False)
    other = PLAIN if devices == 1 else divided(PLAIN, devices)
    start, keys = start_of(other, 1), len(jax_tt.dynamic.keys_of(table, state))
    kept = staying_in(other, table, state)
    assert (len(kept) < keys) == (devices == 4 and keys == 1024)
    counts, found = jax_tt.files.load_dump(other, start, tmp_path / "keys", progress=False)
    assert counts == (len(kept), 0, keys - len(kept), 0)
    same_keys(other, found, table, state, kept=kept)
    with loses(keys - len(kept)):
        moved = of_rows(other, by_row(table, state))
    same_keys(other, moved, table, state, kept=kept)
    same(moved, found, KEYS)

    strict = functools.partial(jax_tt.files.load_dump, progress=False, overflow="error")
    if len(kept) < keys:
        refused = rf"item: table: {keys - len(kept)} of 1024 keys find no room .* or overflow="
        with pytest.raises(ValueError, match=refused) as raised:
            strict(other, start, tmp_path / "keys")
        assert not len(jax_tt.dynamic.keys_of(other, start))
        other = divided(with_capacity(PLAIN, advised(raised)), devices)
        start = start_of(other, 1)
    _, found = strict(other, start, tmp_path / "keys")
    same_keys(other, found, table, state)


def with_capacity(table, rows):
    inner = dataclasses.replace(table.table, num_embeddings=rows)
    return dataclasses.replace(table, table=inner)


def advised(raised):
    return int(re.search(r"expected a capacity of (\d+)", str(raised.value)).group(1))


def test_states_of_the_same_devices_are_the_same(full):
    table, state = full
    for found in (
        of_rows(table, by_row(table, state)),
        of_pieces(table, in_pieces(table, state)),
        jax.jit(lambda state: of_rows(table, by_row(table, state)))(state),
    ):
        same(found, state)


def test_collections_and_layers(source):
    table, state = source
    collection = jax_tt.Collection({"item": table}, FEATURES)
    states = collection.init(jax.random.key(0))
    states["item"] = {name: state[name] for name in states["item"]}
    same(collection.joined(collection.separated(states))["item"], states["item"])
    arrays = jax_tt.checkpoint.save_args(collection, states)
    same(jax_tt.checkpoint.restore(collection, states, arrays)["item"], states["item"])

    layers = [jax_tt.EmbedCollection({"item": table}, FEATURES, rngs=nnx.Rngs(k)) for k in range(2)]
    write_arrays(layers[0], states)
    layers[1].set_states(layers[0].states())
    same(layers[1].arrays()["item"], states["item"])
    served, arrays = collection.frozen(states)
    rows = [
        jax_tt.dynamic.keys_of(t, s) for t, s in ((served.tables["item"], arrays["item"]), source)
    ]
    np.testing.assert_array_equal(*(np.sort(own["key"]) for own in rows))
    other = divided(PLAIN, 4)
    wider = jax_tt.EmbedCollection({"item": other}, FEATURES, rngs=nnx.Rngs(0))
    kept = staying_in(other, table, state)
    with loses(len(jax_tt.dynamic.keys_of(table, state)) - len(kept)):
        wider.set_states(layers[0].states())
    other = wider.collection.tables["item"]
    same_keys(other, wider.arrays()["item"], table, state, kept=kept)


def test_tables_without_eviction_move_whole_or_not_at_all(tmp_path):
    """To one device of as many rows, which has no room for all; nor has the table that is frozen."""
    plain = jax_tt.hash_table(64, 4, ways=1, policy="none", safe_check="ignore", name="item")
    table = divided(plain, 2)
    state = filled(table, 64)
    collection = jax_tt.Collection({"item": table}, FEATURES)
    jax_tt.files.dump(table, state, tmp_path / "keys", progress=False)
    start = start_of(plain, 1)
    for move in (
        lambda: collection.frozen({"item": state}),
        lambda: of_rows(plain, by_row(table, state)),
        lambda: jax_tt.files.load_dump(plain, start, tmp_path / "keys", progress=False),
    ):
        with pytest.raises(ValueError, match=r"\d+ of 64 keys find no room") as raised:
            move()
    larger = with_capacity(plain, advised(raised))
    _, found = jax_tt.files.load_dump(larger, start_of(larger), tmp_path / "keys", progress=False)
    same_keys(larger, found, table, state, ["embedding"])


@pytest.mark.parametrize("devices", [1, 4])
def test_checkpoints_of_other_devices(source, two, devices):
    """Of tables that are alike, with keys in another collection than rows, as in linen, and averages of the rows."""
    table, state = source
    other = PLAIN if devices == 1 else divided(PLAIN, devices)
    features = FEATURES | {"user": jax_tt.Feature("user")}
    before, after = (
        jax_tt.Collection({"item": own, "user": own}, features, stack=False)
        for own in (table, other)
    )
    given = {"item": state, "user": filled(two, 300, seed=2)}

    def trees(states):
        rows, hashed = {}, {}
        for name, own in states.items():
            hashed[name] = {n: x for n, x in own.items() if n.startswith("hash_")}
            rows[name] = {n: x for n, x in own.items() if n not in hashed[name]}
        averages = {name: {"embedding": 2 * rows[name]["embedding"]} for name in given}
        return {"hash_table": hashed, "params": rows, "averages": averages}

    states = before.init(jax.random.key(0))
    for name, own in given.items():
        states[name] = {n: own[n] for n in states[name]}
    arrays = jax_tt.checkpoint.save_args(before, trees(states))
    start = trees(after.init(jax.random.key(1)))
    like = jax_tt.checkpoint.target(after, start)
    arrays = jax.tree.map(lambda x, own: jax.device_put(np.asarray(x), own.sharding), arrays, like)
    with loses(len(jax_tt.dynamic.keys_of(table, state)) - len(staying_in(other, table, state))):
        found = jax_tt.checkpoint.restore(after, start, arrays)
    for x, own in zip(jax.tree.leaves(found), jax.tree.leaves(start), strict=True):
        assert not own.committed or x.sharding.is_equivalent_to(own.sharding, x.ndim)
    for name, own in given.items():
        kept = staying_in(other, table, own)
        rows = found["params"][name] | found["hash_table"][name]
        averaged = found["averages"][name]["embedding"] / 2
        for arrays in rows, {**rows, "embedding": averaged}:
            same_keys(after.tables[name], arrays, table, own, kept=kept)
        same(rows, own, ["hash_clock", "hash_seed", "hash_totals"])


def test_checkpoints_of_other_slots_are_refused():
    """As many rows, of which orbax would cut the keys or the counts."""
    for other in {"ways": 16}, {"admission": jax_tt.dynamic.AdmitAfter(2, waiting=128)}:
        check_checkpoint_is_refused(other)


def check_checkpoint_is_refused(other):
    options: dict[str, Any] = {"ways": 8, "admission": jax_tt.dynamic.AdmitAfter(2, waiting=64)}
    source, target = (
        jax_tt.Collection({"item": jax_tt.hash_table(64, 4, **own)}, FEATURES)
        for own in (options, options | other)
    )
    arrays = jax_tt.checkpoint.save_args(source, source.init(jax.random.key(0)))
    start = target.init(jax.random.key(1))
    like = jax_tt.checkpoint.target(target, start)["item"]
    arrays["item"] = {name: np.resize(arrays["item"][name], x.shape) for name, x in like.items()}
    with pytest.raises(ValueError, match=r"holds a hash table with ways=8 and 64 slots"):
        jax_tt.checkpoint.restore(target, start, arrays)


def test_keys_that_are_traced_keep_their_slots(two):
    whole = jax.eval_shape(two.by_row, jax.eval_shape(two.init, jax.random.key(0)))
    with pytest.raises(TypeError, match=r"item: state: got traced arrays .* outside of jit"):
        jax.eval_shape(PLAIN.of_rows, whole)
    with pytest.raises(ValueError, match=r"hash_keys: .* HashTable.of_rows takes the keys"):
        jax_tt.extension.check_state(PLAIN, two.by_row(start_of(two)))


def test_tables_whose_rows_share_parameters_stay_as_they_are():
    train = jax_tt.tables.HashTable(jax_tt.tt_table(64, 4, tt_ranks=2))
    state = train.init(jax.random.key(0))
    larger = dataclasses.replace(train, table=jax_tt.tt_table(128, 4, tt_ranks=2))
    same(train.of_rows(state), state)
    with pytest.raises(ValueError, match="rows share parameters"):
        larger.of_rows(state)


def test_meshes_with_explicit_axes(tmp_path):
    table = divided(PLAIN, 2, AxisType.Explicit)
    with jax.set_mesh(table.mesh):
        state = filled(table, 300, start_of(table))
        jax_tt.files.dump(table, state, tmp_path / "keys", progress=False)
        start = start_of(table, 1)
        _, found = jax_tt.files.load_dump(table, start, tmp_path / "keys", progress=False)
        np.testing.assert_array_equal(
            jax_tt.dynamic.keys_of(table, found), jax_tt.dynamic.keys_of(table, state)
        )
        same(of_rows(table, by_row(table, state)), state)
        same(of_pieces(table, in_pieces(table, state)), state)
        other = divided(PLAIN, 4, AxisType.Explicit)
        same_keys(other, of_rows(other, by_row(table, state)), table, state)


def test_admission_counts_come_to_another_capacity(tmp_path):
    small, large = (jax_tt.hash_table(rows, 4, admission=3) for rows in (1024, 2048))
    source = divided(small, 2)
    state = start_of(source)
    keys = jax_tt.dynamic.split_keys(np.arange(400) * 2**33)
    for _ in range(2):
        inserted, state = insert(source, state, keys)
    assert int(inserted.counts["inserted"]) == 0
    jax_tt.files.dump(source, state, tmp_path / "keys", progress=False)
    _, found = jax_tt.files.load_dump(large, start_of(large), tmp_path / "keys")
    for moved in (found, large.of_rows(by_row(source, state))):
        inserted, _ = insert(large, moved, keys)
        assert int(inserted.counts["inserted"]) == 400
    # Counts are no reason to refuse: the ones of the latest keys are kept.
    tiny = jax_tt.hash_table(64, 4, admission=3)
    for overflow in "evict", "error":
        options = {"progress": False, "overflow": overflow}
        counts, found = jax_tt.files.load_dump(tiny, start_of(tiny), tmp_path / "keys", **options)
        assert counts == (0, 0, 0, 400 - 64)
    entries = {int(key): (3 << 32 | 2, 2) for key in np.arange(400) * 2**33}
    waiting = entries_of(directory_of(found, WAITING))["key"]
    assert set(waiting.tolist()) == staying(entries, 8, 8)


def test_keys_that_come_with_a_dump_do_not_wait_any_more(tmp_path):
    table = jax_tt.hash_table(64, 4, admission=2)
    states = [
        insert(table, start_of(table), jax_tt.dynamic.split_keys(np.array(keys)))[1]
        for keys in ([1, 1, 2, 3], [2, 2, 1, 4])
    ]
    jax_tt.files.dump(table, states[1], tmp_path / "waiting", progress=False)
    plain = jax_tt.hash_table(64, 4)
    _, state = insert(plain, start_of(plain), jax_tt.dynamic.split_keys(np.array([2])))
    jax_tt.files.dump(plain, state, tmp_path / "none", progress=False)
    for name, waiting in ("waiting", [3, 4]), ("none", [3]):
        _, after = jax_tt.files.load_dump(table, states[0], tmp_path / name, progress=False)
        assert sorted(jax_tt.dynamic.keys_of(table, after)["key"]) == [1, 2]
        assert sorted(entries_of(directory_of(after, WAITING))["key"]) == waiting


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    """A full table, its state and its dump, and the same after keys have come, left and been removed."""
    table, path = jax_tt.hash_table(256, 4, safe_check="ignore"), tmp_path_factory.mktemp("dumps")
    state = filled(table, 256)
    jax_tt.files.dump(table, state, path / "0", progress=False)
    _, later = insert(table, state, jax_tt.dynamic.split_keys(np.arange(40)))
    stay = jax_tt.dynamic.keys_of(table, later)["key"]
    _, later = jax_tt.dynamic.remove(table, later, jax_tt.dynamic.split_keys(stay[stay >= 40][:20]))
    count = jax_tt.files.dump(table, later, path / "1", since=path / "0", progress=False)
    assert count == np.count_nonzero(jax_tt.dynamic.keys_of(table, later)["key"] < 40) > 20
    return table, path, state, later


def test_changes_replay_exactly(changes):
    """In a table of another size; what has left the dumped table leaves this one."""
    table, path, state, later = changes
    target = jax_tt.hash_table(512, 4, ways=16)
    _, found = jax_tt.files.load_dump(target, start_of(target, 1), path / "0", progress=False)
    counts, found = jax_tt.files.load_dump(target, found, path / "1", progress=False)
    left = np.setdiff1d(*(jax_tt.dynamic.keys_of(table, own)["key"] for own in (state, later)))
    assert counts.evicted == len(left) > 30
    same_keys(target, found, table, later, ["embedding"])


def test_changes_are_refused_where_rows_would_be_others(changes):
    """They would take keys from other tables, such as one with as many batches, or leave other rows."""
    table, path, state, later = changes
    empty, other = start_of(table, 1), filled(table, 256, seed=1)
    assert other["hash_clock"] == state["hash_clock"]
    kept = jax_tt.dynamic.keys_of(table, later)
    kept = kept[kept["key"] >= 40][0]
    hit = jax_tt.dynamic.split_keys(kept["key"][None])
    row = state["embedding"].at[kept["slot"], 3].add(1e-3)
    rows = {**state, "embedding": row}
    for own in (empty, other, rows, insert(table, state, hit)[1]):
        before = jax.device_get(own)
        with pytest.raises(
            ValueError, match=r"in another state .* Load this one into a table with"
        ):
            jax_tt.files.load_dump(table, own, path / "1", progress=False)
        same(jax.device_get(own), before)


@pytest.mark.parametrize("what", ["keys", "rows"])
def test_changes_after_a_load_have_what_was_loaded(changes, tmp_path, what):
    """Loaded keys come with their last batches, before that of the dump; rows of another table even with the same."""
    table, _, _, later = changes
    target = jax_tt.hash_table(512, 4)
    if what == "keys":
        keys = jax_tt.dynamic.split_keys(np.arange(50, 90))
        _, loaded = insert(table, start_of(table, 5), keys)
        state = filled(target, 200)
    else:
        loaded = {**later, "embedding": later["embedding"] + 1}
        target, state = table, later
    jax_tt.files.dump(table, loaded, tmp_path / "other", progress=False)
    jax_tt.files.dump(target, state, tmp_path / "0", progress=False)
    _, state = jax_tt.files.load_dump(target, state, tmp_path / "other", progress=False)
    count = jax_tt.files.dump(target, state, tmp_path / "1", since=tmp_path / "0", progress=False)
    assert count == len(jax_tt.dynamic.keys_of(table, loaded))
    found = start_of(target, 1)
    for name in "0", "1":
        _, found = jax_tt.files.load_dump(target, found, tmp_path / name, progress=False)
    same_keys(target, found, target, state, ["embedding"])


ANY = Eviction("lru"), 0, "keys"


def entries_without_slots(count, seed=0, keys=None):
    entries = np.zeros(count, ENTRY)
    draw = np.random.default_rng(seed)
    entries["key"] = draw.integers(0, 2**64, count, np.uint64) if keys is None else keys
    entries["slot"], entries["touched"] = -1, 1
    entries["score"] = draw.integers(0, 5, count)
    return entries


@pytest.mark.parametrize("load", [0.99, 1.02])
def test_keys_move_between_their_sets_until_as_many_as_possible_have_room(load):
    sets = Sets(512, 8)
    entries = entries_without_slots(int(load * 4096))
    found = placed(entries, sets, *ANY)
    there = found["slot"] >= 0
    assert len(np.unique(found["slot"][there])) == np.count_nonzero(there) > 0.98 * 4096
    assert there.all() or load > 1
    homes = sets.homes(found["key"])
    assert ((homes == found["slot"] // 8).any(axis=0) == there).all()
    # The order of the keys does not matter, and keys that have slots keep them.
    order = np.random.default_rng(1).permutation(len(entries))
    np.testing.assert_array_equal(placed(entries[order], sets, *ANY), found[order])
    np.testing.assert_array_equal(placed(found, sets, *ANY), found)


def test_keys_that_have_slots_keep_them_and_others_get_the_rest():
    sets = Sets(64, 8)
    held = placed(entries_without_slots(400, 3), sets, *ANY)
    held["slot"] ^= 7  # in other ways of their sets than keys without slots would get
    np.testing.assert_array_equal(placed(held, sets, *ANY), held)
    some, new = held.copy(), np.arange(len(held)) % 4 == 0
    some["slot"][new] = -1
    found = placed(some, sets, *ANY)
    np.testing.assert_array_equal(found[~new], held[~new])
    assert len(np.unique(found["slot"])) == len(found)


def test_keys_of_late_batches_leave_only_for_one_another():
    """Six keys for four slots; those with the highest scores are the oldest ones."""
    entries = entries_without_slots(6)
    entries["score"], entries["touched"] = [9, 8, 1, 2, 3, 4], [1, 1, 7, 8, 8, 8]
    for min_age, stay in (1, [0, 1, 4, 5]), (2, [0, 3, 4, 5]), (3, [2, 3, 4, 5]):
        found = placed(entries, Sets(1, 4), Eviction("custom", min_age), 8, "keys")
        assert np.flatnonzero(found["slot"] >= 0).tolist() == stay


def refused(entries, sets):
    with pytest.raises(ValueError, match="keys find no room") as raised:
        placed(entries, sets, *ANY, "error")
    return raised


@pytest.mark.parametrize(
    ("count", "sets"), [(250, Sets(256, 1, 2)), (256, Sets(256, 1)), (500, Sets(64, 8, 4))]
)
def test_refusals_name_the_smallest_capacity_and_ways(count, sets):
    entries = entries_without_slots(count, 2)
    raised = refused(entries, sets)
    rows, ways = re.search(r"of (\d+)(?:, or ways=(\d+))?, or over", str(raised.value)).groups()
    larger = sets._replace(sets=int(rows) // sets.ways)
    found = placed(entries, larger, *ANY, "error")
    assert len(np.unique(found["slot"])) == count
    keys = entries["key"].tolist()
    for size in range(sets.sets, larger.sets, sets.devices):
        own = functools.partial(homes, sets=size, devices=sets.devices)
        assert len(with_room(keys, own, sets.ways)) < count
    for more in 2, 4, 8, 16, 32:
        own = sets._replace(sets=sets.sets // more, ways=sets.ways * more)
        if str(own.ways) == ways or own.sets < own.devices or own.ways > 64:
            break
        refused(entries, own)
    if ways is not None:
        found = placed(entries, own, *ANY, "error")
        assert len(np.unique(found["slot"])) == count


def test_of_many_keys_the_capacity_that_is_named_has_room_and_the_next_smaller_one_has_not(
    monkeypatch,
):
    """Where sizes would take too long to be tried one by one."""
    monkeypatch.setattr(placing, "_KEYS", 0)
    entries, sets = entries_without_slots(4096), Sets(512, 8)
    size = advised(refused(entries, sets)) // 8
    placed(entries, sets._replace(sets=size), *ANY, "error")
    refused(entries, sets._replace(sets=size - 1))


def test_keys_with_the_same_hashes_have_no_room_in_any_capacity():
    keys = 19394988471603984, 53020225368926635, 63617842724063676
    entries = entries_without_slots(3, keys=keys)
    assert len(np.unique(Sets(1 << 20, 1).homes(entries["key"]), axis=1).T) == 1
    for sets, advice in (Sets(64, 1), "ways=2"), (Sets(63, 1), "a larger capacity and more ways"):
        said = str(refused(entries, sets).value)
        assert "1 of 3 keys find no room" in said and f"expected {advice}, or overflow=" in said
