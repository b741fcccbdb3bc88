"""Hash tables divided over devices by a hash of their keys equal those of one device."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import dispatch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Placement, optimizers
from jax_tt._base import reports
from jax_tt._directories.hashing import homes_of, keys_of_words, owners_of, words_of
from jax_tt._kinds.sharded.route import Route, distinct
from jax_tt._table.checkpoint import unsharded
from jax_tt.tables import ShardedTable

WIDTH = 8
RULES = {"fused": optimizers.Adam(0.01), "plain": None, "custom": optimizers.RowWiseAdagrad(0.1)}
FEATURES = {
    "mean": jax_tt.Feature("fused", combiner="mean"),
    "sequence": jax_tt.Feature("fused", combiner=None),
    "plain": jax_tt.Feature("plain"),
    "custom": jax_tt.Feature("custom"),
    "dense": jax_tt.Feature("dense"),
}


def _mesh(*shape):
    names = ("data", "model")[-len(shape) :]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def _tables(capacity=512):
    tables = {
        name: jax_tt.hash_table(
            capacity,
            WIDTH,
            optimizer=rule,
            policy="custom" if name == "custom" else "lru",
            safe_check="ignore",  # programs with callbacks are compiled anew in every process
        )
        for name, rule in RULES.items()
    }
    return tables | {"dense": jax_tt.dense_table(50, WIDTH, optimizer=RULES["fused"])}


def _keys(rng, *shape):
    """Keys of which many have the same high or low words, with both signs."""
    ids = rng.zipf(1.3, shape) % 80
    return np.where(ids % 2 == 0, ids << 32, -ids) | np.where(ids % 3 == 0, 2**62, 0)


def _batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        keys = {name: _keys(rng, 12, 3) for name in ("mean", "sequence", "plain", "custom")}
        batch = {name: jax_tt.dynamic.split_keys(own) for name, own in keys.items()}
        scores = {"custom": jax_tt.dynamic.split_keys(rng.integers(0, 2**40, (12, 3)))}
        yield batch | {"dense": rng.integers(0, 50, (12, 2))}, scores


def _step(collection, state, batch, scores):
    inserted, state = jax_tt.dynamic.insert(collection, state, batch, scores=scores)

    def loss(trained):
        arrays = collection.replaced(state, trained)
        rows, _ = jax_tt.lookup_features(collection, arrays, batch)
        return sum(jnp.sum(jnp.sin(3 * array)) for array in rows.values()), rows

    gradients, rows = jax.grad(loss, has_aux=True)(collection.trained(state))
    state, others = collection.overwritten(state, gradients)
    own = state["plain"]["embedding"] - 0.1 * others["plain"]["embedding"]
    state = {**state, "plain": {**state["plain"], "embedding": own}}
    return state, rows, {name: own.counts for name, own in inserted.items()}


def _run(tables, place=lambda inputs: inputs):
    """Some steps; the collection, its state, what was found, and the program."""
    collection = jax_tt.Collection(tables, FEATURES)
    state = jax.jit(collection.init)(jax.random.key(0))
    found, step = [], None
    for inputs in _batches(3):
        batch, scores = place(inputs)
        if step is None:
            lowered = jax.jit(_step, static_argnums=0).lower(collection, state, batch, scores)
            step = lowered.compile()
        state, rows, counts = step(state, batch, scores)
        found.append((rows, counts))
    return collection, state, found, step.as_text()


def _by_key(table, state):
    """The arrays of a table in the order of its keys, by name."""
    entries = jax_tt.dynamic.keys_of(table, state)
    entries = entries[np.argsort(entries["key"])]
    names = (table.table if isinstance(table, ShardedTable) else table).table.spec.row_arrays
    rows = {name: np.asarray(state[name])[entries["slot"]] for name in names}
    return rows | {name: entries[name] for name in ("key", "score", "touched")}


def _check_alike(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_steps_on_three_devices_equal_those_on_one():
    """And have one exchange for insertion, and three for lookups."""
    plain, expected_state, expected, _ = _run(_tables(512))
    # A multiple of the devices and of the ways.
    tables = jax_tt.shard_tables(_tables(768), _mesh(3), "model")
    over_devices = NamedSharding(_mesh(3), P("model"))
    collection, state, found, text = _run(tables, lambda own: jax.device_put(own, over_devices))
    entry = re.search(r"\nENTRY .*?\n\}", text, re.DOTALL)
    assert len(re.findall(r" all-to-all\(", entry.group())) == 4
    assert "all-gather" not in text
    for (rows, counts), (own_rows, own_counts) in zip(found, expected, strict=True):
        _check_alike(rows, own_rows)
        assert jax.tree.map(int, counts) == jax.tree.map(int, own_counts)
    for name in RULES:
        table = collection.tables[name]
        assert isinstance(table, ShardedTable)
        _check_alike(_by_key(table, state[name]), _by_key(plain.tables[name], expected_state[name]))
        whole = table.by_row(state[name])
        moved = unsharded(table).of_rows(whole)
        _check_alike(_by_key(unsharded(table), moved), _by_key(table, state[name]))
        again = table.of_rows(whole)
        _check_alike(_by_key(table, again), _by_key(table, state[name]))
        np.testing.assert_array_equal(again["hash_totals"], state[name]["hash_totals"])
        entries = jax_tt.dynamic.keys_of(table, state[name])
        words = jnp.asarray(jax_tt.dynamic.split_keys(entries["key"]).digits).view(jnp.uint32)
        owners = owners_of(*words_of(words), table.layout.devices)
        np.testing.assert_array_equal(owners, entries["slot"] // table.layout.rows)


@pytest.mark.slow
def test_keys_that_are_not_there_read_their_initial_values():
    plain = jax_tt.hash_table(64, WIDTH, seed=5)
    keys = jnp.asarray(jax_tt.dynamic.split_keys(np.arange(24).reshape(8, 3) * 2**40).digits)
    weights = jnp.linspace(0, 1, 24).reshape(8, 3)
    for table in plain, dataclasses.replace(plain, missing="zeros"):
        sharded = ShardedTable(table, _mesh(4), "model", Placement.hashed())

        @jax.jit(static_argnums=0)
        def looked_up(table, state, weights):
            def loss(weights):
                own = jax_tt.Bags(jax_tt.SplitIds(keys), weights=weights)
                rows, _ = jax_tt.lookup_bags(table, state, own, train=False)
                return jnp.sum(rows**2), rows

            return jax.grad(loss, has_aux=True)(weights)

        results = [looked_up(own, own.init(jax.random.key(0)), weights) for own in (table, sharded)]
        for found, expected in zip(*results, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert bool(jnp.any(results[0][1] != 0)) == (table.missing == "initial")


@pytest.mark.parametrize("words", [1, 4])
def test_keys_with_the_same_first_word_are_different(words):
    rng = np.random.default_rng(0)
    device, row, rest = (jnp.asarray(rng.integers(0, k, 50), jnp.int32) for k in (3, words, 5))
    for method in ("reference", "auto"):
        route, source, places = distinct(Route(device, row, rest), 3, method)
        for own, requested in zip(route, (device, row, rest), strict=True):
            np.testing.assert_array_equal(own[places], requested)
            np.testing.assert_array_equal(
                own[source < 50], requested[jnp.minimum(source, 49)][source < 50]
            )
        found = np.stack([route.device, route.row, route.rest], 1)[np.asarray(source) < 50]
        assert len(np.unique(found, axis=0)) == len(found)


@pytest.mark.parametrize("step", [1, 1024, 2**32, 2**44])
def test_owners_are_spread_evenly_and_independently_of_sets(step):
    keys = jnp.asarray(
        jax_tt.dynamic.split_keys(np.arange(4096, dtype=np.uint64) * np.uint64(step)).digits
    )
    keys = jax.lax.bitcast_convert_type(keys, jnp.uint32)
    first, rest = words_of(keys)
    np.testing.assert_array_equal(keys_of_words(first, rest), keys)
    owners = np.asarray(owners_of(first, rest, 8))
    for sets in (np.zeros(4096, int), *(np.asarray(own) for own in homes_of(keys, 8))):
        counts = np.bincount(owners * 8 + sets, minlength=64)
        counts = counts.reshape(8, 8)[:, : sets.max() + 1]
        assert counts.min() > 0.4 * counts.mean()
        assert counts.max() < 1.6 * counts.mean()


def test_hash_tables_that_cannot_be_divided_are_refused():
    waiting = jax_tt.dynamic.AdmitAfter(2, 40)
    for change, message in (
        ({"admission": waiting}, "admission: .* 40 waiting .* of 32"),
        ({"missing": 3}, "missing: got 3"),
        ({"ways": 32}, "capacity: got 64 rows for 4 devices .* multiple of 128"),
    ):
        table = dataclasses.replace(jax_tt.hash_table(64, WIDTH), **change)
        with pytest.raises(ValueError, match=message):
            ShardedTable(table, _mesh(4), "model", Placement.hashed())


def test_tables_with_a_largest_capacity_are_divided_by_any_number():
    plain = jax_tt.hash_table(96, WIDTH, max_capacity=192)
    table = ShardedTable(plain, _mesh(3), "model", Placement.hashed())
    keys = jax_tt.dynamic.split_keys(np.arange(6) * 7)
    _, state = jax_tt.dynamic.insert(table, jax.jit(table.init)(jax.random.key(0)), keys)
    for capacity in (192, 192):
        change = jax_tt.dynamic.grow_if_full(table, state, max_load=0.01)
        table, state = change.table, change.state
        assert table.num_embeddings == capacity
    assert jax_tt.dynamic.statistics(table, state)["keys"] == 6


def test_what_hash_tables_on_several_devices_cannot_do_is_refused():
    plain = jax_tt.hash_table(64, WIDTH, name="item")
    with pytest.raises(ValueError, match=r"item: placement: .* expected Placement.hashed"):
        ShardedTable(plain, _mesh(4), "model", Placement.contiguous())
    table = ShardedTable(plain, _mesh(4), "model", Placement.hashed())
    state = table.init(jax.random.key(0))
    with pytest.raises(TypeError, match=r"item: table: .* cannot be moved"):
        table.moved(state, Placement.hashed())
    with pytest.raises(ValueError, match=r"item: size: got None .* e.g. size=1024"):
        jax_tt.dynamic.remove(table, state, where=lambda view: view.age > 0)
    collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    with pytest.raises(ValueError, match="statistics"):
        collection.with_statistics(collection.init(jax.random.key(0)))


def test_evicted_keys_come_to_all_devices():
    """Also where a batch travels in several rounds, as all of its keys belong to one device."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    plain = jax_tt.hash_table(
        128,
        WIDTH,
        optimizer=optimizers.Adagrad(0.1),
        policy="lfu",
        safe_check="ignore",
    )
    table = ShardedTable(plain, mesh, "model", Placement.hashed())
    keys = np.arange(1, 800) << 33
    words = jnp.asarray(jax_tt.dynamic.split_keys(keys).digits).view(jnp.uint32)
    mine = keys[np.asarray(owners_of(*words_of(words), table.layout.devices)) == 1]
    (slot,) = set(plain.table.spec.row_arrays) - {"embedding"}
    insert = jax.jit(functools.partial(jax_tt.dynamic.insert, table, return_evicted=True))
    with jax.set_mesh(mesh):
        after = table.init(jax.random.key(0))
        marks = np.random.default_rng(0).normal(size=(128, WIDTH))
        for step, ids in enumerate((keys[:131], keys[200:331], mine[-131:])):
            marked = jax.device_put(jnp.asarray(marks + step, jnp.float32), after[slot].sharding)
            before = {**after, slot: marked}
            inserted, after = insert(before, jax_tt.dynamic.split_keys(ids))
            held = jax_tt.dynamic.keys_of(table, before)
            left = held[~np.isin(held["key"], jax_tt.dynamic.keys_of(table, after)["key"])]
            count = len(left)
            assert int(inserted.counts["evicted"]) == count
            assert bool(count) == bool(step)
            evicted = jax.device_get(inserted.evicted)
            assert evicted.touched.shape == (131,) and not evicted.touched[count:].any()
            assert inserted.evicted.keys.is_fully_replicated
            first, rest = evicted.keys[:count].astype(np.uint64).T
            found = first << np.uint64(32) | rest
            order, slots = np.argsort(found), left[np.argsort(left["key"])]
            np.testing.assert_array_equal(found[order], slots["key"])
            np.testing.assert_array_equal(evicted.touched[order], slots["touched"])
            np.testing.assert_array_equal(evicted.scores[order, 1], slots["score"])
            for name, rows in evicted.arrays.items():
                np.testing.assert_array_equal(
                    rows[order], np.asarray(before[name])[slots["slot"]], err_msg=name
                )


