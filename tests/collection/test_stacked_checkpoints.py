"""Checkpoints of stacks are by table: models with and without stacks read what the others have written."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt.checkpoint import restore, save_args, target

RULE = jax_tt.optimizers.RowWiseAdagrad(0.05)
# Not in the order of their names, in which they share arrays.
ROWS = {"b": 5, "a": 7, "d": 6, "c": 3}
# Two stacks, of which optax steps one, and a table that is like no other.
TABLES = {
    name: jax_tt.dense_table(rows, 4, optimizer=RULE if name in "ab" else None)
    for name, rows in ROWS.items()
} | {"odd": jax_tt.dense_table(4, 3, optimizer=RULE)}
FEATURES = {name: jax_tt.Feature(name) for name in TABLES}
BATCH = {name: jnp.array([[0, 1], [2, 99]]) for name in TABLES}
TX = optax.adam(0.1)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def loss_of(rows: Any) -> jax.Array:
    return sum(jnp.sum(jnp.sin(3 * own)) for own in rows.values())


FUSED, OF_OPTAX = jax_tt.Collection(TABLES, FEATURES, stack=True).stacks


def of_optax(trained: Any) -> Any:
    return {name: own for name, own in trained.items() if name in ("c", "d", OF_OPTAX)}


def initial(stack: bool, seed: int = 0) -> tuple[jax_tt.Collection, Any]:
    collection = jax_tt.Collection(TABLES, FEATURES, stack)
    tables = collection.init(jax.random.key(seed))
    return collection, {"tables": tables, "opt": TX.init(of_optax(collection.trained(tables)))}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def step(collection: Any, state: Any) -> Any:
    tables = state["tables"]

    def loss(trained: Any) -> jax.Array:
        arrays = collection.replaced(tables, trained)
        return loss_of(jax_tt.lookup_features(collection, arrays, BATCH, bounds="zero")[0])

    gradients = jax.grad(loss)(collection.trained(tables))
    tables, gradients = collection.overwritten(tables, gradients)
    updates, opt = TX.update(gradients, state["opt"])
    params = optax.apply_updates(of_optax(collection.trained(tables)), updates)
    return {"tables": collection.replaced(tables, params), "opt": opt}


@pytest.mark.usefixtures("promotion_of_a_user")
def test_collections_with_and_without_stacks_read_each_other(tmp_path):
    """Optimizer state and moments too; training goes on from there, donated, bit for bit."""
    stacked, state = initial(True)
    alone, other = initial(False, 1)
    state = step(stacked, state)
    assert state["tables"]["updates"]["step"].tolist() == [1, 1, 1]
    saved = save_args(stacked, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda: other)
        read = checkpointer.restore(tmp_path / "state", target(alone, like), strict=False)
    other = restore(alone, like, read)
    assert_same(alone.separated(other["tables"]), stacked.separated(state["tables"]))
    for moments, of_stacks in zip(other["opt"][0][1:], state["opt"][0][1:], strict=True):
        rows = of_stacks[OF_OPTAX]["embedding"]
        assert np.any(rows[: ROWS["c"]]) and np.any(rows[ROWS["c"] :])
        np.testing.assert_array_equal(moments["c"]["embedding"], rows[: ROWS["c"]])
        np.testing.assert_array_equal(moments["d"]["embedding"], rows[ROWS["c"] :])
    assert_same(save_args(alone, other), saved)
    again = restore(stacked, initial(True, 2)[1], save_args(alone, other))
    assert_same(again, state)
    assert_same(step(stacked, again), step(stacked, state))
    step(alone, other)


def test_a_checkpoint_is_that_of_tables_alone():
    """And so is the target; also with a moment for every row, and of a collection that has no two alike."""
    (alone, apart), (stacked, state) = (initial(stack) for stack in (False, True))
    by_row = jnp.arange(9)
    state["v"] = {OF_OPTAX: {"embedding": by_row}}
    apart["v"] = {"c": {"embedding": by_row[:3]}, "d": {"embedding": by_row[3:]}}
    assert_same(save_args(stacked, state), save_args(alone, apart))
    like = [jax.eval_shape(lambda tree=tree: tree) for tree in (state, apart)]
    assert target(stacked, like[0]) == target(alone, like[1]) == target(stacked, state)
    assert_same(restore(stacked, like[0], save_args(alone, apart)), state)

    features = {"odd": FEATURES["odd"]}
    of_one = [jax_tt.Collection({"odd": TABLES["odd"]}, features, stack) for stack in (False, True)]
    states = [collection.init(jax.random.key(0)) for collection in of_one]
    assert states[1]["updates"]["step"].shape == (1,)
    assert_same(*map(save_args, of_one, states))


def sharded() -> Any:
    """A mesh, and the tables with one that is divided over it."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return mesh, TABLES | jax_tt.shard_tables({"odd": TABLES["odd"]}, mesh, "x")


def test_stacks_beside_a_sharded_table_are_restored_to_every_device():
    """Where they are on one device by default; and where they were divided, which no op takes."""
    mesh, tables = sharded()
    alone, stacked = (jax_tt.Collection(tables, FEATURES, stack) for stack in (False, True))
    apart, state = (collection.init(jax.random.key(0)) for collection in (alone, stacked))
    saved = save_args(stacked, state)
    assert_same(saved, save_args(alone, apart))
    assert target(stacked, state) == target(alone, apart)
    rows = state[FUSED]["embedding"]
    divided = jax.device_put(rows, NamedSharding(mesh, P("x")))
    state[FUSED] = {**state[FUSED], "embedding": divided}
    found = target(stacked, state)["a"]["embedding"]
    assert found.shape == (7, 4) and found.sharding == NamedSharding(mesh, P())
    assert_same(restore(stacked, state, saved), state)


