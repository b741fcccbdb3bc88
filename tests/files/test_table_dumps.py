"""Dumps of dense tables and of tiers: changes, other kinds of tables, and dumps that were cut off."""

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._formats import container
from jax_tt._formats import dump as files
from tests.row_tiers.test_row_tiers import batch_of, small_tiers, trained

RULE = jax_tt.optimizers.RowWiseAdagrad(0.1)


def dense(rows, optimizer=RULE, dtype=jnp.float32):
    table = jax_tt.dense_table(rows, 6, optimizer=optimizer, param_dtype=dtype)
    state = table.init(jax.random.key(rows))
    draw = np.random.default_rng(rows)
    return table, {
        name: jnp.asarray(draw.normal(size=array.shape) * 9, array.dtype) if array.ndim else array
        for name, array in state.items()
    }


def same(first, second):
    return all((np.asarray(first[name]) == np.asarray(second[name])).all() for name in first)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_round_trip_and_changes(tmp_path, dtype):
    table, state = dense(50, dtype=dtype)
    options = {"rows_per_file": 20}
    assert jax_tt.files.dump(table, state, tmp_path / "0", **options) == 50
    slot = "slot_sum_0"
    changed = {**state, "embedding": state["embedding"].at[jnp.array([3, 49])].multiply(-1)}
    changed = {
        **changed,
        slot: state[slot].at[jnp.array([3, 10])].add(1),
        "step": state["step"] + 1,
    }
    assert jax_tt.files.dump(table, changed, tmp_path / "1", since=tmp_path / "0", **options) == 3
    assert jax_tt.files.dump(table, changed, tmp_path / "2", since=tmp_path / "1", **options) == 0
    found = dense(50)[0].init(jax.random.key(0))
    for name, rows in ("0", 50), ("1", 3), ("2", 0):
        counts, found = jax_tt.files.load_dump(dense(50)[0], found, tmp_path / name)
        assert counts == (rows, 0, 0, 0)
    assert same(found, {name: array.astype(found[name].dtype) for name, array in changed.items()})


def test_changes_of_another_state_are_refused(tmp_path):
    table, first = dense(50)
    second, third = (
        {**first, "embedding": first["embedding"].at[jnp.arange(n)].multiply(-1)} for n in (1, 2)
    )
    jax_tt.files.dump(table, first, tmp_path / "0")
    jax_tt.files.dump(table, second, tmp_path / "1", since=tmp_path / "0")
    jax_tt.files.dump(table, third, tmp_path / "2", since=tmp_path / "1")
    with pytest.raises(
        ValueError, match=r"its rows are not the rows that \S+2 is a dump of changes"
    ):
        jax_tt.files.load_dump(table, first, tmp_path / "2")
    smaller, state = dense(40)
    with pytest.raises(ValueError, match="a dense table of 40 rows cannot tell"):
        jax_tt.files.load_dump(smaller, state, tmp_path / "1")
    _, found = jax_tt.files.load_dump(table, second, tmp_path / "2")
    assert same(found, third)


