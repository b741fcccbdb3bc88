"""Stacks: tables that share their arrays give what they give one by one, bit for bit."""

import copy
import dataclasses
import functools
import pickle
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
from jax_tt import Bags, Feature, optimizers
from tests.conftest import method_fixture, native_available

method = method_fixture("reference", "native", "cuda_emulated")

RNG = np.random.default_rng(0)
ROWS = {"a": 50, "b": 7, "c": 300, "d": 1}
FEATURES = {
    "once": Feature("a"),
    "again": Feature("a", combiner="mean"),
    "weighted": Feature("b"),
    "sequence": Feature("c", combiner=None),
    "largest": Feature("d", combiner="max"),
    "odd": Feature("odd"),
    "other": Feature("other"),
}
RULES = {
    "sgd": optimizers.SGD,
    "row_wise": optimizers.RowWiseAdagrad,
    "adam": optimizers.Adam,
    "bfloat16": optimizers.Adagrad,
    "optax": None,
}


def both(rule: str, **options: Any) -> tuple[jax_tt.Collection, jax_tt.Collection]:
    """Tables of their own and the same ones in a stack, beside two that are like no other."""
    kind, dtype = RULES[rule], jnp.bfloat16 if rule == "bfloat16" else jnp.float32
    tables = {
        name: jax_tt.dense_table(
            rows, 6, param_dtype=dtype, optimizer=kind and kind(0.05 * (k + 1)), **options
        )
        for k, (name, rows) in enumerate(ROWS.items())
    }
    tables["odd"] = jax_tt.dense_table(20, 5, optimizer=kind and kind(0.1))
    tables["other"] = jax_tt.dense_table(20, 6, optimizer=optimizers.FTRL(0.1))
    stacked = jax_tt.Collection(tables, FEATURES, stack=None if kind else True)
    return dataclasses.replace(stacked, stack=False), stacked


