"""Records on disk: what was saved stays, room is used again, damage is noticed."""

import errno
import os
import shutil

import numpy as np
import pytest

import jax_tt
from jax_tt._base import ffi
from jax_tt._tiers import block_file, disk
from jax_tt._tiers.disk import DiskStore
from jax_tt._tiers.map_reader import MapReader
from jax_tt._tiers.row_bytes import addresses, checksums, copy_rows


def test_refused_directories_stay_as_they_are(tmp_path):
    store = DiskStore(tmp_path, {"item": 4}, "first")
    commit(store, b"saved")
    store.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for sizes, about in (
        ({"item": 4, "other": 8}, "first and other"),
        ({"else": 4}, "second"),
        ({"item": 8}, "a second"),
    ):
        with pytest.raises(jax_tt.files.StoreError, match="holds other records: about: got "):
            DiskStore(tmp_path, sizes, about)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_no_store_is_refused_and_not_kept_locked(tmp_path):
    (tmp_path / "index").write_bytes(b"x" * 8192)
    for _ in range(2):
        with pytest.raises(
            jax_tt.files.StoreError, match="is damaged, or another program wrote it"
        ):
            DiskStore(tmp_path, {"item": 4}, "about")
    (tmp_path / "index").unlink()
    DiskStore(tmp_path, {"item": 4}, "about").close()
    (tmp_path / "index").unlink()
    with pytest.raises(jax_tt.files.StoreError, match="its index is missing"):
        DiskStore(tmp_path, {"item": 4}, "about")


@pytest.mark.parametrize("name", ["data.mdb", "index"])
def test_stores_of_earlier_versions_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"jax_tt store\n" + b"x" * 8192)
    with pytest.raises(
        jax_tt.files.StoreError, match="an earlier version, which have no checksums"
    ):
        DiskStore(tmp_path, {"item": 4}, "about")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "in_use"])


def test_a_closed_store_can_be_opened_beside_forked_processes(tmp_path):
    store = DiskStore(tmp_path, {"item": 4}, "about")
    with open(os.dup(store._lock)):  # as a process that was forked meanwhile has it
        store.close()
        DiskStore(tmp_path, {"item": 4}, "about").close()


