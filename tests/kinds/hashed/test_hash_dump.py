"""Hash tables in files: dumps, dumps of changes, and loading into other tables."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jax_tt
from tests.helpers import rewrite

RULE = jax_tt.optimizers.Adagrad(0.1)


def trained(table, state, steps, seed=0):
    """The state after steps on random keys, the extremes among them."""
    draw = np.random.default_rng(seed)
    pool = draw.integers(0, 2**64, 60, dtype=np.uint64)
    pool[:4] = 0, 2**64 - 1, 2**63, 1
    for _ in range(steps):
        state = step(table, state, jax_tt.dynamic.split_keys(draw.choice(pool, 12)))
    return state, pool


@functools.partial(jax.jit, static_argnums=0)
def step(table, state, keys):
    _, state = jax_tt.dynamic.insert(table, state, keys)

    def loss(own):
        rows, _ = jax_tt.lookup(table, {**state, **own}, keys)
        return jnp.sum((rows - 0.1) ** 2)

    return {**state, **jax.grad(loss)({name: state[name] for name in table.spec.trained_names})}


def by_key(table, state, names=("embedding",)):
    """Entries of the arrays by key."""
    arrays = [np.asarray(state[name]) for name in names]
    return {
        int(entry["key"]): (
            int(entry["score"]),
            int(entry["touched"]),
            *(array[entry["slot"]].tolist() for array in arrays),
        )
        for entry in jax_tt.dynamic.keys_of(table, state)
    }


@pytest.fixture(scope="module")
def source():
    table = jax_tt.hash_table(128, 6, optimizer=RULE, policy="lfu", ways=8)
    state, pool = trained(table, table.init(jax.random.key(0)), 12)
    return table, state, pool


def test_round_trip(source, tmp_path):
    table, state, _ = source
    count = jax_tt.files.dump(table, state, tmp_path / "dump", rows_per_file=7)
    assert count == len(by_key(table, state))
    other = jax_tt.hash_table(512, 6, optimizer=RULE, policy="lfu", ways=8, seed=5)
    counts, loaded = jax_tt.files.load_dump(other, other.init(jax.random.key(1)), tmp_path / "dump")
    names = ("embedding", "slot_sum_0")
    assert by_key(other, loaded, names) == by_key(table, state, names)
    assert counts == (len(by_key(table, state)), 0, 0, 0)
    for name in ("step", "hash_clock", "hash_seed", "hash_totals"):
        assert (loaded[name] == state[name]).all()
    went_on, continued = (
        by_key(own, trained(own, start, 4, seed=1)[0], names)
        for own, start in ((table, state), (other, loaded))
    )
    assert continued == went_on


def test_changes(source, tmp_path):
    table, state, _ = source
    jax_tt.files.dump(table, state, tmp_path / "0")
    later, _ = trained(table, state, 2, seed=9)
    changed = jax_tt.files.dump(table, later, tmp_path / "1", since=tmp_path / "0")
    assert 0 < changed < len(by_key(table, later))
    last, _ = trained(table, later, 2, seed=10)
    jax_tt.files.dump(table, last, tmp_path / "2", since=tmp_path / "1")
    found = table.init(jax.random.key(3))
    # One without an optimizer, and of another type, whose values are rounded.
    narrow = jax_tt.hash_table(256, 6, param_dtype=jnp.bfloat16, policy="lfu", ways=8)
    served = narrow.init(jax.random.key(3))
    for part in ("0", "1", "2"):
        _, found = jax_tt.files.load_dump(table, found, tmp_path / part)
        _, served = jax_tt.files.load_dump(narrow, served, tmp_path / part, optimizer_state=False)
    names = ("embedding", "slot_sum_0")
    assert by_key(table, found, names) == by_key(table, last, names)
    rounded = {"embedding": last["embedding"].astype(jnp.bfloat16)}
    assert by_key(narrow, served) == by_key(table, {**last, **rounded})


def test_dumps_of_other_versions_are_refused(source, tmp_path):
    table, state, _ = source
    path = tmp_path / "dump"
    jax_tt.files.dump(table, state, path)
    rewrite(path / "dump.safetensors", lambda arrays, notes: notes.update(version=3))
    with pytest.raises(jax_tt.FileError, match=r"got version 3; expected 2\. Read it with the"):
        jax_tt.files.load_dump(table, state, path)
    (path / "about.json").write_text("{}")
    with pytest.raises(jax_tt.FileError, match=r"a dump of an earlier version.*save_arrays"):
        jax_tt.files.load_dump(table, state, path)


def test_changes_since_nothing_are_refused(source, tmp_path):
    """A number of batches, a directory without a dump, the dump itself, and dumps that do not say what they hold."""
    table, state, _ = source
    dense = jax_tt.dense_table(4, 6)
    jax_tt.files.dump(dense, dense.init(jax.random.key(0)), tmp_path / "dense")
    for since, kind, message in (
        (12, TypeError, "since: got 12; expected the path of an earlier dump"),
        (tmp_path / "nothing", FileNotFoundError, "is no complete dump"),
        (tmp_path / "new", jax_tt.FileError, "is the same file as"),
        (tmp_path / "dense", jax_tt.FileError, "unknown; make a full dump"),
    ):
        with pytest.raises(kind, match=message):
            jax_tt.files.dump(table, state, tmp_path / "new", since=since)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


def test_smaller_tables_take_the_keys_with_the_highest_scores_or_none(source, tmp_path):
    table, state, _ = source
    jax_tt.files.dump(table, state, tmp_path / "dump", rows_per_file=10)
    small = jax_tt.hash_table(16, 6, optimizer=RULE, policy="lfu", ways=16)
    start, keys = small.init(jax.random.key(0)), by_key(table, state)
    refused = rf"{len(keys) - 16} of {len(keys)} keys find no room .* expected a capacity of \d+"
    with pytest.raises(ValueError, match=refused):
        jax_tt.files.load_dump(small, start, tmp_path / "dump", overflow="error")
    with pytest.raises(ValueError, match="overflow: got 'grow'; expected one of 'evict', 'error'"):
        jax_tt.files.load_dump(small, start, tmp_path / "dump", overflow="grow")
    assert not by_key(small, start)
    counts, found = jax_tt.files.load_dump(small, start, tmp_path / "dump")
    assert counts == (16, 0, len(keys) - 16, 0)
    stay = by_key(small, found)
    assert len(stay) == 16 and stay.items() <= keys.items()
    assert min(stay.values())[:2] >= sorted(keys.values())[len(keys) - 16][:2]


def test_other_types_and_rules(source, tmp_path):
    table, state, pool = source
    jax_tt.files.dump(table, state, tmp_path / "dump")
    narrow = jax_tt.hash_table(128, 6, param_dtype=jnp.bfloat16, ways=8)
    with pytest.raises(jax_tt.FileError, match="is left out by optimizer_state=False"):
        jax_tt.files.load_dump(narrow, narrow.init(jax.random.key(0)), tmp_path / "dump")
    _, loaded = jax_tt.files.load_dump(
        narrow, narrow.init(jax.random.key(0)), tmp_path / "dump", optimizer_state=False
    )
    keys = jax_tt.dynamic.split_keys(pool)
    lookup = jax_tt.Lookup(train=False)
    rows_of = jax.jit(
        lambda table, state: jax_tt.lookup(table, state, keys, lookup)[0], static_argnums=0
    )
    expected, rows = rows_of(table, state), rows_of(narrow, loaded)
    assert rows.dtype == jnp.bfloat16
    assert (rows == expected.astype(jnp.bfloat16)).all()


def test_empty_tables(tmp_path):
    table = jax_tt.hash_table(16, 3)
    state = table.init(jax.random.key(0))
    assert jax_tt.files.dump(table, state, tmp_path / "dump") == 0
    counts, loaded = jax_tt.files.load_dump(table, state, tmp_path / "dump")
    assert counts == (0, 0, 0, 0)
    assert not by_key(table, loaded)


def test_the_number_of_batches_never_falls(source, tmp_path):
    table, state, pool = source
    other = {**table.init(jax.random.key(0)), "hash_clock": state["hash_clock"] + 2}
    other = step(table, other, jax_tt.dynamic.split_keys(pool[:12]))
    jax_tt.files.dump(table, state, tmp_path / "dump")
    _, loaded = jax_tt.files.load_dump(table, other, tmp_path / "dump")
    assert loaded["hash_clock"] == other["hash_clock"]
    jax_tt.files.dump(table, other, tmp_path / "later")
    _, loaded = jax_tt.files.load_dump(table, state, tmp_path / "later")
    assert loaded["hash_clock"] == other["hash_clock"]


def test_damaged_descriptions(source, tmp_path):
    table, state, _ = source
    path = tmp_path / "dump"
    jax_tt.files.dump(table, state, path)
    whole = (path / "dump.safetensors").read_bytes()
    for name in ("features", "keys", "files", "arrays"):
        rewrite(path / "dump.safetensors", lambda arrays, notes, name=name: notes.pop(name))
        with pytest.raises(jax_tt.FileError, match=r"its description is damaged \(KeyError"):
            jax_tt.files.load_dump(table, state, path)
        (path / "dump.safetensors").write_bytes(whole)
    shutil.copy(path / "keys-00000.safetensors", path / "dump.safetensors")
    with pytest.raises(jax_tt.FileError, match=r"is 'part of a dump'; expected 'dump'"):
        jax_tt.files.load_dump(table, state, path)


def test_errors(source, tmp_path):
    table, state, _ = source
    path = tmp_path / "dump"
    jax_tt.files.dump(table, state, path, rows_per_file=20)
    with pytest.raises(FileExistsError, match="exists; expected a new name"):
        jax_tt.files.dump(table, state, path)
    with pytest.raises(FileNotFoundError, match="is no complete dump of a table"):
        jax_tt.files.load_dump(table, state, tmp_path / "nothing")
    row_wise = jax_tt.hash_table(128, 6, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1))
    with pytest.raises(
        jax_tt.FileError, match=r"got slot_sum_0 with entries of shape \(6,\); expected"
    ):
        jax_tt.files.load_dump(row_wise, row_wise.init(jax.random.key(0)), path)
    wide = jax_tt.hash_table(128, 7, optimizer=RULE)
    with pytest.raises(jax_tt.FileError, match="got rows of 6 columns; expected 7"):
        jax_tt.files.load_dump(wide, wide.init(jax.random.key(0)), path)
    for call in (jax_tt.files.dump, jax_tt.files.load_dump):
        place = tmp_path / "keyed" if call is jax_tt.files.dump else path
        with pytest.raises(ValueError, match="keys: got keys for a hash table, which has some"):
            call(table, state, place, keys=np.arange(128))
    with pytest.raises(TypeError, match=r"table: got a dict; expected a jax_tt\.Table"):
        jax_tt.files.dump({}, state, tmp_path / "other")  # pyright: ignore[reportArgumentType]
    train = jax_tt.tables.HashTable(jax_tt.tt_table(1000, 8, tt_ranks=4), ways=10)
    with pytest.raises(TypeError, match="got a TTTable, whose rows share parameters"):
        jax_tt.files.dump(train, train.init(jax.random.key(0)), tmp_path / "train")
    for options, message in (
        ({"rows_per_file": 0}, "rows_per_file"),
        ({"since": 0.5}, "since: got 0.5"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_tt.files.dump(table, state, tmp_path / "other", **options)
    part = path / "keys-00001.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    with pytest.raises(jax_tt.FileError, match="is not a complete safetensors file"):
        jax_tt.files.load_dump(table, state, path)
    part.write_bytes(whole)
    shutil.copy(path / "keys-00000.safetensors", part)
    with pytest.raises(jax_tt.FileError, match="is of another dump, its checksum differs"):
        jax_tt.files.load_dump(table, state, path)
    for file in (part, path / "dump.safetensors"):
        file.unlink()
        with pytest.raises(jax_tt.FileError, match=f"no complete dump .* it has no {file.name}"):
            jax_tt.files.load_dump(table, state, path)
    (path / "dump.safetensors").write_text("{")
    with pytest.raises(jax_tt.FileError, match="is not a complete safetensors file"):
        jax_tt.files.load_dump(table, state, path)


def test_keys_find_as_much_room_as_they_had(tmp_path):
    table = jax_tt.hash_table(8192, 2, policy="none", safe_check="error")
    state = table.init(jax.random.key(0))
    insert = jax.jit(lambda state, keys: jax_tt.dynamic.insert(table, state, keys)[1])
    for keys in np.random.default_rng(0).integers(2**64, size=(4, 1280), dtype=np.uint64):
        state = insert(state, jax_tt.dynamic.split_keys(keys))
    jax_tt.files.dump(table, state, tmp_path / "keys", rows_per_file=2_000)
    other = jax_tt.hash_table(8192, 2, ways=16, policy="none", safe_check="error")
    counts, after = jax_tt.files.load_dump(other, other.init(jax.random.key(1)), tmp_path / "keys")
    assert counts == jax_tt.files.Loaded(rows=5_120, evicted=0)
    keys, found = (
        np.sort(jax_tt.dynamic.keys_of(t, s), order="key")
        for t, s in ((table, state), (other, after))
    )
    np.testing.assert_array_equal(
        found[["key", "score", "touched"]], keys[["key", "score", "touched"]]
    )
    np.testing.assert_array_equal(
        after["embedding"][found["slot"]], state["embedding"][keys["slot"]]
    )


def test_slots_that_keys_cannot_have(source, tmp_path):
    table, state, _ = source
    path = tmp_path / "keys"
    jax_tt.files.dump(table, state, path)
    (file,), about = path.glob("keys-*"), path / "dump.safetensors"
    slots = load_file(file)["slot"]
    for changed in (
        np.append(slots[1], slots[1:]),  # two keys in the same slot
        np.roll(slots, len(slots) // 2),  # other sets
        np.append(np.array(-1, slots.dtype), slots[1:]),  # no set
    ):
        checksum = rewrite(file, lambda arrays, notes, new=changed: arrays.update(slot=new))
        with pytest.raises(jax_tt.FileError, match="its checksum differs"):
            jax_tt.files.load_dump(table, state, path)
        files = {file.name: checksum}
        rewrite(about, lambda arrays, notes, files=files: notes.update(files=files))
        with pytest.raises(
            jax_tt.FileError, match="is damaged; keys are in slots that they cannot"
        ):
            jax_tt.files.load_dump(table, table.init(jax.random.key(1)), path)