def batch_of(seed: int, extra: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def ids(table: str, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, ROWS.get(table, 20) + extra, shape).astype(np.int32)

    offsets = np.array([0, 3, 3, 4, 9], np.int32)
    return {
        "once": ids("a", (4, 3)),
        "again": Bags(ids("a", (9,)), offsets),
        "weighted": Bags(ids("b", (9,)), offsets, rng.normal(size=9).astype(np.float32)),
        "sequence": ids("c", (4, 2)),
        "largest": ids("d", (4, 1)),
        "odd": ids("odd", (4, 2)),
        "other": ids("other", (4, 2)),
    }


def loss_of(rows: Any, names: Any = None) -> jax.Array:
    wide = {name: rows[name].astype(jnp.float32) for name in names or rows}
    return sum(jnp.sum(jnp.sin(own) * (k + 1)) for k, own in enumerate(wide.values()))


@functools.partial(jax.jit, static_argnums=(0, 3), static_argnames=("names", "bounds"))
def step(
    collection: Any, state: Any, batch: Any, method: str, names: Any = None, **named: Any
) -> Any:
    """The rows, the state after a step, and the gradients of the tables without an optimizer."""

    def loss(trained: Any) -> Any:
        arrays, options = collection.replaced(state, trained), {"bounds": "zero", **named}
        rows, after = jax_tt.lookup_features(collection, arrays, batch, method=method, **options)
        return loss_of(rows, names), (rows, after)

    gradients, (rows, after) = jax.grad(loss, has_aux=True)(collection.trained(state))
    return rows, *collection.overwritten(after, gradients)


def by_table(collection: Any, gradients: Any) -> Any:
    """Gradients with respect to arrays of a state, by table."""
    found = {name: own for name, own in gradients.items() if name in collection.tables}
    for stack in collection.stacks.values():
        places = stack.places["embedding"].items()
        for name, (first, count) in places if stack.name in gradients else ():
            rows = slice(first, first + count)
            found[name] = {array: x[rows] for array, x in gradients[stack.name].items()}
    return found


def assert_same(got: Any, want: Any, method: str = "native") -> None:
    """Bit for bit; XLA may round the sums of the reference in another way in another program."""

    def same(a: Any, b: Any) -> None:
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        tolerance = {"rtol": 1e-2, "atol": 1e-5} if method == "reference" else {"rtol": 0}
        np.testing.assert_allclose(a, b, **tolerance)

    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(same, got, want)


@pytest.mark.parametrize("rule", RULES)
def test_stacked_tables_are_trained_as_those_alone(rule, method):
    """Every table with its rate; ids at both ends of every table and beyond, which no other table may see."""
    alone, stacked = both(rule)
    (name,) = stacked.stacks
    assert sorted(stacked.alone) == ["odd", "other"]
    key = jax.random.key(0)
    want, got = alone.init(key), stacked.init(key)
    assert_same(stacked.separated(got), alone.separated(want))
    assert got[name]["embedding"].shape == (sum(ROWS.values()), 6)
    structure = jax.tree.structure(got)
    for seed in range(3):
        batch = batch_of(seed, extra=seed)
        batch["once"][0] = [-1, ROWS["a"], ROWS["a"] - 1]
        rows, want, others = step(alone, want, batch, method)
        found, got, other_gradients = step(stacked, got, batch, method)
        assert_same(found, rows, method)
        if others:
            assert_same(by_table(stacked, other_gradients), others, method)
    assert_same(stacked.separated(got), alone.separated(want), method)
    assert jax.tree.structure(got) == structure


def test_what_belongs_to_a_table_stays_with_it(method):
    """Rates of a call, limits, refused steps and frozen tables; tables that a loss does not use."""
    alone, _ = both("adam")
    updates = {
        "a": {"max_gradient": 0.01},
        "b": {"skip_nonfinite": True},
        "c": {"frozen": True},
        "d": {},
    }
    tables = dict(alone.tables)
    for name, fields in updates.items():
        update = dataclasses.replace(tables[name].update, **fields)
        tables[name] = jax_tt.extension.with_update(tables[name], update)
    alone = dataclasses.replace(alone, tables=tables)
    stacked = dataclasses.replace(alone, stack=True)
    want = alone.init(jax.random.key(0))
    got = stacked.joined(alone.separated(want))
    batch = batch_of(0)
    batch["weighted"] = dataclasses.replace(
        batch["weighted"], weights=np.full(9, np.inf, np.float32)
    )
    rates = {"hyperparameters": {"d": {"learning_rate": jnp.float32(0.5)}}}
    for names in (None, ("once", "largest"), ("sequence",)):
        _, want, _ = step(alone, want, batch, method, names=names, **rates)
        _, got, _ = step(stacked, got, batch, method, names=names, **rates)
        assert_same(stacked.separated(got), alone.separated(want), method)
    assert got["updates"]["step"].tolist() == want["updates"]["step"].tolist()


def test_one_id_too_many_is_an_error_of_its_table():
    if not native_available():
        pytest.skip("native operations on a CPU raise")
    _, stacked = both("sgd")
    state = stacked.init(jax.random.key(0))
    batch = batch_of(0) | {"largest": np.full((4, 1), 1, np.int32)}
    with pytest.raises(
        Exception, match=r"id 1 at position 0 is out of range for table 'd .*of 1 rows"
    ):
        jax.block_until_ready(step(stacked, state, batch, "native", bounds="error"))


def test_states_by_table():
    alone, stacked = both("row_wise")
    states = alone.separated(alone.init(jax.random.key(0)))
    state = stacked.joined(states)
    assert_same(stacked.of(state, "b")["embedding"], states["b"]["embedding"])
    assert stacked.sizes(state) == alone.sizes(alone.joined(states))
    given = {
        name: {"embedding": np.asarray(states[name]["embedding"]) + 1, "step": jnp.float32(k + 1)}
        for k, name in enumerate(("b", "odd"))
    }
    replaced = alone.separated(alone.replaced(alone.joined(states), given))
    assert_same(stacked.separated(stacked.replaced(state, given)), replaced)
    served, arrays = stacked.frozen(state)
    assert [[*stack.tables] for stack in served.stacks.values()] == [[*"abcd", "other"]]
    small = jax_tt.quantize(states["c"]["embedding"], bits=8)
    after, replaced = stacked.with_tables(state, {"c": small})
    assert [[*stack.tables] for stack in after.stacks.values()] == [[*"abd"]]
    for collection, own in ((served, arrays), (after, replaced)):
        rows, _ = jax_tt.lookup_features(collection, own, batch_of(0), bounds="zero")
        want, _ = jax_tt.lookup_features(stacked, state, batch_of(0), bounds="zero")
        np.testing.assert_array_equal(rows["once"], want["once"])
        np.testing.assert_allclose(rows["sequence"], want["sequence"], atol=1e-2)
    counting = stacked.with_statistics(state)
    _, counting = jax_tt.lookup_features(stacked, counting, batch_of(0), bounds="zero")
    assert stacked.statistics(counting)["a"].requests == 21


def test_states_of_numpy():
    """As they come from a file, outside of ``jit`` too; the steps of Adam's tables are read by table."""
    for collection in both("adam"):
        state = collection.init(jax.random.key(0))
        found, want = (
            jax_tt.lookup_features(collection, one, batch_of(0), bounds="zero")[0]
            for one in (jax.tree.map(np.asarray, state), state)
        )
        assert_same(found, want)


def test_states_that_do_not_fit():
    _, stacked = both("row_wise")
    state = stacked.init(jax.random.key(0))
    (stack,) = stacked.stacks
    for change, message in (
        ({stack: {"embedding": state[stack]["embedding"]}}, "no array 'slot_sum_0'"),
        (
            {stack: jax.tree.map(lambda x: x[1:], state[stack])},
            "with the rows of a, b, c, d",
        ),
        ({"updates": {**state["updates"], "step": jnp.float32(0)}}, r"of shape \(6,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_tt.lookup_features(stacked, {**state, **change}, batch_of(0))
    states = stacked.separated(state)
    with pytest.raises(ValueError, match=r"a: embedding: got float32 of shape \(7, 6\)"):
        stacked.joined({**states, "a": states["b"], "b": states["a"]})
    half = {**states["b"], "embedding": states["b"]["embedding"].astype(jnp.float16)}
    with pytest.raises(ValueError, match=r"embedding of table 'b': got float16; expected float32"):
        stacked.joined({**states, "b": half})
    for given, message in (
        ({"embedding": states["a"]["embedding"]}, r"b: embedding: got float32 of shape \(50, 6\)"),
        ({"used": states["a"]["used"]}, "the array 'used', which the table does not have"),
    ):
        with pytest.raises(ValueError, match=message):
            stacked.replaced(state, {"b": given})
    with pytest.raises(ValueError, match=rf"stack '{stack}'\. Collection\.joined takes"):
        jax_tt.lookup_features(stacked, states, batch_of(0))
    with pytest.raises(ValueError, match="the table 'e'"):
        stacked.of(state, "e")
    with pytest.raises(TypeError, match="stack: got 'yes'"):
        jax_tt.Collection(stacked.tables, FEATURES, "yes")


@pytest.mark.parametrize("way", ["jit", "explicit", "shard_map", "vmap"])
def test_where_stacks_cannot_be_taken_as_they_are(way):
    """Several devices, in all three ways, and batches under a `jax.vmap` outside of the loss."""
    alone, stacked = both("adam")
    states = alone.separated(alone.init(jax.random.key(0)))
    batch = {
        name: np.asarray(ids) for name, ids in batch_of(0).items() if not isinstance(ids, Bags)
    }
    features = {name: FEATURES[name] for name in batch} | {"b": Feature("b")}
    batch["b"] = np.array([[1], [2], [6], [1]], np.int32)
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))

    def results(collection: Any) -> Any:
        collection = dataclasses.replace(collection, features=features)
        state = collection.joined(states)
        trained = collection.trained(state)

        def gradients(trained: Any, batch: Any) -> Any:
            def loss(trained: Any) -> Any:
                arrays = collection.replaced(state, trained)
                rows, _ = jax_tt.lookup_features(collection, arrays, batch, bounds="zero")
                return loss_of(rows)

            return jax.grad(loss)(trained)

        def rows(trained: Any, batch: Any) -> Any:
            arrays = collection.replaced(state, trained)
            return jax_tt.lookup_features(collection, arrays, batch, bounds="zero")[0]

        given = trained, batch
        if way == "vmap":
            return jax.jit(jax.vmap(rows, (None, 0)))(
                trained, jax.tree.map(lambda ids: np.stack([ids, ids[::-1]]), batch)
            )
        if way == "shard_map":
            gradients = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
        else:
            given = (
                jax.device_put(trained, NamedSharding(mesh, P())),
                jax.device_put(batch, NamedSharding(mesh, P("x"))),
            )
        found = jax.jit(gradients)(*given)
        return collection.separated(collection.overwritten(state, found)[0])

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6),
        results(stacked),
        results(alone),
    )


