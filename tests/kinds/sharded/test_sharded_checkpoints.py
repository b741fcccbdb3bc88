"""Checkpoints that are written and read in pieces, by other devices, placements and meshes."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import jax_tt
from jax_tt import Placement

FEATURES = {
    "user": jax_tt.Feature("user"),
    "item": jax_tt.Feature("item", combiner="mean"),
    "ad": jax_tt.Feature("ad"),
    "tag": jax_tt.Feature("tag"),
    "city": jax_tt.Feature("city"),
}
PLACEMENTS = {
    4: {
        "user": Placement.pages([(0, 1), 2, (3, 2), 0], 60),
        "item": Placement.hashed(),
        "tag": Placement.columns([3, 1]),
    },
    3: {
        "user": Placement.round_robin(7),
        "item": Placement.on(2),
        "ad": Placement.replicated(),
        "tag": Placement.columns(3),
    },
}


def _tables():
    """Numbers of rows that no number of devices divides; rules with slots per row and per element."""
    return {
        "user": jax_tt.dense_table(227, 6, optimizer=jax_tt.optimizers.Adam(0.1)),
        "item": jax_tt.dense_table(101, 3, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1)),
        "ad": jax_tt.dense_table(31, 4),
        "tag": jax_tt.dense_table(53, 6, optimizer=jax_tt.optimizers.Adam(0.1)),
        "city": jax_tt.tt_table(1000, 8, tt_ranks=2, optimizer=jax_tt.optimizers.SGD(0.1)),
    }


def _collection(devices):
    tables = _tables()
    if devices > 1:
        mesh = jax.make_mesh(
            (devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
        )
        tables = jax_tt.shard_tables(tables, mesh, "model", PLACEMENTS[devices])
    return jax_tt.Collection(tables, FEATURES)


def _trained(collection):
    """A state in which all arrays have values that a mistake would change."""
    state = jax.jit(collection.init)(jax.random.key(0))
    rows = jax.device_get(jax.jit(collection.separated)(state))
    for own in rows.values():
        for array, value in own.items():
            if array not in ("sentinel", "used"):
                own[array] = value + np.arange(value.size, dtype=value.dtype).reshape(value.shape)
    return jax.jit(collection.joined)(rows)


def _check_equal(collection, state, expected):
    found = jax.jit(collection.separated)(state)
    assert found.keys() == expected.keys()
    for name, arrays in expected.items():
        for array, value in arrays.items():
            np.testing.assert_array_equal(found[name][array], value, err_msg=f"{name} {array}")


@pytest.mark.slow
def test_four_three_and_one_devices_read_what_the_others_wrote(tmp_path):
    collection = _collection(4)
    state = _trained(collection)
    expected = jax.device_get(jax.jit(collection.separated)(state))
    with ocp.StandardCheckpointer() as checkpointer:
        for count in (3, 1, 4):
            path = tmp_path / str(count)
            checkpointer.save(path, jax_tt.checkpoint.save_args(collection, state))
            checkpointer.wait_until_finished()
            collection = _collection(count)
            like = jax.eval_shape(collection.init, jax.random.key(1))
            target = jax_tt.checkpoint.target(collection, like)
            arrays = checkpointer.restore(path, target, strict=False)
            state = jax_tt.checkpoint.restore(collection, like, arrays)
            _check_equal(collection, state, expected)


@pytest.mark.slow
def test_no_device_has_more_than_its_share():
    collection = _collection(4)
    state = _trained(collection)
    arrays, target = (
        of(collection, state) for of in (jax_tt.checkpoint.save_args, jax_tt.checkpoint.target)
    )
    parts_of = {"user": ("embedding", "slot_mu_0"), "item": ("slot_sum_0",), "tag": ("embedding",)}
    for name, parts in parts_of.items():
        for part in parts:
            array = arrays[name][part]
            share = -(-collection.tables[name].num_embeddings // 4)
            assert [shard.data.shape[0] for shard in array.addressable_shards] == [share] * 4
            assert target[name][part].sharding == array.sharding


def test_arrays_of_other_tables_are_refused():
    collection = _collection(4)
    arrays = jax_tt.checkpoint.save_args(collection, state := _trained(collection))
    alone, of_alone = _pair()
    given = {**jax_tt.checkpoint.save_args(alone, of_alone), "item": arrays["item"]}
    other = jax_tt.Collection(_tables() | {"item": jax_tt.dense_table(99, 3)}, FEATURES)
    start = jax.eval_shape(other.init, jax.random.key(0))
    unfused = {**given, "item": {name: arrays["item"][name] for name in ("embedding", "sizes")}}
    with pytest.raises(ValueError, match=r"got .*shape \(104, 3\); expected \(99, 3\)"):
        jax_tt.checkpoint.restore(other, start, unfused)
    with pytest.raises(ValueError, match=r"arrays\['item'\]\['m'\]: got an array that state does"):
        more = jax_tt.checkpoint.save_args(alone, of_alone)
        more["item"]["m"] = np.zeros(3)
        jax_tt.checkpoint.restore(alone, of_alone, more)
    with pytest.raises(ValueError, match=r"arrays\['item'\]: has no 'embedding'"):
        left = {name: own for name, own in arrays.items() if name != "item"}
        jax_tt.checkpoint.restore(collection, state, left | {"item": {"step": np.zeros(())}})
    cut = {"embedding": arrays["item"]["embedding"][:99], "sizes": arrays["item"]["sizes"]}
    single = jax_tt.Collection({"item": jax_tt.dense_table(99, 3)}, {"item": FEATURES["item"]})
    start = jax.eval_shape(single.init, jax.random.key(0))
    with pytest.raises(ValueError, match="holds a table of 101 x 3; expected 99 x 3"):
        jax_tt.checkpoint.restore(single, start, {"item": cut})
    del cut["embedding"]
    with pytest.raises(ValueError, match=r"arrays\['item'\]: has no 'embedding'"):
        jax_tt.checkpoint.restore(single, start, {"item": cut})


def _pair():
    collection = _collection(1)
    return collection, _trained(collection)
