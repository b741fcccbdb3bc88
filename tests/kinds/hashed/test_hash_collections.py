"""Hash tables of collections: lookups with the slots of an insertion, evicted keys, growth and linen."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt._table import added
from tests.conftest import method_fixture
from tests.kinds.hashed.hash_model import joined
from tests.kinds.hashed.test_hash_training import collected, described

WORDS = jax_tt.dynamic.split_keys
INSERT = jax.jit(jax_tt.dynamic.insert, static_argnums=0, static_argnames="method")
REMOVE = jax.jit(jax_tt.dynamic.remove, static_argnums=0, static_argnames="method")
INIT = jax.jit(lambda table, key: table.init(key), static_argnums=0)
LOOKUP = jax.jit(
    lambda table, state, ids, lookup: jax_tt.lookup(table, state, ids, lookup)[0],
    static_argnums=(0, 3),
)
method = method_fixture("reference", "native", "cuda_emulated")


def stepped(collection, located):
    """Insertion, lookup and update of a collection, with or without a second search."""

    def step(state, batch):
        inserted, state = jax_tt.dynamic.insert(collection, state, batch)
        ids = jax_tt.dynamic.with_slots(batch, inserted) if located else batch

        def loss(own):
            arrays = collection.replaced(state, own)
            rows, _ = jax_tt.lookup_features(collection, arrays, ids)
            return sum(jnp.sum((row - 1) ** 2) for row in rows.values()), rows

        gradients, rows = jax.grad(loss, has_aux=True)(collection.trained(state))
        return collection.overwritten(state, gradients)[0], rows

    return step


def test_slots_of_an_insertion_replace_the_search():
    tables, features, batch = collected()
    tables["key"] = described(8)  # too small for all keys
    collection = jax_tt.Collection(tables, features)
    draw = np.random.default_rng(0)
    states = [INIT(collection, jax.random.key(0))] * 2
    steps = [jax.jit(stepped(collection, located)) for located in (False, True)]
    refused = 0
    for _ in range(4):
        keys = draw.integers(-6, 6, 4)
        shown = jax_tt.Bags(WORDS(keys.reshape(2, 2)), padded=True)
        now = {**batch, "clicked": jax_tt.Bags.from_lengths(WORDS(keys), [3, 1]), "shown": shown}
        states, rows = zip(
            *(step(state, now) for step, state in zip(steps, states, strict=True)), strict=True
        )
        jax.tree.map(np.testing.assert_array_equal, *rows)
        jax.tree.map(np.testing.assert_array_equal, *states)
        refused = jax_tt.dynamic.statistics(collection.tables["key"], states[0]["key"])["refused"]
    assert refused > 0


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_missing_keys_of_many_tables_in_parts(layout, monkeypatch):
    """The initial rows of a table at a time give the sums of those of all tables together."""
    tables = {name: described(64) for name in "abc"}
    collection = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})
    state, draw = INIT(collection, jax.random.key(0)), np.random.default_rng(0)
    batch = {name: WORDS(draw.integers(40, size=(5, 3))) for name in tables}
    # Of one table, no key is missing.
    others = {name: WORDS(np.full((5, 3), 99)) for name in tables}
    _, state = jax_tt.dynamic.insert(collection, state, others | {"b": batch["b"]})

    def rows(state, batch):
        return jax_tt.lookup_features(collection, state, batch, layout=layout)[0]

    found = []
    for size in (1, 1 << 20):
        monkeypatch.setattr(added, "_PART_BYTES", size)
        found.append(jax.jit(lambda *given: rows(*given))(state, batch))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert all(np.asarray(own).any(axis=1).all() for own in jax.tree.leaves(found))


def test_features_with_ids_of_different_types():
    table = jax_tt.hash_table(64, 4)
    collection = jax_tt.Collection(
        {"key": table}, {"old": jax_tt.Feature("key"), "new": jax_tt.Feature("key")}
    )
    batch = {
        "old": np.array([[1], [-1]], np.int32),
        "new": np.array([[2**64 - 1], [5]], np.uint64),
    }
    _, state = jax_tt.dynamic.insert(collection, INIT(collection, jax.random.key(0)), batch)
    assert sorted(jax_tt.dynamic.keys_of(table, state["key"])["key"].tolist()) == [1, 5, 2**64 - 1]
    with pytest.raises(ValueError, match="feature 'old' of 'key': ids: got dtype float64"):
        jax_tt.dynamic.insert(collection, state, batch | {"old": np.ones((2, 1))})


def test_slots_of_single_tables():
    table = dataclasses.replace(described(8), missing=3)
    keys, serving = np.array([[5, -1, 2**62], [5, 0, 9]]), jax_tt.Lookup(train=False)
    bags = jax_tt.Bags(WORDS(keys), padded=True)
    inserted, state = INSERT(table, INIT(table, jax.random.key(0)), bags)
    _, state = REMOVE(table, state, WORDS(np.array([9])))
    located = jax_tt.dynamic.with_slots(bags, inserted)
    assert located.ids.digits.shape == (2, 3, 3) and located.padded
    assert located.ids.digits[0, 1].tolist() == [-1, -1, -1]
    numbers = inserted.found.numbers.at[-1].set(-1)  # of the key that was removed
    found = jax_tt.pipeline.Slots(numbers)
    located = jax_tt.dynamic.with_slots(bags, inserted._replace(found=found))
    pooled = jax.jit(
        lambda bags, lookup: jax_tt.lookup_bags(table, state, bags, lookup)[0], static_argnums=1
    )
    for lookup in (serving, jax_tt.Lookup()):
        np.testing.assert_array_equal(pooled(located, lookup), pooled(bags, lookup))
    done, again = INSERT(table, state, located)
    assert int(done.counts["inserted"]) == 1 and again["hash_touched"].any()

    @nnx.jit
    def rows_of(layer):
        inserted = layer.insert(keys)
        return layer(jax_tt.dynamic.with_slots(keys, inserted)), layer(WORDS(keys))

    np.testing.assert_array_equal(*rows_of(jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))))
    nothing = np.zeros((0, 2), np.int64)
    inserted, state = INSERT(table, state, WORDS(nothing))
    assert jax_tt.dynamic.with_slots(nothing, inserted).shape == (0, 2)


@pytest.mark.parametrize("change", ["insertion", "growth", "nothing", "other"])
def test_slots_of_an_earlier_table(change, method):
    """Keys that have moved read their rows, those that have left their initial ones, and none that of another key."""
    table = jax_tt.hash_table(64, 4, ways=4, max_capacity=256, safe_check="ignore")
    draw = np.random.default_rng(0)
    keys = draw.integers(-(2**63), 2**63, 60)
    keys[:2] = 0, -1
    keys[30:32] = keys[:2]
    first = INIT(table, jax.random.key(0))
    inserted, state = INSERT(table, first, WORDS(keys), method=method)
    located = jax_tt.dynamic.with_slots(keys, inserted)
    before = np.asarray(inserted.found.numbers)
    if change == "insertion":
        _, state = INSERT(table, state, WORDS(draw.integers(0, 2**63, 60)), method=method)
    elif change == "growth":
        table, state = jax_tt.dynamic.grow_if_full(table, state, max_load=0.1)
    elif change == "other":
        state = INIT(table, jax.random.key(1))
    numbered = jnp.arange(state["embedding"].size, dtype=jnp.float32).reshape(-1, 4)
    state = {**state, "embedding": numbered}
    stored = jax_tt.dynamic.keys_of(table, state)
    slots = dict(zip(stored["key"].view(np.int64).tolist(), stored["slot"].tolist(), strict=True))
    now = np.array([slots.get(int(key), -1) for key in keys])
    now[before < 0] = -1
    assert (now != before).any() == (change != "nothing")
    for train in (True, False):
        lookup = jax_tt.Lookup(method=method, train=train)
        initial = LOOKUP(table, INIT(table, jax.random.key(0)), WORDS(keys), lookup)
        want = np.where(now[:, None] >= 0, np.asarray(numbered)[now], initial)
        np.testing.assert_array_equal(LOOKUP(table, state, located, lookup), want)


def test_keys_that_have_left_their_slots_are_reported():
    table = jax_tt.hash_table(64, 4, safe_check="error")
    keys = np.arange(5)
    inserted, state = INSERT(table, INIT(table, jax.random.key(0)), WORDS(keys))
    _, state = REMOVE(table, state, WORDS(keys[:2]))
    located, lookup = jax_tt.dynamic.with_slots(keys, inserted), jax_tt.Lookup()
    with pytest.raises(Exception, match="2 ids of a training batch are keys without a row"):
        jax.block_until_ready(jax_tt.lookup(table, state, located, lookup)[0])


def test_slots_of_another_batch():
    tables, features, batch = collected()
    collection = jax_tt.Collection(tables, features)
    state = INIT(collection, jax.random.key(0))
    inserted, state = jax_tt.dynamic.insert(collection, state, batch)
    with pytest.raises(ValueError, match=r"ids: got ids of shape \(3,\) for the insertion of anot"):
        table = collection.tables["tail"]
        done, _ = jax_tt.dynamic.insert(table, state["tail"], np.arange(4))
        jax_tt.dynamic.with_slots(np.arange(3), done)
    with pytest.raises(TypeError, match="inserted: got an int for a dict"):
        jax_tt.dynamic.with_slots(batch, 3)
    located = jax_tt.dynamic.with_slots(batch, inserted)
    mixed = {**batch, "clicked": located["clicked"]}
    with pytest.raises(ValueError, match=r"different numbers of digits \(clicked 4, shown 3\)"):
        jax_tt.lookup_features(collection, state, mixed)
    with pytest.raises(ValueError, match="the two words of a key"):
        custom = dataclasses.replace(described(64), policy="custom")
        scores = jax_tt.SplitIds(np.zeros((2, 3), np.int32))
        jax_tt.dynamic.insert(custom, custom.init(jax.random.key(0)), np.arange(2), scores=scores)


def evicting():
    tables = {"a": described(8, policy="lru", ways=8), "b": described(8, policy="lfu", ways=8)}
    return tables, {"x": jax_tt.Feature("a"), "y": jax_tt.Feature("b"), "z": jax_tt.Feature("b")}


def batch_of(x, y, z):
    return {"x": WORDS(np.array(x)), "y": WORDS(np.array(y)), "z": WORDS(np.array(z))}


def evicted_keys(inserted):
    return {
        name: sorted(joined(own.evicted.keys)[np.asarray(own.evicted.touched) > 0].tolist())
        for name, own in inserted.items()
    }


def test_collections_return_what_is_evicted():
    tables, features = evicting()
    collection = jax_tt.Collection(tables, features)
    state = INIT(collection, jax.random.key(0))
    insert = jax.jit(partial(jax_tt.dynamic.insert, collection, return_evicted=True))
    first = batch_of(np.arange(8)[:, None], np.arange(4)[:, None], np.arange(4, 8)[:, None])
    done, state = insert(state, first)
    assert evicted_keys(done) == {"a": [], "b": []}
    _, state = insert(state, first)
    for name, own in state.items():
        if "embedding" in own:
            state[name]["embedding"] = own["embedding"] + 1
    rows = {n: np.asarray(state[n]["embedding"]) for n in tables}
    entries = {n: jax_tt.dynamic.keys_of(t, state[n]) for n, t in collection.tables.items()}
    # The new keys of "b" have one request each, the old ones two: no key is above its score.
    second = batch_of([[20], [21]], [[7], [30]], [[30], [30]])
    done, state = insert(state, second)
    assert evicted_keys(done) == {"a": [0, 1], "b": [0]}
    for name, own in done.items():
        for key, touched, row in zip(
            joined(own.evicted.keys),
            own.evicted.touched,
            own.evicted.arrays["embedding"],
            strict=True,
        ):
            if touched:
                slot = entries[name]["slot"][entries[name]["key"] == key]
                np.testing.assert_array_equal(row, rows[name][slot[0]])
    assert set(done["a"].evicted.arrays) == {"embedding", "slot_sum_0"}
    variables, layer = None, jax_tt.linen.EmbedCollection(tables, features)
    variables = jax.jit(layer.init)(jax.random.key(0), first)

    @jax.jit
    def update(variables, batch):
        insert = partial(jax_tt.dynamic.insert, batch=batch, return_evicted=True)
        return jax_tt.linen.update_table(layer, variables, insert)

    for batch in (first, first, second):
        own, variables = update(variables, batch)
    assert evicted_keys(own) == {"a": [0, 1], "b": [0]}


def growing():
    tables, features, batch = collected()
    for name in ("key", "tail"):
        tables[name] = dataclasses.replace(tables[name], max_capacity=256)
    return tables, features, batch


def test_collections_grow():
    tables, features, batch = growing()
    collection = jax_tt.Collection(tables, features)
    state = INIT(collection, jax.random.key(0))
    _, state = jax.jit(partial(jax_tt.dynamic.insert, collection))(state, batch)
    before, _ = jax.jit(partial(jax_tt.lookup_features, collection))(state, batch)
    same, kept = jax_tt.dynamic.grow_if_full(collection, state, max_load=0.5)
    assert same is collection and kept["key"]["embedding"] is state["key"]["embedding"]
    # Four keys in one table, two in the other.
    larger, state = jax_tt.dynamic.grow_if_full(collection, state, max_load=0.02)
    sizes = [larger.tables[name].num_embeddings for name in ("key", "tail", "dense", "train")]
    assert sizes == [256, 128, 20, 64]
    after, _ = jax.jit(partial(jax_tt.lookup_features, larger))(state, batch)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    state, _ = jax.jit(stepped(larger, located=True))(state, batch)
    assert state["updates"]["step"].tolist() == [1] * 3
    with pytest.raises(ValueError, match="max_load: got 2; expected a number from 0 to 1"):
        jax_tt.dynamic.grow_if_full(larger, state, max_load=2)


def test_nnx_collection_grows_with_its_moments():
    tables, features, batch = growing()
    embed = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
    model = nnx.Dict(embed=embed, head=nnx.Linear(4, 1, rngs=nnx.Rngs(1)))
    opt = jax_tt.FusedOptimizer(model, optax.adagrad(0.05))

    @nnx.jit
    def step(model, opt):
        ids = jax_tt.dynamic.with_slots(batch, model["embed"].insert(batch))
        loss, grads = jax_tt.value_and_grad(lambda m: jnp.sum((m["embed"].stacked(ids) - 1) ** 2))(
            model
        )
        opt.update(model, grads)
        return loss

    losses = [float(step(model, opt)) for _ in range(2)]
    assert embed.grow_if_full(max_load=0.02, opt=opt, model=model) == ("key", "tail")
    assert embed.grow_if_full(max_load=0.5, opt=opt, model=model) == ()
    losses += [float(step(model, opt)) for _ in range(2)]
    assert losses == sorted(losses, reverse=True)
    assert "hash_keys" in nnx.state(embed, jax_tt.nnx.HashState)["tables"]["key"]

    others = jax_tt.EmbedCollection(tables, features, rngs=nnx.Rngs(0))
    model, opt = nnx.Dict(embed=others, head=model["head"]), None
    opt = jax_tt.FusedOptimizer(model, optax.adagrad(0.05))
    np.testing.assert_allclose([float(step(model, opt)) for _ in range(4)], losses, rtol=1e-6)


def test_linen_collection_inserts_and_grows():
    """As the collection without Flax, with optax for the table without an optimizer."""
    tables, features, batch = growing()
    layer, tx = jax_tt.linen.EmbedCollection(tables, features), optax.adagrad(0.05)
    variables = jax.jit(layer.init)(jax.random.key(0), batch)
    collection = jax_tt.Collection(tables, features)
    state = INIT(collection, jax.random.key(0))
    fused, moments = "_overwrite_with_gradient", tx.init(variables["params"])

    def step_of(layer, collection):
        @jax.jit
        def step(variables, moments, state):
            inserted, variables = jax_tt.linen.update_table(
                layer, variables, lambda *own: jax_tt.dynamic.insert(*own, batch)
            )
            expected, state = jax_tt.dynamic.insert(collection, state, batch)
            ids = jax_tt.dynamic.with_slots(batch, inserted)

            def loss(own):
                rows, _ = layer.apply({**variables, **own}, ids, mutable=["hash_table"])
                return sum(jnp.sum((row - 1) ** 2) for row in rows.values())

            value, new = jax.value_and_grad(loss)({n: variables[n] for n in (fused, "params")})
            updates, moments = tx.update(new["params"], moments, variables["params"])
            params = optax.apply_updates(variables["params"], updates)
            variables = {**variables, fused: new[fused], "params": params}
            return variables, moments, state, value, (inserted, expected)

        return step

    step = step_of(layer, collection)
    losses = []
    for number in range(4):
        variables, moments, state, value, inserted = step(variables, moments, state)
        jax.tree.map(np.testing.assert_array_equal, *inserted)
        losses.append(float(value))
        if number == 1:
            grow = partial(jax_tt.dynamic.grow_if_full, max_load=0.02)
            changed, variables = jax_tt.linen.update_table(layer, variables, grow)
            layer, moments = changed.layer, changed.opt_state(tx, moments, variables)
            collection, state = jax_tt.dynamic.grow_if_full(collection, state, max_load=0.02)
            step = step_of(layer, collection)
            assert layer.tables["key"].num_embeddings == 256
            assert variables["params"]["tail"]["embedding"].shape == (128, 4)
            jax.tree.map(
                np.testing.assert_array_equal,
                variables["hash_table"]["key"]["hash_keys"],
                state["key"]["hash_keys"],
            )
    assert losses == sorted(losses, reverse=True)
    again, _ = jax_tt.linen.update_table(layer, variables, jax_tt.dynamic.grow_if_full)
    assert again.layer is layer