@pytest.mark.optimized
def test_a_step_copies_no_stack():
    if not native_available():
        pytest.skip("the reference updates no table in place")
    tables = {
        f"t{k}": jax_tt.dense_table(1000 + k, 16, optimizer=optimizers.Adam(0.1)) for k in range(12)
    }
    # Between tables of the stack, which are in one call nevertheless.
    tables["t5"] = jax_tt.dense_table(1000, 4, optimizer=optimizers.SGD(0.1))
    features = {name: Feature(name) for name in tables}
    collection = jax_tt.Collection(tables, features)
    state = jax.jit(collection.init)(jax.random.key(0))
    batch = {name: jnp.array([[1, 2], [2, 999]], jnp.int32) for name in features}
    assert len(jax.tree.leaves(state)) == 7
    alone = dataclasses.replace(collection, stack=False)
    assert collection.sizes(jax.eval_shape(collection.init, jax.random.key(0))) == alone.sizes(
        jax.eval_shape(alone.init, jax.random.key(0))
    )
    train = jax.jit(
        lambda state, batch: step(collection, state, batch, "native")[1], donate_argnums=0
    )
    compiled = train.lower(state, batch).compile()
    (name,) = collection.stacks
    count, _ = collection.stacks[name].shapes["embedding"]
    assert not re.findall(rf"= f32\[{count},16\][^ ]* copy[^ ]*\(", compiled.as_text())
    place = state[name]["embedding"].unsafe_buffer_pointer()
    for _ in range(2):
        state = compiled(state, batch)
    assert state[name]["embedding"].unsafe_buffer_pointer() == place
    rows = jnp.ones((1003, 16))
    write = jax.jit(lambda s, x: collection.replaced(s, {"t3": {"embedding": x}}), donate_argnums=0)
    written = write.lower(state, rows).compile()
    state = written(state, rows)
    assert state[name]["embedding"].unsafe_buffer_pointer() == place
    assert_same(collection.of(state, "t3")["embedding"], rows)
    evaluate = jax.jit(lambda s, b: jax_tt.lookup_features(collection, s, b, train=False)[0])
    text = evaluate.lower(state, batch).compile().as_text()
    assert not re.findall(rf"= f32\[{count},16\][^ ]* copy[^ ]*\(", text)