def test_keys_leave_their_devices():
    rule, dtype = optimizers.Adagrad(0.1), jnp.bfloat16
    plain = jax_tt.hash_table(256, WIDTH, optimizer=rule, param_dtype=dtype)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    table = ShardedTable(plain, mesh, "model", Placement.hashed())
    with jax.set_mesh(mesh):
        state = table.init(jax.random.key(0))
        for count in 100, 60:  # batches of one size, for one program
            ids = jax_tt.dynamic.split_keys(np.arange(100) % count)
            _, state = jax_tt.dynamic.insert(table, state, ids)
        before = jax_tt.dynamic.keys_of(table, state)
        for options, size, gone in (
            ({"keys": jax_tt.dynamic.split_keys(np.array([3, 7, 1000, 99]))}, 4, [3, 7, 99]),
            ({"where": lambda view: view.age >= 1, "size": 30}, 30, None),
        ):
            removed, after = jax_tt.dynamic.remove(table, state, **options)
            # In the order of slots, those of the first device first.
            chosen = before["touched"] == 1 if gone is None else np.isin(before["key"], gone)
            expected = before[chosen][:size]
            count = len(expected)
            np.testing.assert_array_equal(removed.keys[:count, 1], expected["key"])
            np.testing.assert_array_equal(removed.touched[:count], expected["touched"])
            for name, rows in removed.arrays.items():
                assert rows.shape[0] == size
                np.testing.assert_array_equal(
                    rows[:count], np.asarray(state[name])[expected["slot"]]
                )
            assert not np.asarray(removed.touched[count:]).any()
            np.testing.assert_array_equal(
                jax_tt.dynamic.keys_of(table, after),
                before[~np.isin(before["key"], expected["key"])],
            )
            assert {name: x.sharding for name, x in after.items()} == {
                name: x.sharding for name, x in state.items()
            }


