"""Records on disk: what was saved stays, room is used again, damage is noticed."""

import contextlib
import errno
import os

import numpy as np
import pytest

import jax_tt
from jax_tt._tiers import disk
from jax_tt._tiers.addresses import addresses, copy_rows
from jax_tt._tiers.disk import DiskStore


def test_refused_directories_stay_as_they_are(tmp_path):
    lmdb = pytest.importorskip("lmdb")
    store = DiskStore(tmp_path, {"item": 4}, "first")
    store.commit(b"saved")
    store.close()
    for sizes, about in (({"item": 4, "other": 8}, "first and other"), ({"else": 4}, "second")):
        with pytest.raises(jax_tt.StoreError, match="holds records of"):
            DiskStore(tmp_path, sizes, about)
    with lmdb.open(str(tmp_path), max_dbs=4) as environment, environment.begin() as read:
        names = [name for name, _ in read.cursor()]
    assert sorted(names) == [b"blocks/item", b"others"]


def test_what_is_no_store_is_refused_and_not_kept_locked(tmp_path):
    pytest.importorskip("lmdb")
    (tmp_path / "data.mdb").write_bytes(b"x" * 8192)
    for _ in range(2):
        with pytest.raises(jax_tt.StoreError, match="is damaged, or another program wrote it"):
            DiskStore(tmp_path, {"item": 4}, "about")
    (tmp_path / "data.mdb").unlink()
    DiskStore(tmp_path, {"item": 4}, "about").close()


def test_a_closed_store_can_be_opened_beside_forked_processes(tmp_path):
    pytest.importorskip("lmdb")
    store = DiskStore(tmp_path, {"item": 4}, "about")
    with open(os.dup(store._lock)):  # as a process that was forked meanwhile has it
        store.close()
        DiskStore(tmp_path, {"item": 4}, "about").close()