@pytest.mark.optimized
@pytest.mark.parametrize("way", ["automatic", "explicit", "beside a sharded table"])
def test_a_step_on_several_devices_copies_no_stack(way):
    """Also where the batches of its tables can be divided in other ways."""
    if not native_available():
        pytest.skip("the reference updates no table in place")
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    tables = {
        name: jax_tt.dense_table(500, 16, optimizer=optimizers.Adagrad(0.1)) for name in "abcd"
    }
    if way.startswith("beside"):
        tables["e"] = jax_tt.dense_table(512, 16, optimizer=optimizers.Adagrad(0.1))
        tables |= jax_tt.shard_tables({"e": tables["e"]}, mesh, "data")
    features = {name: Feature(name) for name in tables}
    features |= {"a": Feature("a", combiner="max"), "b": Feature("b", combiner=None)}
    features["again"] = Feature("c")
    collection = jax_tt.Collection(tables, features)
    (stack,) = collection.stacks.values()
    batch = {name: np.arange(16, dtype=np.int32).reshape(8, 2) for name in features}
    batch["d"] = Bags(np.arange(9, dtype=np.int32), np.array([0, 2, 2, 9], np.int32))
    states = jax.tree.map(np.asarray, collection.separated(collection.init(jax.random.key(0))))
    results = []
    for one in (collection, dataclasses.replace(collection, stack=False)):
        own = one.joined(states)
        with jax.set_mesh(mesh):
            if way != "beside a sharded table":
                own = jax.device_put(own, NamedSharding(mesh, P()))
                batch["c"] = jax.device_put(batch["c"], NamedSharding(mesh, P("data")))
            train = jax.jit(
                lambda state, batch, c=one: step(c, state, batch, "native")[1], donate_argnums=0
            )
            compiled = train.lower(own, batch).compile()
            if one is collection:
                assert compiled.memory_analysis().temp_size_in_bytes < 500 * 16 * 4
                assert not re.findall(
                    rf"= f32\[{stack.shapes['embedding'][0]},16\][^ ]* copy[^ ]*\(",
                    compiled.as_text(),
                )
            results.append(one.separated(compiled(own, batch)))
    assert_same(*results)


