"""Scores, admission and growth of hash tables that are divided over devices."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt import Placement
from jax_tt._directories.hash_directory import KeyDirectory
from jax_tt._directories.hashing import owners_of, words_of
from jax_tt._kinds.hashed.change import growth_to
from jax_tt._kinds.sharded.route import message_rows
from jax_tt._ops.insert_sharded import _largest
from jax_tt._table.change import grow
from jax_tt._table.checkpoint import unsharded
from jax_tt.tables import ShardedTable
from tests.kinds.hashed.hash_model import joined

WIDTH, DEVICES, BATCH = 4, 4, (16, 3)


def _mesh(*shape, axis=AxisType.Auto):
    names = ("data", "model")[-len(shape) :]
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(axis,) * len(shape), devices=devices)


def _divided(table, *shape) -> Any:
    return ShardedTable(table, _mesh(*shape), "model", Placement.hashed())


def _batches(keys, steps=8):
    """Batches of skewed keys of both signs, with padding."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.zipf(1.2, BATCH) % keys
        ids = np.where(ids % 2 == 0, ids << 32, -ids - 2)
        yield np.where(rng.random(BATCH) < 0.1, -1, ids)


def _insert(table, state, ids, epoch):
    return jax_tt.dynamic.insert(table, state, jax_tt.Bags.from_padded(ids), epoch=epoch)


INSERT = jax.jit(_insert, static_argnums=0)


def _inserted(table, state, ids, step):
    epoch = step // 3 if unsharded(table).policy.startswith("epoch_") else None
    inserted, state = INSERT(table, state, jax_tt.dynamic.split_keys(ids), epoch)
    return state, {name: int(count) for name, count in inserted.counts.items()}


def _owners(ids):
    words = jnp.asarray(jax_tt.dynamic.split_keys(ids).digits).view(jnp.uint32)
    return np.asarray(owners_of(*words_of(words.reshape(-1, 2)), DEVICES)).reshape(ids.shape)


def _parts(table, state):
    """The arrays of every device that has keys."""
    return [
        {name: np.split(np.asarray(state[name]), DEVICES)[device] for name in table.sharding.names}
        for device in range(DEVICES)
    ]


@pytest.mark.parametrize(
    ("capacity", "options"),
    [
        pytest.param(
            32, {"policy": "lfu", "admission": jax_tt.dynamic.AdmitAfter(2, 64)}, id="lfu after 2"
        ),
        pytest.param(128, {"policy": "epoch_lfu", "min_age": 2}, marks=pytest.mark.slow),
    ],
)
def test_each_device_has_a_table_of_its_own_keys(capacity, options):
    plain = jax_tt.hash_table(capacity, WIDTH, ways=4, safe_check="ignore", **options)
    table = _divided(plain, DEVICES)
    own = table.sharding.shard
    state = jax.jit(table.init)(jax.random.key(0))
    alone = [jax.jit(own.init)(jax.random.key(0))] * DEVICES
    evicted = 0
    for step, ids in enumerate(_batches(300)):
        state, counts = _inserted(table, state, ids, step)
        expected = dict.fromkeys(counts, 0)
        for device in range(DEVICES):
            mine = np.where(_owners(ids) == device, ids, -1)
            alone[device], more = _inserted(own, alone[device], mine, step)
            expected = {name: count + more[name] for name, count in expected.items()}
        assert counts == expected
        evicted += counts["evicted"]
    assert evicted
    for found, expected in zip(_parts(table, state), alone, strict=True):
        taken = (found["hash_touched"] > 0).reshape(-1)
        for name, array in found.items():
            of_keys = (slice(None) if name.startswith("hash_") else taken,)
            np.testing.assert_array_equal(array[of_keys], expected[name][of_keys], err_msg=name)


def _by_key(table, state):
    entries = jax_tt.dynamic.keys_of(table, state)
    entries = entries[np.argsort(entries["key"])]
    rows = {
        name: np.asarray(array)[entries["slot"]]
        for name, array in state.items()
        if array.ndim and len(array) == table.num_embeddings
    }
    return {name: entries[name] for name in ("key", "score", "touched")} | rows


