"""Tables with tiers whose rows have lives: admission, ages, epochs and removal, against one table with all rows."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jax_tt
from jax_tt._formats.dump import Dump
from jax_tt._tiers.lives import LIFE
from tests.row_tiers import row_tiers_run

D, SEED, POOL = 8, 3, 90
RULE = jax_tt.optimizers.Adagrad(0.1)


def collection_of(rows):
    table = jax_tt.dense_table(rows, D, optimizer=RULE, takes_slots=rows < POOL)
    return jax_tt.Collection({"item": table}, {"seen": jax_tt.Feature("item")})


LARGE = collection_of(POOL)
STEPS = {rows: row_tiers_run.step_of(collection_of(rows)) for rows in (16, POOL)}


def opened(path, depth=2, **options):
    collection = collection_of(16)
    tier = jax_tt.Tier(host_rows=24, ways=8, seed=SEED, **options)
    tiers = jax_tt.Tiers(collection, {"item": tier}, path=path, depth=depth)
    return tiers, collection.init(jax.random.key(0))


class Model:
    """A table with a row for every id, and dicts of what is known of the ids."""

    def __init__(self, requests):
        self.requests, self.now = requests, 0
        self.ids = np.random.default_rng(8).integers(0, 2**64, POOL, dtype=np.uint64)
        self.state = row_tiers_run.large_state(LARGE, self.ids, SEED)
        self.first = {name: np.array(x) for name, x in self.state["item"].items()}
        # By rank: the last batch, the requests and the epoch; and the requests of ids that wait.
        self.lives, self.waiting = {}, {}

    def step(self, ranks, epoch):
        self.now += 1
        refused = []
        for rank, count in zip(*np.unique(ranks, return_counts=True), strict=True):
            before = self.lives.get(rank, (0, self.waiting.get(rank, 0), 0))[1]
            if rank in self.lives or before + count >= self.requests:
                self.lives[rank] = self.now, before + count, epoch
                self.waiting.pop(rank, None)
            else:
                self.waiting[rank] = before + count
                refused.append(rank)
        self.state, value = STEPS[POOL](self.state, {"seen": ranks})
        self.reset(refused)
        return value

    def reset(self, ranks):
        arrays = {name: np.array(x) for name, x in self.state["item"].items()}
        for name in LARGE.tables["item"].spec.row_arrays:
            arrays[name][ranks] = self.first[name][ranks]
        self.state = {**self.state, "item": jax.tree.map(jax.numpy.asarray, arrays)}

    def remove(self, ranks):
        for rank in ranks:
            del self.lives[rank]
        self.reset(ranks)


def check(tiers, state, model):
    found = tiers.read(state, "item", model.ids)
    np.testing.assert_array_equal(found, model.state["item"]["embedding"])


@pytest.mark.parametrize(
    "depth, requests, seed",
    [(2, 3, 0), pytest.param(3, 1, 3, marks=pytest.mark.slow)],
)
def test_random_operations(tmp_path, depth, requests, seed):
    draw, model, options = np.random.default_rng(seed), Model(requests), {}
    options["admission"] = jax_tt.dynamic.AdmitAfter(requests, waiting=POOL)
    if requests == 1:
        options = {"ages": True}
    tiers, state = opened(tmp_path, depth, **options)
    for epoch in range(1, 13):
        count = int(draw.integers(2, 9))
        batches = [(draw.zipf(1.2, (10, 1)) + epoch * 2) % POOL for _ in range(count)]
        iteration = tiers.prefetch(({"seen": model.ids[ranks]} for ranks in batches), epoch=epoch)
        for ranks in batches[: int(draw.integers(1, count + 1))]:
            staged = next(iteration)
            state, got = STEPS[16](tiers.load(state, staged), staged.batch)
            assert got == model.step(ranks, epoch)
        if epoch % 4 == 0:
            tiers.save(state)  # while batches are prepared ahead, which are not saved
        iteration.close()
        check(tiers, state, model)
        if epoch % 4 == 0:
            tiers.close()
            tiers, state = opened(tmp_path, depth, **options)
            _, state = tiers.restore(state)
            check(tiers, state, model)
        views = []

        def old(view, views=views, epoch=epoch):
            views.append(view)
            return (view.age > 12) if epoch % 2 else view.epoch < epoch - 2

        gone = tiers.remove("item", where=old)
        (view,) = views
        ranks = {int(key): rank for rank, key in enumerate(model.ids)}
        assert {
            ranks[int(key)]: (model.now - int(age), int(count), int(last))
            for key, age, count, last in zip(*view, strict=True)
        } == model.lives
        expired = [
            rank
            for rank, (touched, _, last) in model.lives.items()
            if (model.now - touched > 12 if epoch % 2 else last < epoch - 2)
        ]
        np.testing.assert_array_equal(gone, np.sort(model.ids[expired]))
        model.remove(expired)
        some = [rank for rank in draw.integers(0, POOL, 3).tolist() if rank in model.lives]
        some = np.array(sorted(set(some)), int)
        np.testing.assert_array_equal(
            tiers.remove("item", np.append(model.ids[some], np.uint64(5))), np.sort(model.ids[some])
        )
        model.remove(some.tolist())
        check(tiers, state, model)
        dumped = tiers.dump(state, "item", tmp_path / f"dump-{epoch}", progress=False)
        assert dumped == len(model.lives)
    assert model.lives
    tiers.close()


@pytest.mark.parametrize("ages", [True, False])
def test_dumps_of_changes_make_the_table(tmp_path, ages):
    """From window to window and from the first dump; into tiers and into a hash table, without removed rows."""
    draw, options = np.random.default_rng(4), {"admission": 2} if ages else {}
    tiers, state = opened(tmp_path / "tiers", **options)
    for window in range(4):
        batches = [{"seen": draw.integers(0, 60, (10, 1)) + 9 * window} for _ in range(6)]
        for staged in tiers.prefetch(batches, epoch=window):
            state, _ = STEPS[16](tiers.load(state, staged), staged.batch)
        if ages:
            assert window == 0 or tiers.remove("item", where=lambda view: view.age > 6).size > 1
        else:
            tiers.remove("item", draw.integers(0, 60, 10))
        for first in (None, 0, window - 1)[: 1 + (window > 0) + (window > 1)]:
            name, since = (
                tmp_path / f"{first}-{window}",
                first if first is None else f"None-{first}",
            )
            count = tiers.dump(
                state,
                "item",
                name,
                since=since and tmp_path / since,
                rows_per_file=16,
                progress=False,
            )
            if first is None:
                whole = count
        assert window < 2 or 0 < count < whole
    ids = np.arange(90)
    expected = tiers.read(state, "item", ids)
    for paths in (["None-0", "0-1", "1-2", "2-3"], ["None-0", "0-3"], ["None-3"]):
        other, after = opened(None if paths[1:] else tmp_path / "other", **options)
        other.grow_host("item", 96)
        table = jax_tt.hash_table(128, D, optimizer=RULE)
        hashed = table.init(jax.random.key(1))
        for path in paths:
            after = other.load_dump(after, "item", tmp_path / path, progress=False)
            _, hashed = jax_tt.files.load_dump(table, hashed, tmp_path / path, progress=False)
        np.testing.assert_array_equal(other.read(after, "item", ids), expected)
        other.dump(after, "item", tmp_path / "again", overwrite=True, progress=False)
        pair = [Dump.open(tmp_path / name) for name in ("again", "None-3")]
        assert pair[0].digests == pair[1].digests
        names = ["held_keys", "held_digests"]
        if ages:
            names += [f"tier_{kind}_{x}" for kind in ("row", "waiting") for x in LIFE.names]
        for name in names:
            np.testing.assert_array_equal(*(dump.rest([name])[name] for dump in pair), err_msg=name)
        entries = np.sort(jax_tt.dynamic.keys_of(table, hashed), order="key")
        np.testing.assert_array_equal(entries["key"], pair[1].rest(["held_keys"])["held_keys"])
        np.testing.assert_array_equal(
            np.asarray(hashed["embedding"])[entries["slot"]], expected[entries["key"].astype(int)]
        )
    with pytest.raises(ValueError, match=r"tiers\['item'\]: state: got .* in another state"):
        other.load_dump(after, "item", tmp_path / "1-2", progress=False)
    np.testing.assert_array_equal(other.read(after, "item", ids), expected)


def test_admission_by_chance_and_how_many_wait(tmp_path):
    tiers, state = opened(None, 0, admission=jax_tt.dynamic.AdmitAfter(2, waiting=8))
    for first in range(0, 80, 4):
        for staged in tiers.prefetch([{"seen": np.arange(first, first + 4)[:, None]}]):
            state = tiers.load(state, staged)
    for ids, admitted in ((np.arange(4), False), (np.arange(76, 80), True)):
        for staged in tiers.prefetch([{"seen": ids[:, None]}]):
            state = tiers.load(state, staged)
        assert (tiers.remove("item", where=lambda view: view.age == 0).size == 4) == admitted
    tiers, state = opened(tmp_path, admission=jax_tt.dynamic.AdmitWithProbability(0.25))
    for staged in tiers.prefetch({"seen": np.arange(k, k + 8)[:, None]} for k in range(0, 400, 8)):
        state = tiers.load(state, staged)
    assert 60 < len(tiers.remove("item", np.arange(400))) < 140


def test_errors(tmp_path):
    tiers, state = opened(tmp_path)
    with pytest.raises(ValueError, match="expected one of them"):
        tiers.remove("item")
    with pytest.raises(ValueError, match=r"ids: got float64 of shape \(1,\); expected integers"):
        tiers.remove("item", [1.5])
    with pytest.raises(KeyError, match="table: got 'user'; expected one of item"):
        tiers.remove("user", [1])
    with pytest.raises(ValueError, match=r"expected Tier\(\.\.\., ages=True\)"):
        tiers.remove("item", where=lambda view: view.age > 1)
    with pytest.raises(ValueError, match="epoch: got 2147483648"):
        next(tiers.prefetch([], epoch=2**31))
    iteration = tiers.prefetch([{"seen": np.arange(4)[:, None]}] * 3)
    state = tiers.load(state, next(iteration))
    with pytest.raises(RuntimeError, match="batches are prepared ahead"):
        tiers.remove("item", [1])
    iteration.close()
    assert tiers.remove("item", [1, 1, -5]).tolist() == [1]
    tiers.close()
    with pytest.raises(jax_tt.files.StoreError, match=r"about\.item\.ages: got true"):
        opened(tmp_path, ages=True)
    tiers, state = opened(None, ages=True)
    for staged in tiers.prefetch([{"seen": np.arange(4)[:, None]}]):
        state = tiers.load(state, staged)
    with pytest.raises(
        ValueError, match=r"returned int64 of shape \(4,\); expected an array, bool"
    ):
        tiers.remove("item", where=lambda view: view.age)


def trained(tiers, state, batches):
    for staged in tiers.prefetch({"seen": np.reshape(batch, (-1, 1))} for batch in batches):
        state, _ = STEPS[16](tiers.load(state, staged), staged.batch)
    return state


def dumped_twice(path):
    """A whole dump of 32 rows, and one of changes: 16 rows are trained, and 2 leave."""
    tiers, state = opened(path / "tiers", ages=True)
    state = trained(tiers, state, np.arange(32).reshape(4, 8))
    tiers.dump(state, "item", path / "whole", progress=False)
    state = trained(tiers, state, np.arange(16).reshape(2, 8))
    tiers.remove("item", [20, 30])
    assert not len(tiers.remove("item", []))
    count = tiers.dump(
        state, "item", path / "changes", since=path / "whole", rows_per_file=4, progress=False
    )
    assert count == 16
    return tiers.read(state, "item", np.arange(32))


def test_changes_take_the_room_of_the_rows_that_they_replace(tmp_path):
    expected = dumped_twice(tmp_path)
    tiers, state = opened(None, ages=True)
    with pytest.raises(jax_tt.files.StoreError, match="24 rows in host memory are full"):
        tiers.load_dump(state, "item", tmp_path / "whole", progress=False)
    assert tiers.dump(state, "item", tmp_path / "empty", progress=False) == 0
    tiers.grow_host("item", 32)
    # They may come again.
    for name in "whole", "changes", "changes":
        state = tiers.load_dump(state, "item", tmp_path / name, progress=False)
    np.testing.assert_array_equal(tiers.read(state, "item", np.arange(32)), expected)
    assert tiers.dump(state, "item", tmp_path / "again", progress=False) == 30


def test_nothing_is_read_after_a_part_of_a_dump(tmp_path):
    dumped_twice(tmp_path)
    last = sorted((tmp_path / "changes").glob("keys-*"))[-1]
    content, rows = last.read_bytes(), load_file(last)["embedding"].tobytes()
    last.write_bytes(content.replace(rows, bytes(len(rows))))
    tiers, state = opened(None, ages=True)
    tiers.grow_host("item", 32)
    state = tiers.load_dump(state, "item", tmp_path / "whole", progress=False)
    with pytest.raises(jax_tt.FileError, match="damaged"):
        tiers.load_dump(state, "item", tmp_path / "changes", progress=False)
    with pytest.raises(jax_tt.files.StoreError, match="Open them again"):
        tiers.read(state, "item", np.arange(32))


def test_hash_tables_go_on_with_the_batches_of_tiers(tmp_path):
    """And tiers with those of hash tables; otherwise new keys would be older than all others."""
    dumped_twice(tmp_path)
    table = jax_tt.hash_table(64, D, optimizer=RULE)
    state, views = table.init(jax.random.key(0)), []
    for name, clock in ("whole", 4), ("changes", 6):
        _, state = jax_tt.files.load_dump(table, state, tmp_path / name, progress=False)
        assert state["hash_clock"] == clock
    _, state = jax_tt.dynamic.insert(table, state, np.arange(40, 44))
    entries = jax_tt.dynamic.keys_of(table, state)
    new = (entries["key"] >= 40) & (entries["key"] < 44)
    assert (entries["touched"][new] == 7).all() and (entries["touched"][~new] < 7).all()
    _, state = jax_tt.dynamic.remove(table, state, keys=np.arange(40, 44))
    jax_tt.files.dump(table, state, tmp_path / "hashed", progress=False)
    tiers, after = opened(tmp_path / "others", ages=True)
    tiers.load_dump(after, "item", tmp_path / "hashed", progress=False)

    def look(view):
        views.append(view)
        return view.age > 100

    tiers.remove("item", where=look)
    assert views[0].age.min() == 1