def test_directories_that_cannot_be_locked(tmp_path, monkeypatch):
    def refused(lock, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    pytest.importorskip("lmdb")
    monkeypatch.setattr(disk.fcntl, "flock", refused)
    with pytest.raises(jax_tt.StoreError, match="cannot be locked: No locks available"):
        DiskStore(tmp_path, {"item": 4}, "about")


def records_of(store, keys):
    """Which of the keys a store of one table has, and their records."""
    found = np.zeros((len(keys), 400), np.uint8)
    there = store.get(
        "item", keys, lambda records, rows: copy_rows(records, addresses(found, rows), 400)
    )
    return there, found[there]


def put_records(store, keys, values):
    records = np.full((len(keys), 400), values, np.uint8)
    store.put("item", keys, addresses(records, np.arange(len(keys))))


def test_blocks_of_which_little_counts_are_dropped(tmp_path, monkeypatch):
    """Records that are written again and again take room for a few times as many, also after a process that died."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    draw, pool = np.random.default_rng(0), np.arange(300, dtype=np.uint64)
    model, kept = {}, {}
    store = DiskStore(tmp_path, {"item": 400}, "about")
    for k in range(400):
        keys, value = draw.permutation(pool)[: draw.integers(0, 60)], k % 251
        put_records(store, keys, value)
        model.update(dict.fromkeys(keys.tolist(), value))
        if k % 7 == 0:
            store.commit(str(k).encode())
            kept = dict(model)
        if k % 41 == 40:
            store.close()
            store = DiskStore(tmp_path, {"item": 400}, "about")
            model = dict(kept)
        there, records = records_of(store, pool)
        assert pool[there].tolist() == sorted(model) == store.keys("item").tolist()
        assert (records == np.array([model[key] for key in sorted(model)])[:, None]).all()
    store.close()
    assert (tmp_path / "data.mdb").stat().st_size < 20 * 300 * 400


def test_nothing_is_saved_after_a_write_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_MAP_BYTES", 1 << 18)
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 14)
    keys = np.arange(2000, dtype=np.uint64)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    put_records(store, keys[:3], 1)
    store.commit(b"first")
    with pytest.raises(jax_tt.StoreError, match="The last committed state is intact"):
        for first in range(0, 2000, 100):
            part = keys[first : first + 100]
            put_records(store, part, 0)
    for call in (lambda: store.commit(b"second"), lambda: records_of(store, keys)):
        with pytest.raises(jax_tt.StoreError, match="The last committed state is intact"):
            call()
    store.close()
    store = DiskStore(tmp_path, {"item": 400}, "about")
    assert store.saved() == b"first"
    assert store.keys("item").tolist() == [0, 1, 2]
    assert (records_of(store, keys)[1] == 1).all()
    store.close()


def test_nothing_is_saved_after_a_write_that_was_interrupted(tmp_path, monkeypatch):
    """Blocks that were full and not handed to the thread of the store would be missing from what is saved."""
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    keys = np.arange(200, dtype=np.uint64)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    put_records(store, keys, 1)
    store.commit(b"first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DiskStore, "_wait", _interrupted)
        put_records(store, keys, 2)
    with pytest.raises(jax_tt.StoreError, match=r"KeyboardInterrupt.*Open the store again"):
        store.commit(b"second")
    store.close()
    store = DiskStore(tmp_path, {"item": 400}, "about")
    assert store.saved() == b"first"
    assert (records_of(store, keys)[1] == 1).all() and len(store.keys("item")) == 200
    store.close()


def _interrupted(*args):
    raise KeyboardInterrupt


@contextlib.contextmanager
def _blocks_of_a_saved_store(path, records):
    """A transaction of LMDB that may change the blocks, and their database."""
    lmdb = pytest.importorskip("lmdb")
    store = DiskStore(path, {"item": 400}, "about")
    put_records(store, np.arange(records, dtype=np.uint64), 1)
    store.commit(b"saved")
    store.close()
    with lmdb.open(str(path), max_dbs=4) as environment:
        table = environment.open_db(b"blocks/item")
        with environment.begin(write=True) as write:
            yield write, table


@pytest.mark.parametrize("count", [1 << 45, 500, -1])
def test_a_damaged_block_is_named(tmp_path, count):
    with _blocks_of_a_saved_store(tmp_path, 3) as (write, table):
        block = bytearray(write.get(bytes(8), db=table))
        block[:8] = np.array([count]).tobytes()
        write.put(bytes(8), bytes(block), db=table)
    with pytest.raises(jax_tt.StoreError, match="block 0 of 'item' is damaged"):
        DiskStore(tmp_path, {"item": 400}, "about")


def test_a_deleted_block_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    with _blocks_of_a_saved_store(tmp_path, 100) as (write, table):
        assert write.delete((2).to_bytes(8, "big"), db=table)
    with pytest.raises(jax_tt.StoreError, match="4 of 5 saved blocks of 'item' are there"):
        DiskStore(tmp_path, {"item": 400}, "about")


def test_small_saves_leave_few_blocks(tmp_path):
    """Every save ends a block; none of them would ever be full."""
    lmdb = pytest.importorskip("lmdb")
    store = DiskStore(tmp_path, {"item": 400}, "about")
    for k in range(200):
        put_records(store, np.arange(5 * k, 5 * k + 5, dtype=np.uint64), k % 251)
        store.commit(b"saved")
        if k % 50 == 49:
            store.close()
            store = DiskStore(tmp_path, {"item": 400}, "about")
    there, records = records_of(store, np.arange(1001, dtype=np.uint64))
    assert there.tolist() == [True] * 1000 + [False]
    assert (records == np.repeat(np.arange(200) % 251, 5)[:, None]).all()
    store.close()
    with lmdb.open(str(tmp_path), max_dbs=4) as environment, environment.begin() as read:
        blocks = environment.open_db(b"blocks/item", read)
        assert read.stat(blocks)["entries"] <= 20


def test_the_file_does_not_grow_without_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "BLOCK_BYTES", 1 << 13)
    keys = np.arange(300, dtype=np.uint64)
    store = DiskStore(tmp_path, {"item": 400}, "about")
    for k in range(500):
        put_records(store, keys, k % 251)
    assert (records_of(store, keys)[1] == 499 % 251).all()
    store.close()
    assert (tmp_path / "data.mdb").stat().st_size < 20 * 300 * 400