def test_changed_bytes_are_noticed(tmp_path):
    table, state = dense(50)
    dump = tmp_path / "dump"
    jax_tt.files.dump(table, state, dump, rows_per_file=25)
    draw = np.random.default_rng(0)
    for path in sorted(dump.iterdir()):
        whole = path.read_bytes()
        for place in draw.integers(0, len(whole), 40):
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.integers(8)
            path.write_bytes(changed)
            with contextlib.suppress(jax_tt.FileError):
                _, found = jax_tt.files.load_dump(table, state, dump)
                assert same(found, state)  # a space between words of the description, perhaps
        path.write_bytes(whole)
    with (dump / "keys-00001.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    with pytest.raises(jax_tt.FileError, match="is damaged, its checksum differs; use another"):
        jax_tt.files.load_dump(table, state, dump)


def test_files_that_become_shorter_while_they_are_read(tmp_path, monkeypatch):
    """An array that is a map of its file would end the process."""
    table, state = dense(50)
    dump = tmp_path / "dump"
    jax_tt.files.dump(table, state, dump)
    checksum = container.checksum_of

    def after_a_cut(array):
        for path in dump.glob("*.safetensors"):
            os.truncate(path, 0)
        return checksum(array)

    monkeypatch.setattr(container, "checksum_of", after_a_cut)
    with pytest.raises(jax_tt.FileError, match="has become shorter while it was read"):
        jax_tt.files.load_dump(table, state, dump)


def test_arrays_beside_the_rows_are_read_once(tmp_path, monkeypatch):
    table, state = dense(50)
    jax_tt.files.dump(table, state, tmp_path / "dump")
    dump, sums = files.Dump.open(tmp_path / "dump"), []
    sum_of = container.checksum_of
    monkeypatch.setattr(container, "checksum_of", lambda array: sums.append(1) or sum_of(array))
    names = list(dump.rest(dump.stored.arrays))
    assert names and dump.rest(names[:1]).keys() == {names[0]} and len(sums) == len(names)


def test_a_dump_that_is_replaced_while_it_is_read(tmp_path):
    table = jax_tt.hash_table(64, 4)
    for count in (3, 5):
        _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.arange(count))
        dumped = None if count == 3 else files.Dump.open(tmp_path / "a")
        jax_tt.files.dump(table, state, tmp_path / "a", overwrite=True)
    with pytest.raises(
        jax_tt.FileError, match="a: was replaced or removed while it was read; read"
    ):
        next(dumped.parts({}))
    assert not [path.name for path in tmp_path.iterdir() if path.name != "a"]


def test_between_dense_and_hash_tables(tmp_path):
    table, state = dense(50)
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 50)
    keys[:3] = 0, -1, -(2**63)
    jax_tt.files.dump(table, state, tmp_path / "dense", keys=keys, rows_per_file=15)
    hashed = jax_tt.hash_table(256, 6, optimizer=RULE)
    counts, found = jax_tt.files.load_dump(
        hashed, hashed.init(jax.random.key(1)), tmp_path / "dense"
    )
    assert counts == (50, 0, 0, 0)
    rows, _ = jax_tt.lookup(hashed, found, keys)
    assert (rows == state["embedding"]).all()
    _, found = jax_tt.dynamic.insert(hashed, found, np.arange(100, 103))
    jax_tt.files.dump(hashed, found, tmp_path / "hashed", rows_per_file=15)
    other, before = dense(60)
    longer = np.concatenate([keys[::-1], np.arange(10)])
    longer[50:] += 10**6
    counts, again = jax_tt.files.load_dump(other, before, tmp_path / "hashed", keys=longer)
    assert counts == (50, 3, 0, 0)
    for name in table.spec.row_arrays:
        assert (again[name][:50] == state[name][::-1]).all()
        assert (again[name][50:] == before[name][50:]).all()
    assert again["step"] == state["step"]


def test_sharded_tables_write_and_read_rows(tmp_path):
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    table, state = dense(50)
    sharded = jax_tt.tables.ShardedTable(
        table, mesh, "model", jax_tt.Placement.round_robin(page_size=8)
    )
    jax_tt.files.dump(sharded, sharded.of_rows(state), tmp_path / "dump", rows_per_file=20)
    counts, found = jax_tt.files.load_dump(table, table.init(jax.random.key(0)), tmp_path / "dump")
    assert counts == (50, 0, 0, 0)
    assert same(found, state)
    start = sharded.init(jax.random.key(0))
    _, found = jax_tt.files.load_dump(sharded, start, tmp_path / "dump")
    assert same(sharded.by_row(found), state)