class Tower(nnx.Module):
    def __init__(self, stack: bool, rule: str = "row_wise") -> None:
        alone, _ = both(rule)
        rngs = nnx.Rngs(0)
        self.embed = jax_tt.EmbedCollection(alone.tables, FEATURES, stack=stack, rngs=rngs)
        self.head = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        rows = self.embed(batch)
        return self.head(rows["once"] + rows["again"] + rows["weighted"] + rows["largest"])


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_layer(model: Any, opt: Any, batch: Any) -> Any:
    loss, grads = jax_tt.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    opt.update(model, grads)
    return loss


@pytest.mark.parametrize("rule", ["row_wise", "optax"])
def test_layers_train_alike(rule):
    models = [Tower(stack, rule) for stack in (False, True)]
    losses = []
    for model in models:
        opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
        losses.append([float(train_layer(model, opt, batch_of(seed, 1))) for seed in range(3)])
    assert losses[0] == losses[1]
    alone, stacked = (model.embed for model in models)
    assert_same(stacked.states(), alone.states())
    assert (
        int(stacked.tables["d"].out_of_range[...]) == int(alone.tables["d"].out_of_range[...]) > 0
    )
    # A layer takes the states of the other one.
    other = Tower(True, rule).embed
    other.set_states(alone.states())
    assert_same(other.states(), alone.states())


def test_a_state_fits_tables_in_another_order():
    """The same arrays, of which every row and step must be that of the same table."""
    _, stacked = both("adam")
    other = dataclasses.replace(stacked, tables=dict(reversed(list(stacked.tables.items()))))
    state, _ = step(stacked, stacked.init(jax.random.key(0)), batch_of(0), "auto", names=("once",))[
        1:
    ]
    assert_same(other.separated(state), stacked.separated(state))
    rows, _ = jax_tt.lookup_features(stacked, state, batch_of(0), bounds="zero")
    found, _ = jax_tt.lookup_features(other, state, batch_of(0), bounds="zero")
    assert_same(found, rows)
    layers = [
        jax_tt.EmbedCollection(one, FEATURES, rngs=nnx.Rngs(k))
        for k, one in enumerate((stacked.tables, dict(reversed(list(stacked.tables.items())))))
    ]
    nnx.update(layers[1], nnx.state(layers[0]))
    assert_same(layers[1].states(), layers[0].states())


def test_tables_without_an_optimizer_stay_apart():
    """Optax would take them for one parameter; those that are only read are not trained."""
    tables = dict(both("optax")[0].tables)
    by_default = jax_tt.Collection(tables, FEATURES)
    assert not by_default.stacks
    embed = jax_tt.EmbedCollection(tables, FEATURES, rngs=nnx.Rngs(0))
    rates = {"b": optax.sgd(0.1), "rest": optax.set_to_zero()}
    before = embed.states()
    labels = nnx.map_state(
        lambda path, _: "b" if "b" in path else "rest", nnx.state(embed, nnx.Param)
    )
    opt = jax_tt.FusedOptimizer(embed, optax.multi_transform(rates, labels))
    opt.update(embed, jax_tt.grad(lambda m: jnp.sum(m(batch_of(0))["weighted"] ** 2))(embed))
    changed = [
        n
        for n, own in embed.states().items()
        if not jnp.array_equal(*(one["embedding"] for one in (own, before[n])))
    ]
    assert changed == ["b"]
    state = by_default.init(jax.random.key(0))
    for collection, count in ((by_default, 1), (dataclasses.replace(by_default, stack=False), 0)):
        assert len(collection.frozen(state)[0].stacks) == count