def _waiting(state):
    """Scores of the keys that wait for admission."""
    keys, scores, touched = (np.asarray(state[f"hash_waiting_{x}"]) for x in KeyDirectory._fields)
    keys, scores = (joined(words.transpose(0, 2, 1)).reshape(-1) for words in (keys, scores))
    here = touched.reshape(-1) > 0
    return dict(zip(keys[here].tolist(), scores[here].tolist(), strict=True))


def _same_by_key(divided, alone):
    """The arrays of one device by key, which are those of several."""
    found, expected = _by_key(*divided), _by_key(*alone)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "admission"),
    [
        ("epoch_lfu", jax_tt.dynamic.AdmitAfter(2)),
        ("lfu", jax_tt.dynamic.AdmitWithProbability(0.3)),
    ],
    ids=["epoch_lfu, after two", "lfu, drawn"],
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["four", "data and model"])
def test_keys_and_scores_equal_those_on_one_device(policy, admission, shape):
    plain = jax_tt.hash_table(512, WIDTH, policy=policy, admission=admission, safe_check="ignore")
    table = _divided(plain, *shape)
    state, alone = (jax.jit(own.init)(jax.random.key(0)) for own in (table, plain))
    for step, ids in enumerate(_batches(100)):
        state, counts = _inserted(table, state, ids, step)
        alone, expected = _inserted(plain, alone, ids, step)
        assert counts == expected
    expected = _same_by_key((table, state), (plain, alone))
    assert len(expected["key"]) > 20
    assert expected["score"].max() > 2
    if isinstance(admission, jax_tt.dynamic.AdmitAfter):
        assert _waiting(state) == _waiting(alone)
        assert _waiting(alone)


@pytest.mark.slow
def test_keys_that_wait_move_to_other_devices(tmp_path):
    plain = jax_tt.hash_table(512, WIDTH, admission=3, safe_check="ignore")
    table, wider = _divided(plain, 2), _divided(plain, DEVICES)
    state = jax.jit(table.init)(jax.random.key(0))
    *first, last = _batches(100)
    for step, ids in enumerate(first):
        state, _ = _inserted(table, state, ids, step)
    jax_tt.files.dump(table, state, tmp_path / "dump", progress=False)
    whole = jax.device_get(jax.jit(table.by_row)(state))
    moved = {table: state, plain: plain.of_rows(whole), wider: wider.of_rows(whole)}
    for own in (plain, wider):
        _, loaded = jax_tt.files.load_dump(
            own, own.init(jax.random.key(0)), tmp_path / "dump", progress=False
        )
        assert _waiting(loaded) == _waiting(state)
        moved[own] = loaded if own is plain else moved[own]
    found = []
    for own, state in moved.items():
        assert _waiting(state) == _waiting(moved[plain])
        state, counts = _inserted(own, state, last, 0)
        found.append((counts, _waiting(state)))
    assert found[0] == found[1] == found[2]
    assert found[0][0]["inserted"] > 0


@pytest.mark.slow
def test_requests_in_several_rounds_are_counted():
    keys = np.arange(400)
    keys = keys[_owners(keys) == 1][:36]
    assert message_rows(36, DEVICES) < 36
    ids = np.tile(keys, DEVICES).reshape(-1, 3)  # every device requests all of them
    plain = jax_tt.hash_table(512, WIDTH, policy="lfu")
    table = _divided(plain, DEVICES)
    state, alone = (jax.jit(t.init)(jax.random.key(0)) for t in (table, plain))
    for step in range(2):
        state, counts = _inserted(table, state, ids, step)
        alone, expected = _inserted(plain, alone, ids, step)
        assert counts == expected
    expected = _same_by_key((table, state), (plain, alone))
    assert (expected["score"] == 2 * DEVICES).all()


@pytest.mark.slow
def test_keys_of_a_batch_stay_where_it_takes_several_rounds():
    keys = np.arange(800)
    keys = keys[_owners(keys) == 1]
    plain = jax_tt.hash_table(128, WIDTH, policy="lfu", ways=4, safe_check="ignore")
    table = _divided(plain, DEVICES)
    state = jax.jit(table.init)(jax.random.key(0))
    batches = keys[:36], np.concatenate([keys[:18], keys[40:58]])
    state, _ = _inserted(table, state, np.tile(batches[0], DEVICES).reshape(-1, 3), 0)
    before = jax_tt.dynamic.keys_of(table, state)
    own = before[np.isin(before["key"], batches[1].astype(np.uint64))]
    assert len(own) > 12
    state, counts = _inserted(table, state, np.tile(batches[1], DEVICES).reshape(-1, 3), 1)
    after = jax_tt.dynamic.keys_of(table, state)
    assert counts["evicted"] > 4 and counts["hits"] == len(own) * DEVICES
    assert set(map(tuple, own[["key", "slot"]])) <= set(map(tuple, after[["key", "slot"]]))