def cut_off(monkeypatch, after):
    """Writing fails after so many files."""
    write, left = files.Container.write, [after]

    def failing(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(*args)

    monkeypatch.setattr(files, "_WRITERS", 1)
    monkeypatch.setattr(files.Container, "write", failing)


def test_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    table, state = dense(50)
    path = tmp_path / "dump"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_off(patch, 3)
        jax_tt.files.dump(table, state, path, rows_per_file=10)
    assert not path.exists()
    unfinished = tmp_path / ".jax_tt_dump.unfinished"
    assert len(os.listdir(unfinished)) == 3
    # What has changed since then is written again, and so is what is damaged.
    (unfinished / "keys-00001.safetensors").write_bytes(b"cut")
    (unfinished / "keys-00009.safetensors").write_bytes(b"of another dump")
    state = {**state, "embedding": state["embedding"].at[2].add(1)}
    kept = (unfinished / "keys-00002.safetensors").stat()
    with monkeypatch.context() as patch:
        cut_off(patch, 5)  # two parts again, two more, and the other arrays
        assert jax_tt.files.dump(table, state, path, rows_per_file=10) == 50
    assert (path / "keys-00002.safetensors").stat().st_mtime_ns == kept.st_mtime_ns
    parts = [f"keys-0000{k}.safetensors" for k in range(5)]
    assert sorted(os.listdir(path)) == ["dump.safetensors", *parts]
    counts, found = jax_tt.files.load_dump(table, table.init(jax.random.key(0)), path)
    assert counts == (50, 0, 0, 0)
    assert same(found, state)
    assert os.listdir(tmp_path) == ["dump"]


def test_two_calls_do_not_write_the_same_dump(tmp_path):
    table, state = dense(5)
    with (
        files.resuming(tmp_path / "dump", files.DUMP, overwrite=False),
        pytest.raises(jax_tt.FileError, match="is being written"),
    ):
        jax_tt.files.dump(table, state, tmp_path / "dump")


@pytest.mark.parametrize("writer", ["rows", "tiers"])
def test_a_dump_replaces_another_one_at_once(tmp_path, monkeypatch, writer):
    """With ``overwrite=True``, and never a directory with anything else in it."""
    path = tmp_path / "dump"
    table, state = dense(50)
    if writer == "tiers":
        tiers, state = small_tiers()
        state = trained(tiers, state, [batch_of(np.arange(8))])

    def dump(**options):
        if writer == "tiers":
            return tiers.dump(state, "item", path, rows_per_file=5, **options)
        return jax_tt.files.dump(table, state, path, rows_per_file=20, **options)

    dump()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        dump()
    before = {file: (path / file).read_bytes() for file in os.listdir(path)}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_off(patch, 1)
        dump(overwrite=True)
    assert {file: (path / file).read_bytes() for file in os.listdir(path)} == before
    (path / "keys-00009.safetensors").write_bytes(b"of another dump")
    dump(overwrite=True)
    assert {file: (path / file).read_bytes() for file in os.listdir(path)} == before
    assert os.listdir(tmp_path) == ["dump"]
    if writer == "rows":
        with pytest.raises(jax_tt.FileError, match="is the same file as"):
            dump(overwrite=True, since=path)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(jax_tt.FileError, match="is not a dump, or holds other files"):
        dump(overwrite=True)
    assert (path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["dump", "orbax"])
def test_what_a_killed_call_has_set_aside(tmp_path, kind):
    """It is read, and only replaced with ``overwrite=True``."""
    path, (table, state) = tmp_path / "items", dense(5)
    stored = jax_tt.tt.to_table(jax_tt.tt.from_dense(np.eye(6, dtype=np.float32), 1))

    def write(**options):
        if kind == "orbax":
            return jax_tt.files.save(path, {"item": stored}, **options)
        return jax_tt.files.dump(table, state, path, **options)

    def read():
        return (
            jax_tt.files.load(path)
            if kind == "orbax"
            else jax_tt.files.load_dump(table, state, path)
        )

    write()
    path.rename(tmp_path / ".jax_tt_items.replaced")
    assert read()
    with pytest.raises(FileExistsError, match=r"exists as .*\.jax_tt_items\.replaced"):
        write()
    write(overwrite=True)
    assert os.listdir(tmp_path) == ["items"]
    assert read()


def test_full_disk(tmp_path, monkeypatch):
    table, state = dense(50)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.Container, "write", full)
        with pytest.raises(jax_tt.FileError, match=r"cannot be written \(No space left"):
            jax_tt.files.dump(table, state, tmp_path / "dump")
    assert os.listdir(tmp_path) == []
    jax_tt.files.dump(table, state, tmp_path / "dump")