def test_a_state_of_other_tables_does_not_fit():
    """Of other names, and of other sizes, with as many rows in all."""
    sizes = ({"a": 5, "b": 7}, {"a": 5, "c": 7}, {"a": 7, "b": 5})
    trees = set()
    for rows in sizes:
        tables = {name: jax_tt.dense_table(count, 4) for name, count in rows.items()}
        features = {name: Feature(name) for name in tables}
        collection = jax_tt.Collection(tables, features, stack=True)
        state = jax.eval_shape(collection.init, jax.random.key(0))
        trees.add(jax.tree.structure(state))
        assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(12, 4)]
    assert len(trees) == len(sizes)
    (name,) = collection.stacks
    tables[name] = jax_tt.dense_table(3, 5)
    with pytest.raises(ValueError, match=f"the name '{name}', which the stack of a, b has"):
        jax_tt.Collection(tables, {**features, name: Feature(name)}, stack=True).init(
            jax.random.key(0)
        )


def test_a_table_of_a_stacked_layer():
    embed = Tower(True).embed
    table = embed.tables["b"]
    assert_same(table.embedding[...], embed.states()["b"]["embedding"])
    np.testing.assert_array_equal(table(jnp.array([6])), table.embedding[...][6:])
    assert table.top_k(table.embedding[...][3:4], 1)[1].shape == (1, 1)
    table.embedding[...] = jnp.ones((7, 6))
    (stack,) = embed.stacks.values()
    whole = stack["embedding"][...]
    assert np.all(whole[50:57] == 1) and not np.any(whole[57:] == 1) and not np.any(whole[:50] == 1)
    table.bounds = "zero"
    assert embed.tables["b"].bounds == "zero" and embed.tables["a"].bounds == "warn"
    assert embed.tables["odd"].embedding[...].shape == (20, 5)
    embed.eval()
    embed(batch_of(0, 1))
    assert not np.any(embed.out_of_range[...])
    assert np.asarray(table.slot_sum_0).shape == (7,)
    for wrong in ("embedding", "combiner", "growth"):
        with pytest.raises(AttributeError, match=f"b: a table in a stack has no '{wrong}'"):
            setattr(table, wrong, jnp.ones((7, 6)))
    with pytest.raises(ValueError, match=r"value: got shape \(3, 6\); expected \(7, 6\)"):
        table.embedding.set_value(jnp.ones((3, 6)))
    table.optimizer = optimizers.RowWiseAdagrad(0.5)
    assert embed.tables["b"].optimizer.learning_rate == 0.5
    with pytest.raises(ValueError, match="b: optimizer: got a SGD; expected one of the same class"):
        table.optimizer = optimizers.SGD(0.5)
    odd = embed.tables["other"]
    odd.optimizer = optimizers.RowWiseAdagrad(0.5)
    with pytest.raises(ValueError, match="other: optimizer: got a RowWiseAdagrad"):
        embed(batch_of(0))
    odd.optimizer = optimizers.FTRL(0.1)
    embed.eval()
    assert embed(batch_of(0))["weighted"].shape == (4, 6) and table.cache is None
    assert_same(2 * table.embedding + 1, table.embedding[...] * 2 + 1)
    assert table.embedding.T.shape == (6, 7) and len(table.embedding) == 7
    with pytest.raises(TypeError, match="item assignment"):
        embed.tables["b"] = table
    with pytest.raises(AttributeError, match="stack=False"):
        table.grow(20)


def test_rows_of_a_stacked_layer_are_taken_for_an_array():
    rows = Tower(True).embed.tables["b"].embedding
    values = rows[...]
    for function in (
        jnp.sum,
        jnp.linalg.norm,
        jax.jit(lambda x: x.T @ x),
        lambda x: jnp.take(x, jnp.array([3]), axis=0),
        lambda x: jnp.stack(list(x)),
        lambda x: x[3:4] > x,
        lambda x: x != 2 * x,
        lambda x: round(x, 1),
        lambda x: jax.tree.map(jnp.negative, {"rows": x})["rows"][...],
        lambda x: copy.copy(x)[...],
        lambda x: pickle.loads(pickle.dumps(x))[...],
    ):
        np.testing.assert_array_equal(function(rows), function(values))
    assert "embedding" in dir(Tower(True).embed.tables["b"])
    with pytest.raises(TypeError, match="unhashable"):
        hash(rows)


