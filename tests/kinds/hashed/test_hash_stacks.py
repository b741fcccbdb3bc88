"""Hash tables that share arrays: equal to the same tables with arrays of their own, bit for bit."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Bags, Feature, dynamic, optimizers
from tests.conftest import method_fixture, native_available

method = method_fixture("reference", "native", "cuda_emulated")

ROWS = {"a": 64, "b": 16, "c": 128}
FEATURES = {
    "once": Feature("a"),
    "mean": Feature("b", combiner="mean"),
    "again": Feature("b"),
    "sequence": Feature("c", combiner=None),
    "dense": Feature("d"),
    "other": Feature("e"),
}
WORDS = dynamic.split_keys
KINDS = {
    "lru": {"policy": "lru"},
    "lfu": {"policy": "lfu", "param_dtype": jnp.bfloat16},
    "none": {"policy": "none", "initializer": lambda keys, n: jnp.ones((len(keys), n))},
    "chance": {"policy": "lru", "admission": dynamic.AdmitWithProbability(0.5)},
}


def both(kind="lru", rule=optimizers.RowWiseAdagrad, **options):
    """A collection of three hash tables of a stack, two dense ones and one without a stack; and one with no stacks."""
    options = KINDS[kind] | {"ways": 8, "safe_check": "ignore"} | options
    tables = {
        name: jax_tt.hash_table(rows, 8, optimizer=rule and rule(0.1 * (k + 1)), seed=k, **options)
        for k, (name, rows) in enumerate(ROWS.items())
    }
    tables |= {name: jax_tt.dense_table(20, 8, optimizer=optimizers.SGD(0.1)) for name in "de"}
    stacked = jax_tt.Collection(tables, FEATURES, stack=True if rule is None else None)
    assert sorted(stacked.stack_of) == list("abcde")
    assert not stacked.alone
    return stacked, dataclasses.replace(stacked, stack=False)


def batch_of(seed, keys=40):
    rng = np.random.default_rng(seed)
    draw = rng.integers(0, keys, 64)
    wide = np.where(draw % 3 == 0, -(2**40) * draw, draw)  # also negative keys of more than 32 bits
    return {
        "once": WORDS(wide[:16].reshape(8, 2)),
        "mean": Bags.from_lengths(WORDS(wide[16:28]), [0, 5, 1, 1, 1, 2, 2, 0]),
        "again": WORDS(wide[28:36].reshape(8, 1)),
        "sequence": WORDS(wide[36:52].reshape(8, 2)),
        "dense": rng.integers(0, 20, (8, 1)),
        "other": rng.integers(0, 20, (8, 2)),
    }


def same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def inserting_step(collection, method="auto"):
    def step(state, batch):
        inserted, state = dynamic.insert(collection, state, batch, method=method)

        def loss(own):
            arrays = collection.replaced(state, own)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, method=method)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in rows.values()), rows

        gradients, rows = jax.grad(loss, has_aux=True)(collection.trained(state))
        return inserted, rows, *collection.overwritten(state, gradients)

    return step


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_tables_are_trained_as_those_alone(kind, method):
    """With evictions, as 40 keys come into 16 rows; results, slots, counts and all arrays."""
    stacked, alone = both(kind)
    key = jax.random.key(0)
    got, want = stacked.init(key), alone.init(key)
    assert len(jax.tree.leaves(got)) == 12
    same(stacked.separated(got), alone.separated(want))
    steps = [jax.jit(inserting_step(one, method)) for one in (stacked, alone)]
    evicted = 0
    for seed in range(4):
        *found, got, _ = steps[0](got, batch_of(seed))
        *expected, want, _ = steps[1](want, batch_of(seed))
        if method != "reference":
            same(found, expected)
            same(stacked.separated(got), alone.separated(want))
        else:  # XLA rounds sums in another way in another program
            same(found[0], expected[0])
            for x, y in zip(
                *map(jax.tree.leaves, (got, stacked.joined(alone.separated(want)))), strict=True
            ):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        evicted += int(found[0]["b"].counts["evicted"])
    assert evicted > 0 or kind == "none"
    assert stacked.of(got, "b")["hash_clock"] == 4
    rows = [
        jax_tt.lookup_features(*pair, batch_of(9), train=False, method=method)[0]
        for pair in ((stacked, got), (alone, alone.joined(stacked.separated(got))))
    ]
    same(*rows)


def test_what_is_evicted_is_returned_by_table():
    stacked, alone = both()
    got, want = (one.init(jax.random.key(0)) for one in (stacked, alone))
    for seed in range(3):
        found, got = dynamic.insert(stacked, got, batch_of(seed), return_evicted=True)
        expected, want = dynamic.insert(alone, want, batch_of(seed), return_evicted=True)
        same(found, expected)
    assert int(found["b"].counts["evicted"]) > 0
    same(stacked.separated(got), alone.separated(want))


def test_clocks_are_set_back_by_table():
    """A table whose numbers of batches have come to their end goes on, and its neighbours as they are."""
    stacked, alone = both()
    state = alone.init(jax.random.key(0))
    for seed in range(2):
        _, state = dynamic.insert(alone, state, batch_of(seed))
    last = jnp.int32(2**31 - 1)
    state["b"] |= {
        "hash_clock": last,
        "hash_touched": jnp.where(state["b"]["hash_touched"] > 0, last, 0),
    }
    got = stacked.joined(alone.separated(state))
    _, got = dynamic.insert(stacked, got, batch_of(5))
    _, want = dynamic.insert(alone, state, batch_of(5))
    same(stacked.separated(got), alone.separated(want))
    assert int(stacked.of(got, "b")["hash_clock"]) < 2**31 - 1
    assert int(stacked.of(got, "a")["hash_clock"]) == 3


def test_the_policy_and_the_form_of_tables_decide_what_shares():
    rule = optimizers.SGD(0.1)
    tables = {
        "a": jax_tt.hash_table(64, 8, optimizer=rule),
        "b": jax_tt.hash_table(32, 8, optimizer=rule, min_age=3, seed=5, missing="zeros"),
        "policy": jax_tt.hash_table(64, 8, optimizer=rule, policy="lfu"),
        "ways": jax_tt.hash_table(64, 8, optimizer=rule, ways=16),
        "waits": jax_tt.hash_table(64, 8, optimizer=rule, admission=3),
        "waits too": jax_tt.hash_table(64, 8, optimizer=rule, admission=3),
        "shared rows": jax_tt.tables.HashTable(jax_tt.tt_table(64, 8, tt_ranks=2, optimizer=rule)),
        "by optax": jax_tt.hash_table(64, 8),
    }
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    assert sorted(collection.stack_of) == ["a", "b"]
    assert sorted(dataclasses.replace(collection, stack=True).alone) == sorted(
        tables.keys() - {"a", "b"}
    )


def test_tables_of_a_stack_grow():
    stacked, alone = both("none", max_capacity=None)
    tables = {
        n: dataclasses.replace(t, max_capacity=512) for n, t in stacked.tables.items() if n in ROWS
    }
    stacked, alone = (
        dataclasses.replace(x, tables={**x.tables, **tables}) for x in (stacked, alone)
    )
    got, want = stacked.init(jax.random.key(0)), alone.init(jax.random.key(0))
    for seed in range(3):
        _, got = dynamic.insert(stacked, got, batch_of(seed))
        _, want = dynamic.insert(alone, want, batch_of(seed))
    stacked, got = dynamic.grow_if_full(stacked, got, max_load=0.5)
    alone, want = dynamic.grow_if_full(alone, want, max_load=0.5)
    assert stacked.tables["b"].num_embeddings == alone.tables["b"].num_embeddings > ROWS["b"]
    assert stacked.tables["c"].num_embeddings == ROWS["c"]
    same(stacked.separated(got), alone.separated(want))
    again, _ = dynamic.grow_if_full(stacked, got, max_load=0.5)
    assert again is stacked
    optax_one, _ = both(rule=None, max_capacity=2**16, policy="none")
    _, full = dynamic.insert(optax_one, optax_one.init(jax.random.key(0)), batch_of(0))
    with pytest.raises(ValueError, match=r"a stack without an optimizer, of a, b, c.*stack=False"):
        dynamic.grow_if_full(optax_one, full, max_load=0.1)


@pytest.mark.optimized
def test_a_step_copies_no_stack():
    if not native_available():
        pytest.skip("the reference updates no table in place")
    tables = {
        f"t{k}": jax_tt.hash_table(1024, 16, optimizer=optimizers.Adagrad(0.1)) for k in range(4)
    }
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = collection.init(jax.random.key(0))
    batch = {name: WORDS(np.arange(6).reshape(3, 2)) for name in tables}
    train = jax.jit(lambda s, b: inserting_step(collection)(s, b)[2], donate_argnums=0)
    compiled = train.lower(state, batch).compile()
    big = r"= (?:f32\[4096|u32\[512|s32\[512)[^ ]* copy[^ ]*\("
    assert not re.findall(big, compiled.as_text())
    (name,) = collection.stacks
    places = {n: x.unsafe_buffer_pointer() for n, x in state[name].items() if x.size > 100}
    state = compiled(state, batch)
    assert places == {n: state[name][n].unsafe_buffer_pointer() for n in places}
    assert len(places) == 5
    read = jax.jit(lambda s, b: jax_tt.lookup_features(collection, s, b, train=False)[0])
    assert not re.findall(big, read.lower(state, batch).compile().as_text())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_replicated_on_several_devices(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    states = []
    for one in both():
        with jax.set_mesh(mesh):
            state = jax.device_put(one.init(jax.random.key(0)), NamedSharding(mesh, P()))
            place = NamedSharding(mesh, P("data"))
            batch = batch_of(0)
            for name in ("once", "sequence"):
                batch[name] = jax.device_put(batch[name], place)
            for _ in range(2):
                _, state = jax.jit(lambda s, b, c=one: dynamic.insert(c, s, b))(state, batch)
                state = jax.jit(lambda s, b, c=one: inserting_step(c)(s, b)[2])(state, batch)
        states.append(one.separated(state))
    same(*states)


class Tower(nnx.Module):
    def __init__(self, collection):
        self.embed = jax_tt.EmbedCollection(
            collection.tables, FEATURES, stack=collection.stack, rngs=nnx.Rngs(0)
        )

    def __call__(self, batch):
        rows = self.embed(batch)
        return jnp.sin(rows["once"] + rows["mean"] + rows["again"] + rows["dense"] + rows["other"])


@nnx.jit
def layer_step(model, opt, batch):
    value, grads = jax_tt.value_and_grad(lambda model: jnp.sum(model(batch)))(model)
    opt.update(model, grads)
    return value


def test_layers_insert_count_remove_and_grow():
    models = [Tower(one) for one in both("none", max_capacity=2**12)]
    stacked, alone = (model.embed for model in models)
    opts = [jax_tt.FusedOptimizer(model, optax.sgd(0.1)) for model in models]
    (name,) = [n for n in stacked.stacks if n.startswith("hash")]
    assert len(stacked.stacks[name]) == 8
    assert isinstance(stacked.stacks[name]["hash_keys"], jax_tt.nnx.HashState)

    def equal():
        same(stacked.states(), alone.states())
        counts = [
            [int(embed.tables[n].out_of_range[...]) for n in ROWS] for embed in (stacked, alone)
        ]
        assert counts[0] == counts[1]
        return counts[0]

    for seed in range(3):
        values = [
            layer_step(model, opt, batch_of(seed)) for model, opt in zip(models, opts, strict=True)
        ]
        assert values[0] == values[1]
    assert equal()[1] > 0  # keys without a room
    same(*(embed.insert(batch_of(7)) for embed in (stacked, alone)))
    keys = WORDS(np.arange(20))
    same(*(embed.tables["a"].remove(keys) for embed in (stacked, alone)))
    same(*(embed.tables["c"].insert(keys) for embed in (stacked, alone)))
    equal()
    with pytest.raises(TypeError, match=r"insert: .*expected a HashTable"):
        stacked.tables["d"].insert(keys)
    assert all(embed.tables["b"].grow_if_full(max_load=0.5) for embed in (stacked, alone))
    grown = [embed.grow_if_full(max_load=0.3) for embed in (stacked, alone)]
    assert grown[0] == grown[1]
    assert len(grown[0]) > 0
    equal()
    values = [layer_step(model, opt, batch_of(8)) for model, opt in zip(models, opts, strict=True)]
    assert values[0] == values[1]
    equal()
    for model in models:
        model.eval()
    same(*(model(batch_of(9)) for model in models))
    equal()


@pytest.mark.parametrize("method", ["auto", "reference"])
def test_layers_that_are_closed_over(method):
    """A training call says that it sets variables, and names the table; evaluation sets none."""
    stacked, _ = both()
    model = Tower(stacked)
    model.embed.tables["b"].method = method

    def scanned(_, batch):
        return None, model(batch)

    batch = jax.tree.map(lambda x: x[None], batch_of(0))
    with pytest.raises(
        TypeError, match=r"a: hash_\w+: a training call sets|a: embedding: a training"
    ):
        jax.lax.scan(scanned, None, batch)
    model.eval()
    before = model.embed.arrays()
    _, rows = jax.lax.scan(scanned, None, batch)
    same(rows[0], model(batch_of(0)))
    assert [id(x) for x in jax.tree.leaves(model.embed.arrays())] == [
        id(x) for x in jax.tree.leaves(before)
    ]


def test_some_features_come_with_slots():
    """Beside features whose keys the call inserts; and two calls in a loss that insert into tables of a stack."""
    models = [Tower(one) for one in both("none")]
    values = []
    for model in models:
        opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
        known = dynamic.with_slots(batch_of(0), model.embed.insert(batch_of(0)))
        mixed = {**known, "once": batch_of(3)["once"]}
        values.append([layer_step(model, opt, batch) for batch in (mixed, known)])
    assert values[0] == values[1]
    same(*(model.embed.states() for model in models))

    def loss(model):
        rows = model.embed({**known, "once": batch_of(5)["once"]})
        model.embed({**known, "mean": batch_of(6)["mean"], "again": batch_of(6)["again"]})
        return jnp.sum(rows["once"])

    with pytest.raises(ValueError, match=r"a \(.*b \(.*which share arrays, more than once"):
        jax_tt.value_and_grad(loss)(models[0])


def test_states_that_do_not_fit():
    stacked, _ = both()
    state = stacked.init(jax.random.key(0))
    (name,) = [n for n in stacked.stacks if n.startswith("hash")]
    lacking = {**state, name: {n: x for n, x in state[name].items() if n != "hash_clock"}}
    for change in (partial(dynamic.insert, batch=batch_of(0)), dynamic.grow_if_full):
        with pytest.raises(ValueError, match=r"no array 'hash_clock'; expected shape \(3,\)"):
            change(stacked, lacking)
    states = stacked.separated(state)
    states["b"]["hash_clock"] = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"b: hash_clock: got int32 of shape \(3,\)"):
        stacked.joined(states)
    several = jax.vmap(stacked.init)(jax.random.split(jax.random.key(0), 2))
    assert stacked.of(several, "b")["hash_totals"].shape == (2, 7, 2)
    again = stacked.together(stacked.apart(several))
    same(again, several)


def test_gradients_by_optax():
    """Without evictions; what optax would leave to the next key in a slot is refused."""
    stacked, alone = both("none", rule=None, initializer=None)
    got, want = stacked.init(jax.random.key(0)), alone.init(jax.random.key(0))
    _, _, got, gradients = jax.jit(inserting_step(stacked))(got, batch_of(0))
    _, _, want, expected = jax.jit(inserting_step(alone))(want, batch_of(0))
    (name,) = [n for n in stacked.stacks if n.startswith("hash")]
    parts = [expected[table]["embedding"] for table in sorted(ROWS)]
    np.testing.assert_array_equal(gradients[name]["embedding"], np.concatenate(parts))
    same(stacked.separated(got), alone.separated(want))
    evicting, _ = both("lru", rule=None)
    model = Tower(evicting)
    with pytest.raises(TypeError, match="optimizer: got None for a table with the policy 'lru'"):
        nnx.grad(lambda model: jnp.sum(model(batch_of(0))))(model)


def test_checkpoints_are_by_table():
    """Layers with stacks and without read each other's training states, and go on alike."""
    pairs = []
    for one in both():
        model = Tower(one)
        pairs.append((model, jax_tt.FusedOptimizer(model, optax.sgd(0.1))))
    (stacked, alone), others = (model for model, _ in pairs), [nnx.clone(pair) for pair in pairs]
    layer_step(*pairs[0], batch_of(0))
    saved = jax_tt.checkpoint.save_args(stacked, nnx.state(pairs[0]))
    nnx.update(pairs[1], jax_tt.checkpoint.restore(alone, nnx.state(pairs[1]), saved))
    same(alone.embed.states(), stacked.embed.states())
    again = jax_tt.checkpoint.save_args(alone, nnx.state(pairs[1]))
    same(again, saved)
    model = others[0][0]
    nnx.update(others[0], jax_tt.checkpoint.restore(model, nnx.state(others[0]), again))
    values = [layer_step(*pair, batch_of(1)) for pair in (*pairs, others[0])]
    assert values[0] == values[1] == values[2]
    served, arrays = stacked.embed.collection.frozen(stacked.embed.arrays())
    assert len(served.stacks) == 2
    rows, _ = jax_tt.lookup_features(served, arrays, batch_of(2))
    stacked.eval()
    same(rows, stacked.embed(batch_of(2)))