@pytest.mark.slow
def test_each_device_doubles_the_table_of_its_keys():
    options = {"admission": 2, "max_capacity": 1024, "optimizer": jax_tt.optimizers.Adagrad(0.1)}
    plain = jax_tt.hash_table(128, WIDTH, policy="lfu", **options)
    table = _divided(plain, DEVICES)
    state = jax.jit(table.init)(jax.random.key(0))
    for step, ids in enumerate(_batches(40, 4)):
        state, _ = _inserted(table, state, ids, step)
    assert len(jax_tt.dynamic.keys_of(table, state)) > 20
    larger, after = jax_tt.dynamic.grow_if_full(table, state, max_load=0.02)
    assert larger.num_embeddings == 1024
    jax_tt.extension.check_state(larger, after)
    assert after["hash_keys"].sharding.is_equivalent_to(state["hash_keys"].sharding, 3)
    for part, expected in zip(_parts(table, state), _parts(larger, after), strict=True):
        own = table.sharding.shard
        growth = growth_to(own, 8 * own.num_embeddings)
        found = grow(own, {**state, **part}, growth).state
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    same, kept = jax_tt.dynamic.grow_if_full(larger, after, max_load=0)
    assert same is larger and all(kept[name] is after[name] for name in after)


TABLES = {"item": jax_tt.hash_table(64, WIDTH, policy="lfu", max_capacity=256)}
FEATURES = {"item": jax_tt.Feature("item")}


def _ids(step):
    ids = np.random.default_rng(step).integers(0, 20 * (step + 1), BATCH)
    return {"item": jax_tt.dynamic.split_keys(ids << 40)}