def test_states_of_several_models():
    """As `jax.vmap` and `nnx.vmap` stack them, along an axis before that of the rows."""
    alone, stacked = both("row_wise")
    states, want = (
        jax.vmap(one.init)(jax.random.split(jax.random.key(0), 3)) for one in (stacked, alone)
    )
    assert_same(stacked.separated(states), alone.separated(want))
    assert stacked.sizes(states)["b"] == alone.sizes(want)["b"]
    values = {"b": {"embedding": stacked.of(states, "b")["embedding"] + 1}}
    replaced = stacked.replaced(states, values)
    assert jax.tree.map(jnp.shape, replaced) == jax.tree.map(jnp.shape, states)
    assert_same(stacked.separated(replaced), alone.separated(alone.replaced(want, values)))
    assert_same(stacked.trained(states), jax.vmap(stacked.trained)(states))

    @nnx.vmap(in_axes=0, out_axes=0)
    def made(key: jax.Array) -> jax_tt.EmbedCollection:
        return jax_tt.EmbedCollection(stacked.tables, FEATURES, rngs=nnx.Rngs(key))

    embed = made(jax.random.split(jax.random.key(0), 3))
    assert embed.states()["b"]["embedding"].shape == (3, 7, 6)


def test_tables_of_a_stacked_layer_are_replaced():
    """Those that are left keep their rows and steps, options and counts; a stack that is as before, its variables."""
    embed = Tower(True).embed
    opt = jax_tt.FusedOptimizer(embed, optax.sgd(0.1))
    opt.update(embed, jax_tt.grad(lambda one: jnp.sum(one(batch_of(0, 1))["once"]))(embed))
    embed.tables["d"].bounds = "zero"
    want, counts = embed(batch_of(1)), {n: int(embed.tables[n].out_of_range[...]) for n in ROWS}
    small = jax_tt.quantize(embed.tables["c"].embedding[...], bits=8)
    served = embed.replaced({"c": small})
    assert [[*stack.tables] for stack in served.collection.stacks.values()] == [[*"abd"]]
    got = served(batch_of(1))
    np.testing.assert_allclose(got.pop("sequence"), want.pop("sequence"), atol=1e-2)
    assert_same(got, want)
    states, before = served.states(), embed.states()
    assert_same({n: states[n] for n in "abd"}, {n: before[n] for n in "abd"})
    assert served.tables["d"].bounds == "zero" and served.tables["c"].bounds == "warn"
    assert {n: int(served.tables[n].out_of_range[...]) for n in "abd"} == {
        n: counts[n] for n in "abd"
    }
    same = embed.replaced({"odd": jax_tt.quantize(embed.tables["odd"].embedding[...], bits=8)})
    (name,) = embed.stacks
    assert same.stacks[name]["embedding"] is embed.stacks[name]["embedding"]
    alone = served.replaced({n: jax_tt.quantize(before[n]["embedding"], bits=8) for n in "bd"})
    assert not alone.collection.stacks and [*alone.collection.sharing] == ["a", "odd", "other"]
    assert_same(alone(batch_of(1))["once"], want["once"])
    assert_same(alone.states()["a"], before["a"])


@pytest.mark.parametrize("stack", [False, True])
def test_calls_of_a_table_of_a_layer_in_losses(stack):
    """Those of tables without an optimizer have gradients, and others are refused; both count ids out of range."""
    plain, fused = (Tower(stack, rule).embed for rule in ("optax", "row_wise"))
    ids = jnp.array([1, 1, 7])

    def loss(embed: Any) -> jax.Array:
        table = embed.tables["b"]
        return jnp.sum(table(ids)) + jnp.sum(table.attend(jnp.ones((1, 6))))

    grads = nnx.grad(loss)(plain)
    own = next(iter(grads["stacks"].values())) if stack else grads["tables"]["b"]
    got = own["embedding"][...][50 if stack else 0 :][:7]
    np.testing.assert_array_equal(got[:, 0], [1, 3, 1, 1, 1, 1, 1])
    fused.tables["b"](ids)
    assert int(fused.tables["b"].out_of_range[...]) == 1
    with pytest.raises((TypeError, ValueError), match="b: this table of a collection was called"):
        jax_tt.grad(lambda embed: jnp.sum(embed.tables["b"](ids)))(fused)