def test_directories_that_cannot_be_locked(tmp_path, monkeypatch):
    def refused(lock, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", refused)
    with pytest.raises(jax_tt.files.StoreError, match="cannot be locked: No locks available"):
        DiskStore(tmp_path, {"item": 4}, "about")


def records_of(store, keys):
    """Which of the keys a store of one table has, and their records."""
    found = np.zeros((len(keys), 400), np.uint8)
    there = store.get(
        "item", keys, lambda records, rows: copy_rows(records, addresses(found, rows), 400)
    )
    return there, found[there]


def commit(store, value):
    store.commit({"value": np.frombuffer(value, np.uint8)})


def saved(store):
    return store.saved()["value"].tobytes()


def put_records(store, keys, values):
    records = np.full((len(keys), 400), values, np.uint8)
    store.put("item", keys, addresses(records, np.arange(len(keys))))


def test_blocks_of_which_little_counts_are_dropped(tmp_path, monkeypatch):
    """Records that are written again and again take room for a few times as many, also after a process that died."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    draw, pool = np.random.default_rng(0), np.arange(300, dtype=np.uint64)
    model, kept = {}, {}
    store = DiskStore(tmp_path, {"item": 400}, "about")
    for k in range(300):
        keys, value = draw.permutation(pool)[: draw.integers(0, 60)], k % 251
        put_records(store, keys, value)
        model.update(dict.fromkeys(keys.tolist(), value))
        if k % 7 == 0:
            commit(store, str(k).encode())
            kept = dict(model)
        if k % 41 == 40:
            store.close()
            store = DiskStore(tmp_path, {"item": 400}, "about")
            model = dict(kept)
        there, records = records_of(store, pool)
        assert pool[there].tolist() == sorted(model) == store.keys("item").tolist()
        assert (records == np.array([model[key] for key in sorted(model)])[:, None]).all()
    store.close()
    assert (tmp_path / "blocks").stat().st_size < 20 * 300 * 400


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_store_goes_on_after_a_full_disk(tmp_path, monkeypatch):
    """Blocks that could not be written are in memory, and calls that cannot go on may be repeated."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 14)
    keys, model = np.arange(2000, dtype=np.uint64), {0: 1, 1: 1, 2: 1}
    store = DiskStore(tmp_path, {"item": 400}, "about")
    put_records(store, keys[:3], 1)
    commit(store, b"first")
    message = "No space left on device. The last committed state is intact, and nothing is lost"
    with monkeypatch.context() as patch:
        patch.setattr(block_file.os, "pwrite", full)
        value = 2
        with pytest.raises(jax_tt.files.StoreError, match=message):
            for value in range(2, 22):
                part = keys[60 * value :][:100]
                put_records(store, part, value)
                model |= dict.fromkeys(part.tolist(), value)
        for call in (
            lambda: commit(store, b"second"),
            lambda: store.erase("item", keys[:1]),
            lambda: put_records(store, keys[60 * value :][:100], value),
        ):
            with pytest.raises(jax_tt.files.StoreError, match=message):
                call()
        there, records = records_of(store, keys)
        assert (records[:, 0] == [model[key] for key in keys[there].tolist()]).all()
        assert set(model) == set(keys[there].tolist())
    committed = (tmp_path / "index").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(store._index, "prepare", full)
        with pytest.raises(jax_tt.files.StoreError, match=message):
            commit(store, b"second")
    assert (tmp_path / "index").read_bytes() == committed
    put_records(store, keys[60 * value :][:100], value)
    model |= dict.fromkeys(keys[60 * value :][:100].tolist(), value)
    store.erase("item", keys[:1])
    del model[0]
    commit(store, b"second")
    for _ in range(2):
        assert saved(store) == b"second"
        there, records = records_of(store, keys)
        assert dict(zip(keys[there].tolist(), records[:, 0].tolist(), strict=True)) == model
        store.close()
        store = DiskStore(tmp_path, {"item": 400}, "about")
    store.close()


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_what_is_said_of_a_directory_that_is_gone(tmp_path, change):
    """Nothing is intact in it, and nothing is saved to another one in its place; the rows can still be read."""
    path, keys = tmp_path / "rows", np.arange(50, dtype=np.uint64)
    store = DiskStore(path, {"item": 400}, "about")
    put_records(store, keys, 1)
    commit(store, b"first")
    shutil.rmtree(path)
    if change == "replaced":
        DiskStore(path, {"item": 400}, "about").close()
    put_records(store, keys[:5], 2)
    with pytest.raises(jax_tt.files.StoreError, match="removed or replaced") as raised:
        commit(store, b"second")
    assert "intact" not in str(raised.value)
    there, records = records_of(store, keys)
    assert there.all() and (records[:, 0] == np.where(keys < 5, 2, 1)).all()
    store.close()


def test_nothing_is_saved_after_a_write_that_was_interrupted(tmp_path, monkeypatch):
    """Blocks that were full and not handed to the thread of the store would be missing from what is saved."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    keys = np.arange(200, dtype=np.uint64)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    put_records(store, keys, 1)
    commit(store, b"first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DiskStore, "_wait", _interrupted)
        put_records(store, keys, 2)
    with pytest.raises(jax_tt.files.StoreError, match=r"KeyboardInterrupt.*Open the store again"):
        commit(store, b"second")
    store.close()
    store = DiskStore(tmp_path, {"item": 400}, "about")
    assert saved(store) == b"first"
    assert (records_of(store, keys)[1] == 1).all() and len(store.keys("item")) == 200
    store.close()


def _interrupted(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("size", [401, 400])
def test_changed_bytes_are_noticed(tmp_path, monkeypatch, size):
    """Whatever bit of whatever file changes: an error, or what was written."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 12)
    draw, keys = np.random.default_rng(size), np.arange(60, dtype=np.uint64)
    records = draw.integers(0, 256, (60, size), dtype=np.uint8)
    store = DiskStore(tmp_path / "first", {"item": size}, "about")
    for part in np.split(np.arange(60), 3):
        store.put("item", keys[part], addresses(records, part))
        commit(store, b"saved" * 50)
    store.close()
    used = max(offset + length for _, _, offset, length, _ in store._index.read().blocks)
    refused = 0
    for trial in range(150):
        path = tmp_path / str(trial)
        shutil.copytree(tmp_path / "first", path)
        name = ("blocks", "index")[trial % 3 == 0]
        data = bytearray((path / name).read_bytes())
        place = draw.integers(used if name == "blocks" else len(data))
        data[place] ^= 1 << draw.integers(8)
        (path / name).write_bytes(data)
        store = None
        try:
            store = DiskStore(path, {"item": size}, "about")
            found = np.zeros((60, size), np.uint8)
            there = store.get(
                "item", keys, lambda own, rows, to=found: copy_rows(own, addresses(to, rows), size)
            )
            assert there.all() and (found == records).all()
            assert saved(store) == b"saved" * 50 and (store.keys("item") == keys).all()
        except jax_tt.files.StoreError as error:
            assert "is damaged" in str(error)
            refused += 1
        finally:
            if store is not None:
                store.close()
        shutil.rmtree(path)
    assert refused > 50


def test_room_that_killed_processes_leave_is_given_back(tmp_path):
    """Also where they are killed again and again."""
    block, sizes = np.ones(5000, np.uint8), []
    path, used = tmp_path / "blocks", []
    for _ in range(4):
        file = block_file.BlockFile(path, used)
        used = used or [file.write(block)[0]]
        assert (file.memory(used[0]) == block).all()
        file.write(block)
        sizes.append(path.stat().st_size)
        os.close(file._file)
    assert len(set(sizes[1:])) == 1, sizes


def test_checksums_notice_changes_of_the_same_bit():
    """The signs of two floats, for instance, which a sum of words times odd numbers may add to nothing."""
    for size in (8, 12, 64, 135):
        row = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
        changed = np.stack([row] * (size - 1))
        changed[:, -1] ^= 128
        changed[np.arange(size - 1), np.arange(size - 1)] ^= 128
        assert (checksums(changed) != checksums(row[None])).all(), size


def test_bytes_that_change_while_a_store_is_open(tmp_path, monkeypatch):
    """Also records that were moved to other blocks since then."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    keys = np.arange(100, dtype=np.uint64)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    put_records(store, keys, 1)
    commit(store, b"saved")
    _, _, offset, length, _ = store._index.read().blocks[0]
    with open(tmp_path / "blocks", "r+b") as file:
        file.seek(offset + length - 200)
        file.write(b"other")
    for k in range(20):
        put_records(store, keys[30:], k)
    with pytest.raises(jax_tt.files.StoreError, match=r"record .* has another checksum"):
        records_of(store, keys[:30])
    store.close()


def test_a_damaged_block_is_named(tmp_path):
    store = DiskStore(tmp_path, {"item": 400}, "about")
    put_records(store, np.arange(3, dtype=np.uint64), 1)
    commit(store, b"saved")
    store.close()
    for count in (1 << 45, 500, -1):
        with open(tmp_path / "blocks", "r+b") as file:
            file.write(np.array([count]).tobytes())
        with pytest.raises(jax_tt.files.StoreError, match=r"block 0 has .* records"):
            DiskStore(tmp_path, {"item": 400}, "about")


def test_a_file_that_was_cut_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    put_records(store, np.arange(100, dtype=np.uint64), 1)
    commit(store, b"saved")
    store.close()
    os.truncate(tmp_path / "blocks", 1 << 13)
    with pytest.raises(jax_tt.files.StoreError, match=r"block \d has \d+ bytes"):
        DiskStore(tmp_path, {"item": 400}, "about")


def test_small_saves_leave_few_blocks(tmp_path):
    """Every save ends a block; none of them would ever be full."""
    store = DiskStore(tmp_path, {"item": 400}, "about")
    for k in range(200):
        put_records(store, np.arange(5 * k, 5 * k + 5, dtype=np.uint64), k % 251)
        commit(store, b"saved")
        if k % 50 == 49:
            store.close()
            store = DiskStore(tmp_path, {"item": 400}, "about")
    there, records = records_of(store, np.arange(1001, dtype=np.uint64))
    assert there.tolist() == [True] * 1000 + [False]
    assert (records == np.repeat(np.arange(200) % 251, 5)[:, None]).all()
    store.close()
    assert len(store._index.read().blocks) <= 20


def test_the_file_does_not_grow_without_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    keys = np.arange(300, dtype=np.uint64)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    for k in range(100):
        put_records(store, keys, k)
    assert (records_of(store, keys)[1] == 99).all()
    store.close()
    assert (tmp_path / "blocks").stat().st_size < 20 * 300 * 400


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("length", [0, 1 << 14])
@pytest.mark.parametrize("call", ["get", "keys", "put", "commit"])
def test_a_file_that_becomes_shorter_is_noticed(tmp_path, monkeypatch, call, length, native):
    """A process that reads a map beyond the end of its file is ended by a signal."""
    if not native:
        monkeypatch.setattr(ffi, "load", lambda platform: None)
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    keys = np.arange(400, dtype=np.uint64)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    for part in np.split(
        keys, 80
    ):  # blocks that are less than half full, which a later commit joins
        put_records(store, part, 1)
        commit(store, b"saved")
        if len(store._index.read().blocks) == 15:
            break
    calls = {
        "get": lambda: records_of(store, keys),
        "keys": lambda: store.keys("item"),
        "put": lambda: [put_records(store, keys[:30], k) for k in range(40)],
        "commit": lambda: [
            (put_records(store, keys[:3], k), commit(store, b"other")) for k in range(2)
        ],
    }
    os.truncate(tmp_path / "blocks", length)
    with pytest.raises(jax_tt.files.StoreError, match="is damaged, "):
        calls[call]()
    if call in ("put", "commit"):  # what was not moved may not be missing from what is saved
        with pytest.raises(jax_tt.files.StoreError, match="is damaged, "):
            commit(store, b"other")
    store.close()


@pytest.mark.parametrize("size", [7, 264])
def test_rows_of_a_map_are_read_with_and_without_the_native_module(monkeypatch, size):
    """Rows anywhere, some of them side by side, more than the system takes at once."""
    memory = np.random.default_rng(size).integers(0, 256, (3000, size), dtype=np.uint8)
    order = np.concatenate([np.arange(700), np.random.default_rng(0).permutation(3000)])
    reader, sums = MapReader(), []
    for _ in range(2):
        rows = reader.rows(addresses(memory, order), size)
        assert (rows == memory[order]).all()
        sums.append(checksums(rows))
        monkeypatch.setattr(ffi, "load", lambda platform: None)
    assert (sums[0] == sums[1]).all() and len(np.unique(sums[0])) > 2900


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_process_does_not_share_what_it_reads():
    rows = np.arange(8, dtype=np.uint64).reshape(2, 4)
    reader = MapReader()
    mine = reader.rows(addresses(rows, np.array([0])), 32)
    if (child := os.fork()) == 0:
        os._exit(int(reader.rows(addresses(rows, np.array([1])), 32).view(np.uint64)[0, 0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    np.testing.assert_array_equal(mine.view(np.uint64)[0], rows[0])