def test_keys_that_find_no_room_are_an_error_on_all_devices():
    plain = jax_tt.hash_table(16, WIDTH, ways=4, policy="none", safe_check="error", name="item")
    table = ShardedTable(plain, _mesh(4), "model", Placement.hashed())
    state, keys = table.init(jax.random.key(0)), jax_tt.dynamic.split_keys(np.arange(64))
    insert = jax.jit(lambda state: jax_tt.dynamic.insert(table, state, keys)[1])
    insert = insert.lower(state).compile()
    assert "all-gather" not in insert.as_text()
    with pytest.raises(Exception, match=r"item: ids: .* found no room"):
        jax.block_until_ready(insert(state))
        jax.effects_barrier()
    _forget_errors()


def test_keys_without_a_row_in_a_training_batch_are_told():
    ids = jax_tt.dynamic.split_keys(np.arange(8) * 2**40)
    for check in "warn", "error":
        plain = jax_tt.hash_table(64, WIDTH, safe_check=check, name="item")
        table = ShardedTable(plain, _mesh(4), "model", Placement.hashed())
        state = jax.jit(table.init)(jax.random.key(0))
        look_up = jax.jit(lambda state, table=table: jax_tt.lookup(table, state, ids))
        look_up = look_up.lower(state).compile()
        assert "all-gather" not in look_up.as_text()
        message = r"item: ids: \d ids of a training batch are keys without a row"
        reports.forget()
        raised = pytest.raises(Exception, match=message)
        warned = pytest.warns(jax_tt.dynamic.MissingKeyWarning, match=message)
        with warned if check == "warn" else raised:
            jax.block_until_ready(look_up(state))
            jax.effects_barrier()
        _forget_errors()


def _forget_errors():
    """Every device has raised, and JAX keeps the errors of the others."""
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()