def layer(stack: bool, seed: int = 0, **options: Any) -> jax_tt.EmbedCollection:
    """With a rate in a variable, of the first table of the first stack."""
    rate = nnx.Variable(jnp.float32(0.1 * (seed + 1)))
    first = jax_tt.dense_table(ROWS["b"], 4, optimizer=jax_tt.optimizers.RowWiseAdagrad(rate))
    tables = TABLES | {"b": first}
    return jax_tt.EmbedCollection(tables, FEATURES, stack=stack, rngs=nnx.Rngs(seed), **options)


def pair(stack: bool, nested: bool, seed: int = 0) -> Any:
    embed = layer(stack, seed)
    # Another layer has the name of a stack.
    other = {FUSED: jax_tt.Embed(3, 4, rngs=nnx.Rngs(seed))}
    model = nnx.Dict(embed=embed, **other) if nested else embed
    return model, jax_tt.FusedOptimizer(model, TX)


@nnx.jit(donate_argnums=0)
def nnx_step(both: Any) -> None:
    def loss(model: Any) -> jax.Array:
        return loss_of((model.embed if isinstance(model, nnx.Dict) else model)(BATCH))

    model, opt = both
    opt.update(model, jax_tt.grad(loss)(model))


def saved_of(both: Any) -> Any:
    return save_args(both[0], nnx.state(both))


def read_into(both: Any, saved: Any) -> Any:
    nnx.update(both, restore(both[0], nnx.state(both), saved))
    return both


@pytest.mark.usefixtures("promotion_of_a_user")
@pytest.mark.parametrize(("stack", "nested"), [(True, False), (False, True)])
def test_layers_with_and_without_stacks_read_each_other(stack, nested):
    """There and back, and a step after it is the one that it would have been."""
    one = pair(stack, nested)
    assert_same(saved_of(one), saved_of(pair(not stack, nested)))
    nnx_step(one)
    saved = saved_of(one)
    tables = saved["0"]["embed"]["tables"] if nested else saved["0"]["tables"]
    assert [int(own["out_of_range"]) for own in tables.values()] == [1] * len(TABLES)
    assert [own["step"] for own in tables.values() if "step" in own] == [1, 1, 1]
    other = read_into(pair(not stack, nested, 1), saved)
    assert_same(saved_of(other), saved)
    again = read_into(pair(stack, nested, 2), saved_of(other))
    for both in (one, other, again):
        nnx_step(both)
    assert_same(nnx.state(again), nnx.state(one))
    # XLA may round the steps of optax in another way in another program.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, saved_of(other), saved_of(one))


def test_only_tables_that_count_ids_out_of_range_have_a_count():
    layers = [layer(stack, lookup=jax_tt.Lookup(bounds="clip")) for stack in (False, True)]
    for embed in layers:
        embed.tables["a"].bounds = "warn"
        embed(BATCH)
        embed.tables["a"].bounds = "clip"  # and has the count still
    saved = [save_args(embed, nnx.state(embed)) for embed in layers]
    assert_same(*saved)
    embed = layers[1]
    embed.out_of_range.set_value(jnp.full(4, 9))
    nnx.update(embed, restore(embed, nnx.state(embed), saved[0]))
    assert embed.out_of_range[...].tolist() == [1, 0, 0, 0]


def test_what_has_no_rows_of_tables_is_refused():
    """With its path."""
    stacked, state = initial(True)
    refused = lambda match: pytest.raises(ValueError, match=match)  # noqa: E731
    with refused(rf"state\['v_col'\]\['{FUSED}'\]\['embedding'\]: got shape \(4,\).* of a, b one"):
        save_args(stacked, {**state, "v_col": {FUSED: {"embedding": jnp.zeros(4)}}})
    with refused(rf"state\['ema'\]\['{FUSED}'\]\['embedding'\]\['row'\]: got an array of a stack"):
        deeper = {FUSED: {"embedding": {"row": jnp.zeros((12, 4))}}}
        target(stacked, {**state, "ema": deeper})
    with refused(
        rf"state\['tables'\]\['{FUSED}'\]\['embedding'\]: .*tables/b/embedding, which ano"
    ):
        twice = {"b": {"embedding": jnp.zeros((5, 4))}, **state["tables"]}
        target(stacked, {**state, "tables": twice})
    saved = save_args(stacked, state)
    del saved["tables"]["b"]["embedding"]
    with refused(r"arrays\['tables'\]\['b'\]: has no 'embedding'"):
        restore(stacked, state, saved)
    model, _ = pair(True, True)
    part = nnx.Optimizer(model.embed, TX, wrt=nnx.Param)
    with refused(
        rf"\['stacks'\]\['{OF_OPTAX}'\]\['embedding'\]: .*expected one optimizer of the wh"
    ):
        target(model, nnx.state((model, part)))
    _, tables = sharded()
    embed = jax_tt.EmbedCollection(tables, FEATURES, rngs=nnx.Rngs(0))
    rows = embed.alone["odd"].embedding[...]
    with refused(r"state\['1'\]\['embedding'\]: .*cannot be placed: the .*'tables/odd' stores"):
        target(embed, (nnx.state(embed), {"embedding": rows}))