def test_errors(tmp_path):
    table, state = dense(50)
    path = tmp_path / "dump"
    jax_tt.files.dump(table, state, path, rows_per_file=20)
    with pytest.raises(FileExistsError, match="exists; expected a new name"):
        jax_tt.files.dump(table, state, path)
    train = jax_tt.tt_table(1000, 8, tt_ranks=4)
    for options, message in (
        ({"keys": np.arange(49)}, r"keys: got int64 of shape \(49,\); expected integers of shape"),
        ({"keys": np.zeros(50)}, r"keys: got float64"),
        ({"keys": np.zeros(50, int)}, "keys: some are equal"),
        ({"since": tmp_path / "nothing"}, "is no complete dump of a table"),
        ({"rows_per_file": 0}, "rows_per_file: got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_tt.files.dump(table, state, tmp_path / "other", **options)
    with pytest.raises(TypeError, match="got a TTTable, whose rows are not entries of its arrays"):
        jax_tt.files.dump(train, train.init(jax.random.key(0)), tmp_path / "other")
    other, before = dense(51)
    with pytest.raises(jax_tt.FileError, match="is no dump of a dense table of 51 rows"):
        jax_tt.files.dump(other, before, tmp_path / "other", since=path)
    wide = jax_tt.dense_table(50, 7)
    with pytest.raises(jax_tt.FileError, match="got rows of 6 columns; expected 7"):
        jax_tt.files.load_dump(wide, wide.init(jax.random.key(0)), path)
    plain, start = dense(50, None)
    with pytest.raises(jax_tt.FileError, match="got embedding, slot_sum_0; expected embedding"):
        jax_tt.files.load_dump(plain, start, path)
    _, found = jax_tt.files.load_dump(plain, start, path, optimizer_state=False)
    assert (found["embedding"] == state["embedding"]).all()
    part = path / "keys-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(jax_tt.FileError, match="is not a complete safetensors file"):
        jax_tt.files.load_dump(table, state, path)
    assert sorted(os.listdir(tmp_path)) == ["dump"]


def test_tiers_in_files(tmp_path):
    """Rows on the device, in host memory and on disk, into tiers of other sizes, a hash table and a dense table."""
    draw, ids = np.random.default_rng(0), np.arange(60) * 2**55 - 2**61
    tiers, state = small_tiers(tmp_path / "rows", host_rows=16)
    known, batches = ids[:48], [batch_of(ids[8 * k : 8 * k + 8]) for k in range(6)]
    batches += [batch_of(draw.choice(known, 8)) for _ in range(20)]
    state = trained(tiers, state, batches)
    count = tiers.dump(state, "item", tmp_path / "dump", rows_per_file=17)
    assert count == tiers.statistics()["item"].created == 48
    before = tiers.read(state, "item", ids)
    others, start = small_tiers(tmp_path / "others", host_rows=32)
    start = others.load_dump(start, "item", tmp_path / "dump")
    assert (others.read(start, "item", ids) == before).all()
    more = [batch_of(draw.choice(ids, 8)) for _ in range(10)]
    state, start = trained(tiers, state, more), trained(others, start, more)
    assert (others.read(start, "item", ids) == tiers.read(state, "item", ids)).all()
    with pytest.raises(RuntimeError, match="load_dump: rows have changed"):
        others.load_dump(start, "item", tmp_path / "dump")
    rule = jax_tt.optimizers.Adagrad(0.1)
    hashed = jax_tt.hash_table(256, 8, optimizer=rule)
    counts, found = jax_tt.files.load_dump(
        hashed, hashed.init(jax.random.key(0)), tmp_path / "dump"
    )
    assert counts == (48, 0, 0, 0)
    rows, _ = jax_tt.lookup(hashed, found, known)
    assert (rows == before[:48]).all()
    table = jax_tt.dense_table(60, 8, optimizer=rule)
    start = table.init(jax.random.key(0))
    counts, found = jax_tt.files.load_dump(table, start, tmp_path / "dump", keys=ids)
    assert counts == (48, 0, 0, 0)
    assert (found["embedding"][:48] == before[:48]).all()
    small, start = small_tiers(host_rows=40)
    with pytest.raises(jax_tt.files.StoreError, match="40 rows in host memory are full"):
        small.load_dump(start, "item", tmp_path / "dump")
    small.grow_host("item", 56)
    start = small.load_dump(start, "item", tmp_path / "dump")
    assert (small.read(start, "item", ids) == before).all()
