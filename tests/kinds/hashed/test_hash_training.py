"""Training of hash tables: in collections and layers, with admission, growth, donation and export."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jax_tt
import jax_tt.linen

LOOKUP = jax_tt.Lookup()
RULE = jax_tt.optimizers.Adagrad(0.1)


def described(capacity, **options):
    options = {"ways": 4, "policy": "none", "optimizer": RULE, "safe_check": "ignore", **options}
    return jax_tt.hash_table(capacity, 4, **options)


def trained(table, state):
    return {name: state[name] for name in table.spec.trained_names}


def step_of(table):
    def step(state, ids, weights):
        _, state = jax_tt.dynamic.insert(table, state, ids)

        def loss(own):
            rows, _ = jax_tt.lookup(table, {**state, **own}, ids, LOOKUP)
            return jnp.sum((rows * weights) ** 2)

        return {**state, **jax.grad(loss)(trained(table, state))}

    return step


def rows_by_key(table, state):
    entries = jax_tt.dynamic.keys_of(table, state)
    entries = entries[np.argsort(entries["key"])]
    names = [*table.spec.param_names, *(n for own in table.spec.slot_names for n in own)]
    return entries[["key", "touched"]], {n: np.asarray(state[n])[entries["slot"]] for n in names}


def equal_by_key(left, right):
    (keys, rows), (others, more) = left, right
    np.testing.assert_array_equal(keys, others)
    jax.tree.map(np.testing.assert_array_equal, rows, more)


def test_growth_equals_a_large_table():
    """Keys arrive slowly, so that the small table is never full before it grows."""
    small, large = described(128, max_capacity=512), described(512)
    states = [jax.jit(table.init)(jax.random.key(0)) for table in (small, large)]
    steps = [jax.jit(step_of(table)) for table in (small, large)]
    draw = np.random.default_rng(0)
    pool = draw.integers(0, 2**64, 300, np.uint64)
    sizes = {small.num_embeddings}
    for number in range(60):
        keys = pool[draw.integers(0, 20 + 3 * number, 8)]
        ids, weights = jax_tt.dynamic.split_keys(keys), draw.normal(size=(8, 1)).astype(np.float32)
        states = [step(state, ids, weights) for step, state in zip(steps, states, strict=True)]
        grown, states[0] = jax_tt.dynamic.grow_if_full(small, states[0], max_load=0.4)
        if grown != small:
            small = grown
            steps[0] = jax.jit(step_of(small))
            sizes.add(small.num_embeddings)
    assert sizes == {128, 256, 512}
    assert not jax_tt.dynamic.statistics(small, states[0])["refused"]
    equal_by_key(rows_by_key(small, states[0]), rows_by_key(large, states[1]))


@pytest.mark.slow
def test_growth_of_a_tensor_train_keeps_rows():
    train = jax_tt.tt_table(32, 4, tt_ranks=3, optimizer=RULE)
    train = jax_tt.tables.OrderedTable(train, jax_tt.order.IdOrder(np.arange(32)[::-1]))
    table = jax_tt.tables.HashTable(
        train, ways=4, max_capacity=128, safe_check="error", policy="none"
    )
    keys = jax_tt.dynamic.split_keys(np.arange(12) - 5)
    look_up = jax.jit(
        lambda table, state: jax_tt.lookup(table, state, keys, LOOKUP)[0], static_argnums=0
    )

    @jax.jit
    def start(key):
        return jax_tt.dynamic.insert(table, table.init(key), keys)[1]

    state = start(jax.random.key(0))
    before = look_up(table, state)
    for capacity, max_load in ((64, 0.3), (128, 0.1)):
        table, state = jax_tt.dynamic.grow_if_full(table, state, max_load=max_load)
        assert table.num_embeddings == capacity
        np.testing.assert_allclose(look_up(table, state), before, rtol=1e-6)
    state = jax.jit(step_of(table))(state, keys, np.ones((12, 1), np.float32))
    assert float(state["step"]) == 1


def test_keys_that_were_requested_often_enough_are_admitted():
    table = described(64, admission=jax_tt.dynamic.AdmitAfter(3, waiting=32))
    state = table.init(jax.random.key(0))
    insert = jax.jit(lambda state, ids: jax_tt.dynamic.insert(table, state, ids))
    found = []
    for keys in ([1, 1, 2, 3], [1, 2, 4, 4, 4], [2, 1, 1], [3, 3]):
        done, state = insert(state, jax_tt.dynamic.split_keys(np.array(keys)))
        new = np.asarray(done.keys)[: int(done.counts["inserted"]), 1].tolist()
        found.append((sorted(new), int(done.counts["requests"]), int(done.counts["unique"])))
    assert found == [([], 4, 3), ([1, 4], 5, 3), ([2], 3, 2), ([3], 2, 1)]
    assert not state["hash_waiting_touched"].any()
    assert jax_tt.dynamic.statistics(table, state)["hits"] == 2


def test_keys_are_admitted_with_a_probability():
    table = described(4096, admission=jax_tt.dynamic.AdmitWithProbability(0.25))
    insert = jax.jit(lambda state, ids: jax_tt.dynamic.insert(table, state, ids)[1])
    ids = jax_tt.dynamic.split_keys(np.arange(2000))
    one = insert(table.init(jax.random.key(0)), ids)
    count = jax_tt.dynamic.statistics(table, one)["keys"]
    assert 400 < count < 600
    two = jax_tt.dynamic.statistics(table, insert(one, ids))
    assert 800 < two["keys"] < 980 and two["unique"] == 4000 and two["hits"] == count
    again = insert(table.init(jax.random.key(1)), ids)
    np.testing.assert_array_equal(one["hash_keys"], again["hash_keys"])
    always = dataclasses.replace(table, admission=jax_tt.dynamic.AdmitWithProbability(1.0))
    inserted = jax.jit(lambda state, ids: jax_tt.dynamic.insert(always, state, ids)[0].counts)
    few = jax_tt.dynamic.split_keys(np.arange(500))
    assert int(inserted(table.init(jax.random.key(0)), few)["inserted"]) == 500


@pytest.mark.optimized
def test_steps_are_in_place():
    table = described(4096, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1), policy="lru")
    state = jax.jit(table.init)(jax.random.key(0))
    ids, weights = jax_tt.dynamic.split_keys(np.arange(16)), np.ones((16, 1), np.float32)
    step = jax.jit(step_of(table), donate_argnums=0).lower(state, ids, weights).compile()
    assert not re.search(r"= f32\[4096,4\]\S* copy\(", step.as_text())
    places = [state[name].unsafe_buffer_pointer() for name in ("embedding", "slot_sum_0")]
    for _ in range(3):
        state = step(state, ids, weights)
    after = [state[name].unsafe_buffer_pointer() for name in ("embedding", "slot_sum_0")]
    assert after == places


def collected():
    tables = {
        "key": described(64),
        "tail": described(64, optimizer=None),
        "dense": jax_tt.dense_table(20, 4, optimizer=RULE),
        "train": jax_tt.tt_table(64, 4, tt_ranks=2, optimizer=RULE),
    }
    features = {
        "clicked": jax_tt.Feature("key", combiner="mean"),
        "shown": jax_tt.Feature("key"),
        "bought": jax_tt.Feature("tail"),
        "user": jax_tt.Feature("dense"),
        "page": jax_tt.Feature("train"),
    }
    keys = jax_tt.dynamic.split_keys(np.array([-(2**63), -1, 5, 5]))
    batch = {
        "clicked": jax_tt.Bags.from_lengths(keys, [3, 1]),
        "shown": jax_tt.dynamic.split_keys(np.array([[5], [2**40]])),
        "bought": jax_tt.dynamic.split_keys(np.array([[-9], [8]])),
        "user": np.array([[1], [2]], np.int32),
        "page": np.array([[3], [60]], np.int32),
    }
    return tables, features, batch


def test_collection_of_all_kinds():
    tables, features, batch = collected()
    collection = jax_tt.Collection(tables, features)
    state = collection.with_statistics(collection.init(jax.random.key(0)))
    insert = jax.jit(lambda state: jax_tt.dynamic.insert(collection, state, batch))
    look_up = jax.jit(lambda state: jax_tt.lookup_features(collection, state, batch))
    missing, _ = look_up(state)
    done, state = insert(state)
    assert {name: int(own.counts["inserted"]) for name, own in done.items()} == {
        "key": 4,
        "tail": 2,
    }
    rows, state = look_up(state)
    # New rows are initial ones, which missing keys read.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), rows, missing)
    wide, state = jax.jit(
        lambda state: jax_tt.lookup_features(collection, state, batch, layout="concatenated")
    )(state)
    np.testing.assert_allclose(
        wide, np.concatenate([rows[name] for name in features], 1), rtol=1e-6
    )
    counted = collection.statistics(state)["key"]
    assert (counted.requests, counted.unique, counted.out_of_range) == (12, 8, 0)

    with pytest.raises(ValueError, match="scores: got the feature 'user'; expected some of"):
        jax_tt.dynamic.insert(collection, state, batch, scores={"user": [1]})
    with pytest.raises(ValueError, match="epoch: got 3 for a collection whose tables have no"):
        jax_tt.dynamic.insert(collection, state, batch, epoch=3)


def test_nnx_layer_with_optax_grows_with_its_moments():
    table = described(64, optimizer=None, max_capacity=256)
    layer = jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))
    opt = nnx.Optimizer(layer, optax.adagrad(0.1), wrt=nnx.Param)
    keys = jax_tt.dynamic.split_keys(np.arange(9) - 4)
    nnx.jit(lambda layer: layer.insert(keys))(layer)
    look_up = nnx.jit(lambda layer: layer(keys))

    @nnx.jit
    def step(layer, opt):
        grads = jax_tt.grad(lambda m: jnp.sum((m(keys) - 1) ** 2))(layer)
        opt.update(layer, grads)

    def moments():
        slots = {e["key"]: e["slot"] for e in jax_tt.dynamic.keys_of(layer.table, layer.state())}
        order = [slots[key] for key in sorted(slots)]
        own = nnx.as_pure(opt.opt_state)
        return [np.asarray(leaf)[order] for leaf in jax.tree.leaves(own) if leaf.ndim == 2]

    step(layer, opt)
    before, rows = moments(), look_up(layer)
    assert layer.grow_if_full(max_load=0.1, opt=opt)
    jax.tree.map(np.testing.assert_array_equal, moments(), before)
    np.testing.assert_array_equal(look_up(layer), rows)
    step(layer, opt)
    two = jax_tt.dynamic.split_keys(np.array([-4, -3]))
    with pytest.raises(TypeError, match=r"remove: opt: got None .* moments of those"):
        layer.remove(two)
    expected, entries = moments()[0], jax_tt.dynamic.keys_of(layer.table, layer.state())
    with pytest.raises(ValueError, match="a module without this layer"):
        layer.remove(two, opt=opt, model=nnx.Dict())
    gone = nnx.jit(lambda layer, opt: layer.remove(two, opt=opt))(layer, opt)
    assert np.count_nonzero(gone.touched) == 2
    (after,) = (x for x in jax.tree.leaves(nnx.as_pure(opt.opt_state)) if x.ndim == 2)
    expected[5:7] = (
        0.1  # the keys -4 and -3 of 64 bits, after 0 to 4; optax begins with this number
    )
    np.testing.assert_array_equal(after[entries["slot"][np.argsort(entries["key"])]], expected)
    layer.eval()
    gone = nnx.jit(lambda layer: layer.remove(where=lambda view: view.age >= 0))(layer)
    assert np.count_nonzero(gone.touched) == 7
    assert not layer.hash_touched[...].any()


def test_linen_training():
    layer = jax_tt.linen.TableEmbed(described(64))
    keys = jax_tt.dynamic.split_keys(np.arange(9) - 4)
    variables = layer.init(jax.random.key(0), keys)

    @jax.jit
    def step(variables):
        _, variables = jax_tt.linen.update_table(
            layer, variables, lambda table, state: jax_tt.dynamic.insert(table, state, keys)
        )

        def loss(own):
            rows, _ = layer.apply({**variables, **own}, keys, mutable=["hash_table"])
            return jnp.sum((rows - 1) ** 2)

        name = "_overwrite_with_gradient"
        value, new = jax.value_and_grad(loss)({name: variables[name]})
        return {**variables, **new}, value

    losses = []
    for _ in range(3):
        variables, value = step(variables)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    assert int(variables["hash_table"]["hash_clock"]) == 3
    remove = partial(jax_tt.dynamic.remove, keys=np.array([-4]))
    update = partial(jax_tt.linen.update_table, layer, fn=remove)
    gone, variables = jax.jit(update)(variables)
    assert gone.keys.tolist() == [[2**32 - 1, 2**32 - 4]]
    with pytest.raises(TypeError, match=r"layer: got a Dense; expected a layer of jax_tt\.linen"):
        jax_tt.linen.update_table(nn.Dense(4), variables, lambda table, state: (None, state))
