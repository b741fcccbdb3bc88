"""Plans of tables on devices: predictions against compiled programs, loads against the exchange, limits, files."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Placement
from jax_tt._ids.placement import stored_rows
from jax_tt._planning.load import load_of, sample_of
from jax_tt._planning.placements import _by_load
from jax_tt._planning.traced_exchange import traced_exchange

DEVICES, BATCH = 4, 64
RULE = jax_tt.optimizers.RowWiseAdagrad(0.1)
TABLES = {
    "user": jax_tt.dense_table(5000, 16, optimizer=RULE),
    "item": jax_tt.dense_table(900, 8, optimizer=jax_tt.optimizers.Adam(0.1)),
    "day": jax_tt.dense_table(7, 4),
}
LENGTHS = {"user": 6, "item": 3, "day": 1}


def _ids(steps=1):
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, table.num_embeddings, (steps * BATCH, LENGTHS[name]))
        for name, table in TABLES.items()
    }


@functools.cache
def _planned():
    return jax_tt.planning.plan_placements(TABLES, DEVICES, _ids())


def _mesh():
    return jax.make_mesh((DEVICES,), ("model",), axis_types=(AxisType.Auto,))


def _operands(text, names):
    """Bytes of the operands of collectives in a part of a compiled program, those of all-gathers once per device."""
    sizes = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}
    total = 0
    for result, name in re.findall(rf"= (\S+|\([^=]*\)) ({names})(?:-start)?\(", text):
        parts = DEVICES if name == "reduce-scatter" else 1
        for kind, shape in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", result):
            size = math.prod(int(size) for size in shape.split(",") if size)
            total += parts * sizes[kind] * size
    return total


@pytest.mark.slow
def test_predicted_bytes_are_those_of_the_compiled_step():
    """With a table that has replicas of pages beside tables that are placed as planned."""
    ids = _ids()
    plan = _planned()
    bags = BATCH // DEVICES
    chosen = {**plan, "user": Placement.pages([(0, 1), 2, 3, (3, 1), 0], 1000)}
    planned, found = (
        traced_exchange(
            {name: (table, places[name], (bags, LENGTHS[name])) for name, table in TABLES.items()},
            DEVICES,
        )
        for places in (plan, chosen)
    )
    assert plan.exchange == planned
    collection = jax_tt.Collection(
        jax_tt.shard_tables(TABLES, _mesh(), "model", chosen),
        {name: jax_tt.Feature(name) for name in TABLES},
    )
    batch = {name: jnp.asarray(value) for name, value in ids.items()}
    batch = jax.device_put(batch, NamedSharding(_mesh(), P("model")))
    state = jax.jit(collection.init)(jax.random.key(0))

    @jax.jit
    def step(state, batch):
        def loss(trained):
            rows, _ = jax_tt.lookup_features(collection, collection.replaced(state, trained), batch)
            return sum(jnp.sum(jnp.sin(array)) for array in rows.values())

        return jax.grad(loss)(collection.trained(state))

    text = step.lower(state, batch).compile().as_text()
    entry = re.search(r"\nENTRY .*?\n\}", text, re.DOTALL).group()
    names = "all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"
    predicted = found.forward + found.backward
    assert predicted == pytest.approx(_operands(entry, names), rel=0.1)
    further = _operands(text, names) - _operands(entry, names)
    assert found.further == pytest.approx(further, rel=0.1)


def test_predicted_memory_is_that_of_the_arrays():
    plan = _planned()
    sharded = jax_tt.shard_tables(TABLES, _mesh(), "model", plan)
    for name, table in sharded.items():
        arrays = jax.jit(table.init)(jax.random.key(0)).values()
        held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
        assert plan.tables[name].device_bytes == held


@pytest.mark.parametrize(
    "placement",
    [Placement.hashed(), Placement.on(2), Placement.pages([(0, 1), (2, 3, 1), 3, 0, 1], 200)],
)
def test_loads_are_those_of_the_exchange(placement):
    """Counted one id at a time."""
    ids = np.random.default_rng(1).zipf(1.3, (2 * BATCH, 5)) % 1000
    layout = placement.layout(1000, DEVICES)
    load = load_of(sample_of("item", ids, 1000, DEVICES, 2), layout)
    first = np.asarray(stored_rows(layout, layout.page_table, np.arange(1000))) // layout.rows
    pages = placement.devices if placement.kind == "pages" else ()
    read, stepped = np.zeros(DEVICES), np.zeros(DEVICES)
    for part, own in enumerate(ids.reshape(2 * DEVICES, -1)):
        for row in set(own.tolist()):
            devices = pages[row // 200] if pages else (first[row],)
            read[devices[part % DEVICES % len(devices)]] += 0.5
            for device in devices:
                stepped[device] += 0.5
    np.testing.assert_allclose(load.read, read)
    np.testing.assert_allclose(load.stepped, stepped)


def test_rows_for_one_device_take_several_rounds():
    ids = np.random.default_rng(1).integers(0, 10**5, (BATCH, 20))
    sample = sample_of("item", ids, 10**5, DEVICES, 1)
    assert load_of(sample, Placement.hashed().layout(10**5, DEVICES)).rounds == 1
    # 320 rows, and messages of 80 + 4 sqrt(80).
    assert load_of(sample, Placement.on(1).layout(10**5, DEVICES)).rounds in (4, 8)


def test_sums_that_do_not_fit_take_another_attempt():
    """Half of the ids of long bags are the same one, which is more than twice an eighth of them."""
    rng = np.random.default_rng(0)
    tables = {"item": jax_tt.dense_table(10**5, 16, optimizer=RULE)}
    ids = rng.integers(0, 10**5, (BATCH, 40))
    plan = jax_tt.planning.plan_placements(tables, 8, {"item": ids})
    assert plan.exchange.summed == {"item"}
    assert plan.tables["item"].load.fits
    assert plan.rounds == 1
    ids[:, ::2] = 7
    skewed = jax_tt.planning.plan_placements(tables, 8, {"item": ids})
    assert not skewed.tables["item"].load.fits
    assert skewed.rounds == 2


def test_hot_pages_are_dealt_out_to_several_devices():
    """All devices request the same few rows, which are neighbours."""
    rng = np.random.default_rng(0)
    devices, rows = 16, 100_000
    ids = rng.integers(0, 20, (8 * devices * 32, 1)) + 40_000
    ids[::2] = rng.integers(0, rows, (8 * devices * 16, 1))
    made_from, judged_by = sample_of("item", ids, rows, devices, 8).parts()
    (dealt,) = _by_load(made_from, rows)
    assert max(map(len, dealt.devices)) > 1
    loads = [
        load_of(judged_by, placement.layout(rows, devices)).read
        for placement in (dealt, Placement.contiguous())
    ]
    assert loads[0].sum() == loads[1].sum()
    assert loads[0].max() < loads[1].max() / 2


def test_limits_of_memory():
    smallest = _planned().device_bytes
    with pytest.raises(
        ValueError, match=r"device_bytes: got 1,000 bytes; expected at least .* on each of 4"
    ):
        jax_tt.planning.plan_placements(TABLES, DEVICES, _ids(), device_bytes=1000)
    within = jax_tt.planning.plan_placements(TABLES, DEVICES, _ids(), device_bytes=smallest)
    assert within.device_bytes <= smallest
    with pytest.raises(ValueError, match="of which messages take"):
        jax_tt.planning.plan_placements(
            TABLES, DEVICES, _ids(), device_bytes=within.device_bytes - 1
        )


def test_invalid_arguments():
    for arguments, error, message in [
        (({}, 4), TypeError, "tables: got {}"),
        (({"a": 3}, 4), TypeError, r"tables\['a'\]: got 3"),
        ((TABLES, 0), ValueError, "devices: got 0"),
        ((TABLES, 4, {"b": [1]}), ValueError, "id_samples: got 'b'"),
        ((TABLES, 4, {"day": [0.5]}), TypeError, r"id_samples\['day'\]: got float64"),
        ((TABLES, 4, {"day": [7]}), ValueError, r"id_samples\['day'\]: got the id 7"),
        ((TABLES, 4, {"day": np.zeros((0, 2), int)}), ValueError, r"got .*shape \(0, 2\)"),
    ]:
        with pytest.raises(error, match=message):
            jax_tt.planning.plan_placements(*arguments)


def test_automatic_placements():
    tables = {**TABLES, "city": jax_tt.tt_table(1000, 8, tt_ranks=2)}
    sharded = jax_tt.shard_tables(tables, _mesh(), "model", "auto")
    assert {name: type(table).__name__ for name, table in sharded.items()} == {
        **dict.fromkeys(TABLES, "ShardedTable"),
        "city": "TTTable",
    }
    with pytest.raises(ValueError, match="placement: got 'automatic'; expected one of 'auto'"):
        jax_tt.shard_tables(tables, _mesh(), "model", "automatic")
    with pytest.raises(ValueError, match="expected one or several different axes"):
        jax_tt.shard_tables(tables, _mesh(), "expert", "auto")


def test_plans_of_sizes_place_what_becomes_dense():
    sizes = {"items": (1_000_000, 64), "shops": (30_000, 16)}
    plan = jax_tt.plan(sizes, 4_000_000, devices=8, optimizer=RULE)
    assert dict(plan.placements) == {"shops": Placement.hashed()}
    assert "Expected time of the tables" in str(plan)
    dense = jax_tt.plan(sizes, devices=8)
    assert set(dense.placements) == {"items", "shops"}
    assert dense.placements.table_bytes == pytest.approx((64e6 + 48e4) * 4 / 8, rel=1e-3)
    with pytest.raises(ValueError, match="budget_bytes: got None"):
        jax_tt.plan(sizes)


@pytest.mark.slow
def test_large_plans_need_no_devices():
    tables = {"item": jax_tt.dense_table(10**12, 64, optimizer=RULE)}
    ids = np.random.default_rng(0).integers(0, 10**12, 4096 * 8)
    plan = jax_tt.planning.plan_placements(tables, 4096, {"item": ids}, device_bytes=80 * 10**9)
    assert plan.table_bytes == pytest.approx(10**12 * 260 / 4096, rel=0.01)
    assert len(plan.seconds) == 4096
    with pytest.raises(ValueError, match="Use more devices"):
        jax_tt.planning.plan_placements(tables, 4096, {"item": ids}, device_bytes=10**10)


@pytest.mark.slow
def test_the_page_of_plans_shows_what_is_planned():
    from docs import make_device_plans as made

    page = made.PAGE.read_text()
    assert "simulation" in page
    devices, rows = made.SIZES[0]
    assert made.line(devices, rows) in page, "run: python -m docs.make_device_plans"


def test_rows_of_large_tables_are_not_cut():
    rows, devices = 10**12, 4096
    ids = np.random.default_rng(0).integers(0, rows, devices * 8)
    layout = Placement.contiguous().layout(rows, devices)
    load = load_of(sample_of("item", ids, rows, devices, 1), layout)
    expected = np.bincount(ids // layout.page_size, minlength=devices)
    np.testing.assert_array_equal(load.read, expected)
    for placement in (Placement.hashed(), Placement.round_robin()):
        load = load_of(sample_of("item", ids, rows, devices, 1), placement.layout(rows, devices))
        assert load.read.sum() == len(ids)
        assert load.read.max() < 40  # 8 on average


def test_bandwidths_are_kept_in_files(tmp_path):
    path = str(tmp_path / "bandwidths.json")
    found = jax_tt.planning.measure_bandwidths(_mesh(), "model", rows=64, ids=32, words=64)
    found.save(path)
    assert jax_tt.planning.Bandwidths.load(path) == found
    assert min(found.exchange, found.message_seconds, found.gather, found.update, found.route) > 0
    with pytest.raises(FileExistsError):
        found.save(path)
    for text in ("", "[]", '{"exchange": 1}', '{"exchange": -1, "message_seconds": 1, "gather": 1, '
                 '"update": 1, "route": 1, "machine": ""}'):  # fmt: skip
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(jax_tt.FileError, match=r"other\.json"):
            jax_tt.planning.Bandwidths.load(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match="axis: got 'model'"):
        jax_tt.planning.measure_bandwidths(jax.make_mesh((1,), ("model",)), "model")