@pytest.mark.slow
def test_nnx_layers_and_their_moments_grow_on_several_devices_as_on_one():
    found = []
    # Of the policies, the one with which optax steps a table: no key leaves its moments to another one.
    tables = {"item": dataclasses.replace(TABLES["item"], policy="none")}
    for options in ({}, {"mesh": _mesh(2), "axis": "model"}):
        embed = jax_tt.EmbedCollection(tables, FEATURES, rngs=nnx.Rngs(0), **options)
        opt = jax_tt.FusedOptimizer(embed, optax.adagrad(0.05))

        @nnx.jit
        def step(embed, opt, ids):
            ids = jax_tt.dynamic.with_slots(ids, embed.insert(ids))
            grads = jax_tt.grad(lambda m: jnp.sum((m.stacked(ids) - 1) ** 2))(embed)
            opt.update(embed, grads)

        step(embed, opt, _ids(0))
        assert embed.grow_if_full(max_load=0.2, opt=opt) == ("item",)
        assert embed.grow_if_full(max_load=0.5, opt=opt) == ()
        step(embed, opt, _ids(1))
        moments = opt.opt_state[0].sum_of_squares["tables"]["item"]["embedding"]
        table, arrays = embed.collection.tables["item"], embed.arrays()["item"]
        found.append((table, _by_key(table, arrays | {"moments": moments[...]})))
    (plain, expected), (table, own) = found
    assert isinstance(table, ShardedTable) and table.num_embeddings == plain.num_embeddings == 128
    assert {"embedding", "moments"} < set(expected) and len(expected["key"]) > 20
    for name, array in expected.items():
        np.testing.assert_allclose(own[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_collections_and_linen_layers_grow_on_several_devices():
    batch, options = _ids(1), {"mesh": _mesh(2), "axis": "model"}
    layer = jax_tt.linen.EmbedCollection(TABLES, FEATURES, **options)
    variables = jax.jit(layer.init)(jax.random.key(0), batch)
    collection = jax_tt.Collection(jax_tt.shard_tables(TABLES, **options), FEATURES)
    state = jax.jit(collection.init)(jax.random.key(0))
    insert = jax.jit(jax_tt.dynamic.insert, static_argnums=0)
    _, before = insert(collection, state, batch)
    variables = {**variables, "hash_table": {"item": _buffers(collection, before)}}
    grow = functools.partial(jax_tt.dynamic.grow_if_full, max_load=0.1)
    changed, variables = jax_tt.linen.update_table(layer, variables, grow)
    layer, (larger, after) = changed.layer, grow(collection, before)
    assert not isinstance(layer.tables["item"], ShardedTable)
    assert layer.tables["item"].num_embeddings == larger.tables["item"].num_embeddings == 256
    for name, array in variables["hash_table"]["item"].items():
        np.testing.assert_array_equal(array, after["item"][name], err_msg=name)
    expected, found = (
        _by_key(own.tables["item"], values["item"])
        for own, values in ((collection, before), (larger, after))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def _buffers(collection, state):
    kinds = collection.tables["item"].spec.buffers
    return {name: state["item"][name] for name, kind in kinds.items() if kind == "hash_table"}


@pytest.mark.slow
def test_meshes_with_explicit_axes():
    options = {"optimizer": jax_tt.optimizers.Adam(0.1), "admission": 2, "max_capacity": 256}
    tables = {"item": jax_tt.hash_table(64, WIDTH, policy="lfu", safe_check="ignore", **options)}
    features = {name: jax_tt.Feature("item") for name in ("seen", "clicked")}
    draw = np.random.default_rng(0)
    batch = {
        name: jax_tt.dynamic.split_keys(draw.integers(0, 30, BATCH) << 40) for name in features
    }

    def step(collection, state, batch):
        inserted, state = jax_tt.dynamic.insert(collection, state, batch)

        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return sum(jnp.sum(jnp.sin(array)) for array in rows.values())

        state, _ = collection.overwritten(state, jax.grad(loss)(collection.trained(state)))
        return state, inserted["item"].counts

    def trained(tables, batch):
        collection = jax_tt.Collection(tables, features)
        state, run = jax.jit(collection.init)(jax.random.key(0)), jax.jit(step, static_argnums=0)
        state, before = run(collection, state, batch)
        state, after = run(collection, state, batch)
        collection, state = jax_tt.dynamic.grow_if_full(collection, state, max_load=0.01)
        table = collection.tables["item"]
        return jax.tree.map(int, (before, after)), _by_key(table, state["item"])

    counts, expected = trained(tables, batch)
    mesh = _mesh(2, 2, axis=AxisType.Explicit)
    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, NamedSharding(mesh, P(("data", "model"))))
        found = trained(jax_tt.shard_tables(tables, mesh, "model"), batch)
    assert found[0] == counts
    for name, array in expected.items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_epochs_belong_to_their_policies_on_several_devices_as_well():
    for policy, epoch in ("epoch_lru", None), ("lru", 1):
        table = _divided(jax_tt.hash_table(128, WIDTH, policy=policy, name="item"), DEVICES)
        state = table.init(jax.random.key(0))
        with pytest.raises(ValueError, match=f"item: epoch: got {epoch} for the policy '{policy}'"):
            jax_tt.dynamic.insert(table, state, np.arange(4), epoch=epoch)


@pytest.mark.slow
def test_an_insertion_copies_no_array_of_slots():
    table = jax_tt.hash_table(64, 4, policy="lfu", ways=4, admission=2, safe_check="ignore")
    own = _divided(table, DEVICES)
    state = jax.eval_shape(own.init, jax.random.key(0))
    keys = jax_tt.dynamic.split_keys(np.arange(4096))
    insert = jax.jit(lambda state: jax_tt.dynamic.insert(own, state, keys)[1], donate_argnums=0)
    program = str(insert.lower(state).compile().as_text())
    # Of the 4 sets of 4 slots that a device has.
    assert not re.findall(r"= \w+\[4,(?:2,)?4\]\S* copy", program)


def test_a_key_that_several_devices_ask_for_has_the_largest_score():
    """As two words: the low ones count among equal high ones alone; places beyond the end are left out."""
    scores = jnp.array([[2, 9], [3, 1], [3, 0], [0, 7], [9, 9]], jnp.uint32)
    for order in itertools.permutations(range(5)):
        at = jnp.array([0, 0, 0, 1, 4])[np.array(order)]
        found = _largest(scores[np.array(order)], at, 3)
        assert found.tolist() == [[3, 1], [0, 7], [0, 0]]
