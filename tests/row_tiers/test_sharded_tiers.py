"""Tiers of a table that is sharded over devices, against one table on one device with a row for every id."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Placement
from jax_tt._tiers.saved import rows_from_host, rows_on_host
from tests.row_tiers import row_tiers_run

POOL, ROWS, BATCH, D, SEED = 160, 48, 16, 8, 3
IDS = np.random.default_rng(0).integers(0, 2**64, POOL, dtype=np.uint64)
FEATURES = {"seen": jax_tt.Feature("item"), "city": jax_tt.Feature("city")}
RULE = jax_tt.optimizers.Adagrad(0.5)


def collection_of(rows, mesh=None, placement=None):
    tables = {
        "item": jax_tt.dense_table(rows, D, optimizer=RULE, takes_slots=rows < POOL),
        "city": jax_tt.dense_table(24, D, optimizer=RULE),
    }
    if mesh is not None:
        given = {} if placement is None else {"item": placement}
        tables = jax_tt.shard_tables(tables, mesh, "model", given)
    return jax_tt.Collection(tables, FEATURES, stack=False)


LARGE = collection_of(POOL)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def step(collection, state, batch, gradients):
    def loss(trained):
        rows, _ = jax_tt.lookup_features(collection, collection.replaced(state, trained), batch)
        return sum(jnp.sum(rows[name] * gradients) for name in FEATURES)

    gradients_of = jax.grad(loss)(collection.trained(state))
    return collection.overwritten(state, gradients_of)[0]


def drawn(draw):
    """Ids that drift; whole numbers as gradients, whose sums do not depend on their order."""
    return draw.zipf(1.2, BATCH) * 7 % POOL, draw.integers(-3, 4, (BATCH, D)).astype(np.float32)


def check_directory_on(runs, path):
    """Goes on with the same directory on other devices, a mesh and a placement each."""
    draw, saved = np.random.default_rng(1), None
    whole = row_tiers_run.large_state(LARGE, IDS, SEED)
    for number, (mesh, placement) in enumerate(runs):
        collection = collection_of(ROWS, mesh, placement)
        explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
        with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
            state = jax.jit(collection.init)(jax.random.key(0))
        tier = jax_tt.Tier(host_rows=None if saved else 56, seed=SEED)
        tiers = jax_tt.Tiers(collection, {"item": tier}, path=path / "rows", depth=2)
        if restored := saved and tiers.restore(state):
            other, state = restored
            assert other == saved
        else:
            assert not number
            city = collection.separated(state)["city"]["embedding"]
            whole["city"]["embedding"] = jnp.asarray(np.asarray(city))
        steps = [drawn(draw) for _ in range(8)]
        batches = ({"seen": IDS[k][:, None], "city": k[:, None] % 24} for k, _ in steps)
        for (ranks, gradients), staged in zip(steps, tiers.prefetch(batches), strict=True):
            given = staged.batch, gradients
            if mesh is not None:
                given = jax.device_put(given, NamedSharding(mesh, P("model")))
            state = step(collection, tiers.load(state, staged), *given)
            batch = {"seen": ranks[:, None], "city": ranks[:, None] % 24}
            whole = step(LARGE, whole, batch, gradients)
        expected = np.asarray(whole["item"]["embedding"])
        np.testing.assert_array_equal(tiers.read(state, "item", IDS), expected)
        city = collection.separated(state)["city"]["embedding"]
        np.testing.assert_array_equal(city, whole["city"]["embedding"])
        counts = tiers.statistics()["item"]
        assert counts.evicted > 0 and (counts.disk_hits > 0 or not number)

        # What is dumped and removed does not depend on the devices either.
        dump = path / f"dump-{number}"
        tiers.dump(state, "item", dump, progress=False)
        other = jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=POOL, seed=SEED)})
        loaded = other.load_dump(state, "item", dump, progress=False)
        np.testing.assert_array_equal(other.read(loaded, "item", IDS), expected)
        assert float(collection.of(loaded, "item")["step"]) == 8 * (number + 1)
        gone = IDS[drawn(draw)[0]]
        first = row_tiers_run.large_state(LARGE, IDS, SEED)["item"]
        here = np.isin(IDS, tiers.remove("item", gone))
        for name in ("embedding", "slot_sum_0"):
            start = first[name] if name == "embedding" else jnp.zeros_like(first[name])
            mixed = jnp.where(here[:, None], start, whole["item"][name])
            whole["item"][name] = mixed
        saved = str(number).encode()
        tiers.save(state, saved)
        tiers.close()


def mesh_of(devices, kind="Auto"):
    types = (getattr(AxisType, kind),)
    given = jax.devices()[:devices]
    return jax.make_mesh((devices,), ("model",), axis_types=types, devices=given)


def test_rows_travel_between_two_devices_the_host_and_the_disk(tmp_path):
    check_directory_on([(mesh_of(2), None)], tmp_path)


@pytest.mark.slow
def test_a_directory_goes_on_with_one_and_four_devices(tmp_path):
    runs = [(mesh_of(1), None), (mesh_of(4, "Explicit"), Placement.hashed())]
    check_directory_on(runs, tmp_path)


def test_rows_beside_tiers_are_saved_from_their_devices():
    table = jax_tt.tables.ShardedTable(
        jax_tt.dense_table(101, 4, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1)),
        mesh_of(2),
        "model",
        Placement.hashed(),
    )
    state = jax.jit(table.init)(jax.random.key(0))
    saved = rows_on_host(table, state)
    jax.tree.map(np.testing.assert_array_equal, saved, table.by_row(state))
    restored = rows_from_host(table, jax.tree.map(np.asarray, saved))
    jax.tree.map(np.testing.assert_array_equal, table.by_row(restored), saved)
    for name in ("embedding", "slot_sum_0", "step"):
        assert name == "step" or isinstance(saved[name], np.ndarray)
        assert restored[name].sharding.is_equivalent_to(state[name].sharding, state[name].ndim)


def test_rows_that_jax_shards_stay_where_they_are(tmp_path):
    """Beside tiers they are restored to their devices; with tiers, an exchange would copy them to every device."""
    collection, places = collection_of(ROWS), NamedSharding(mesh_of(2), P("model"))

    def sharded(arrays):
        return {name: jax.device_put(x, places) if x.ndim else x for name, x in arrays.items()}

    state, tier = collection.init(jax.random.key(0)), {"item": jax_tt.Tier(host_rows=64)}
    state = {**state, "city": sharded(state["city"])}
    with jax_tt.Tiers(collection, tier, path=tmp_path, depth=0) as tiers:
        tiers.save(state)
        _, restored = tiers.restore(jax.tree.map(jnp.zeros_like, state))
        for name, array in restored["city"].items():
            np.testing.assert_array_equal(array, state["city"][name])
            assert array.sharding.is_equivalent_to(state["city"][name].sharding, array.ndim)
        state = {**state, "item": sharded(state["item"])}
        batches = tiers.prefetch([{"seen": IDS[:8, None], "city": IDS[:8, None] % 24}])
        with pytest.raises(ValueError, match=r"got rows of a table with tiers in .*shard_tables"):
            tiers.load(state, next(batches))


def test_rows_that_no_single_device_has_are_refused():
    mesh = mesh_of(2)
    for placement in Placement.columns(2), Placement.replicated():
        collection = collection_of(ROWS, mesh, placement)
        with pytest.raises(ValueError, match=r"placement .* shards whole rows without replicas"):
            jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=64)})
