"""Training calls of layers over hash tables, which insert the keys of their batch."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen

RULE = jax_tt.optimizers.Adagrad(0.1)
ROWS, D = 64, 4
TABLE = jax_tt.hash_table(ROWS, D, ways=4, optimizer=RULE, safe_check="ignore")
FEATURES = {
    "clicked": jax_tt.Feature("item", combiner="mean"),
    "shown": jax_tt.Feature("item"),
    "country": jax_tt.Feature("country"),
}


def keys(first: int, count: int = 8) -> Any:
    """Keys of more than 32 bits, some of them twice."""
    numbers = np.arange(first, first + count)
    numbers[-1:] = numbers[:1]
    return jax_tt.dynamic.split_keys(numbers * 2**33 - 5)


def bags(first: int) -> dict[str, Any]:
    country = np.array([[1], [first % 20], [3], [3]], np.int32)
    many = jax_tt.Bags.from_lengths(keys(first, 6), np.array([3, 0, 2, 1]))
    return {"clicked": many, "shown": keys(first + 3, 4).reshape(4, 1), "country": country}


class Tower(nnx.Module):
    def __init__(self, table: Any = TABLE, **options: Any) -> None:
        rngs = nnx.Rngs(0)
        self.items = jax_tt.TableEmbed(table, jax_tt.Lookup(bounds="warn", **options), rngs=rngs)
        self.head = nnx.Linear(D, 1, rngs=rngs)

    def __call__(self, ids: Any) -> jax.Array:
        return self.head(self.items(ids))

    def insert(self, ids: Any) -> Any:
        return self.items.insert(ids)


class Towers(nnx.Module):
    def __init__(self, **options: Any) -> None:
        rngs = nnx.Rngs(0)
        tables = {"item": TABLE, "country": jax_tt.dense_table(20, D, optimizer=RULE)}
        self.items = jax_tt.EmbedCollection(tables, FEATURES, **options, rngs=rngs)
        self.head = nnx.Linear(3 * D, 1, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        return self.head(self.items.concatenated(batch))

    def insert(self, batch: Any) -> Any:
        return self.items.insert(batch)


def loss_of(model: Any, ids: Any) -> jax.Array:
    return jnp.mean((model(ids) - 1) ** 2)


def train(model: Any, opt: Any, ids: Any) -> jax.Array:
    loss, grads = jax_tt.value_and_grad(loss_of)(model, ids)
    opt.update(model, grads)
    return loss


def train_explicitly(model: Any, opt: Any, ids: Any) -> jax.Array:
    return train(model, opt, jax_tt.dynamic.with_slots(ids, model.insert(ids)))


def optimizer(model: Any) -> Any:
    return jax_tt.FusedOptimizer(model, optax.sgd(0.1))


def trained(model: Any, step: Any, batches: Any) -> tuple[list[float], Any]:
    opt = optimizer(model)
    losses = [float(step(model, opt, ids)) for ids in batches]
    return losses, nnx.to_pure_dict(nnx.state(model))


def same(left: Any, right: Any, tolerance: float = 0) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), left, right)


JITTED, EXPLICIT = nnx.jit(train), nnx.jit(train_explicitly)


@pytest.mark.parametrize("make, batch", [(Tower, keys), (Towers, bags)])
def test_steps_equal_those_with_an_explicit_insertion(make, batch):
    """Bit for bit, with evictions: a stream of new keys flows through a small table."""
    batches = [batch(3 * k) for k in range(12)]
    losses, state = trained(make(), JITTED, batches)
    others, expected = trained(make(), EXPLICIT, batches)
    same((losses, state), (others, expected))


def test_keys_without_room_read_their_initial_rows():
    table = dataclasses.replace(TABLE, admission=jax_tt.dynamic.AdmitAfter(3))
    layer = Tower(table, dtype="float32").items
    look_up = nnx.jit(lambda layer: layer(keys(0)))
    first = look_up(layer)
    assert not layer.hash_touched[...].any()
    same(first, look_up(layer))
    same(first, look_up(layer))
    assert int((layer.hash_touched[...] > 0).sum()) == 7
    same(first, look_up(layer))
    full = Tower(jax_tt.hash_table(4, D, ways=4, policy="none", optimizer=RULE))
    with pytest.warns(jax_tt.dynamic.MissingKeyWarning, match="found no room"):
        full(keys(0))
        jax.effects_barrier()


def test_only_training_calls_insert():
    table = dataclasses.replace(TABLE, missing="zeros")
    model = Tower(table)
    model.eval()
    assert not model.items(keys(0)).any() and int(model.items.hash_clock[...]) == 0
    model.train()
    done = model.items.insert(keys(0))
    located = jax_tt.dynamic.with_slots(keys(0), done)
    assert model.items(located).any() and int(model.items.hash_clock[...]) == 1
    frozen, arrays = jax_tt.extension.freeze(table, model.items.state())
    served = jax_tt.TableEmbed(frozen, rngs=nnx.Rngs(0))
    for name, array in arrays.items():
        getattr(served, name).set_value(array)
    rows = served(keys(4))
    assert rows[:4].any() and not rows[4:7].any() and int(served.hash_clock[...]) == 1


def test_policies_that_need_more_than_keys_are_refused():
    for policy, name, value in (("custom", "scores", np.arange(8)), ("epoch_lru", "epoch", 3)):
        layer = jax_tt.TableEmbed(dataclasses.replace(TABLE, policy=policy), rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=f"{policy}.*needs {name}= to insert.*with_slots"):
            layer(keys(0))
        rows = layer(jax_tt.dynamic.with_slots(keys(0), layer.insert(keys(0), **{name: value})))
        layer.eval()
        same(rows, layer(keys(0)))


def test_tables_without_a_rule_are_refused_where_keys_can_leave():
    """Their moments are in optax state, which knows nothing of slots."""
    model = Tower(dataclasses.replace(jax_tt.hash_table(ROWS, D), safe_check="ignore"))
    assert model(keys(0)).shape == (8, 1)  # only a gradient needs moments
    with pytest.raises(TypeError, match=r"policy 'lru'.*moments.*optimizers\.Adagrad"):
        jax_tt.grad(loss_of)(model, keys(0))
    located = jax_tt.dynamic.with_slots(keys(0), model.items.insert(keys(0)))
    with pytest.raises(TypeError, match=r"policy 'lru'.*moments.*optimizers\.Adagrad"):
        jax_tt.grad(loss_of)(model, located)
    model.eval()
    assert jax_tt.grad(loss_of)(model, located)["items"]["embedding"].get_value().any()
    model = Tower(jax_tt.hash_table(ROWS, D, policy="none", safe_check="error"))
    losses, state = trained(model, JITTED, [keys(0)] * 3)
    assert losses == sorted(losses, reverse=True)
    assert int((state["items"]["hash_touched"] > 0).sum()) == 7


@pytest.mark.optimized
@pytest.mark.parametrize("make, batch", [(Tower, keys), (Towers, bags)])
def test_steps_are_in_place(make, batch):
    big = 4096
    model = make()
    if make is Tower:
        model = Tower(jax_tt.hash_table(big, D, optimizer=RULE, policy="lfu"))
        layer = model.items
    else:
        tables = {
            "item": jax_tt.hash_table(big, D, optimizer=RULE),
            "country": jax_tt.dense_table(20, D, optimizer=RULE),
        }
        model.items = jax_tt.EmbedCollection(tables, FEATURES, rngs=nnx.Rngs(0))
        layer = model.items.tables["item"]
    opt = optimizer(model)
    step = nnx.jit(train, donate_argnums=(0, 1))
    step(model, opt, batch(0))
    text = step.lower(model, opt, batch(0)).compile().as_text()
    copied = re.findall(rf"= \S*\[(?:{big}|{big // 8}),\S* copy\(", text)
    assert not copied, copied
    assert "hash_tables_find" not in text  # the slots of the insertion are taken as they are
    names = ("embedding", "slot_sum_0", "hash_keys", "hash_scores", "hash_touched")
    places = {name: getattr(layer, name)[...].unsafe_buffer_pointer() for name in names}
    for k in range(3):
        step(model, opt, batch(50 * k))
    after = {name: getattr(layer, name)[...].unsafe_buffer_pointer() for name in names}
    assert after == places


def test_remat():
    def remat_loss(model, ids):
        return jnp.mean((nnx.remat(lambda model, ids: model(ids))(model, ids) - 1) ** 2)

    @nnx.jit
    def step(model, opt, ids):
        loss, grads = jax_tt.value_and_grad(remat_loss)(model, ids)
        opt.update(model, grads)
        return loss

    batches = [keys(3 * k) for k in range(4)]
    (losses, state), expected = trained(Tower(), step, batches), trained(Tower(), JITTED, batches)
    same((losses, state), expected, 1e-6)


def test_scan_over_steps():
    batches = [keys(3 * k) for k in range(4)]
    losses, expected = trained(Tower(), JITTED, batches)
    model = Tower()
    opt = optimizer(model)

    @nnx.jit(donate_argnums=0)
    def run(both, ids):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def steps(both, ids):
            return both, train(*both, ids)

        return steps(both, ids)[1]

    found = run((model, opt), jax.tree.map(lambda *x: jnp.stack(x), *batches))
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    same(nnx.to_pure_dict(nnx.state(model)), expected, 1e-6)


def step_of_layer(layer, ids):
    wrt = nnx.DiffState(0, jax_tt.FusedParam)
    nnx.update(layer, nnx.grad(lambda m: jnp.sum((m(ids) - 1) ** 2), argnums=wrt)(layer))


@functools.cache
def stepped_alone():
    """The state of a layer after three steps on one device."""
    layer = Tower().items
    step = nnx.jit(step_of_layer)
    for k in range(3):
        step(layer, keys(3 * k))
    return nnx.to_pure_dict(nnx.state(layer))


@pytest.mark.parametrize("tracked", [True, False])
def test_shard_map_over_the_batch(tracked):
    """Every device holds the table and inserts the keys of all, so that the replicas stay equal."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = Tower(axis_name="data")
    graphdef, state = nnx.split(model.items)

    def local(state, ids):
        layer = nnx.merge(graphdef, state)
        step_of_layer(layer, ids)
        return nnx.state(layer)

    step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=tracked)
    )
    for k in range(3):
        state = step(state, keys(3 * k))
    same(nnx.to_pure_dict(state), stepped_alone(), 1e-5)


def test_a_batch_that_is_sharded_over_explicit_axes():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    (losses, state), model = trained(Tower(), JITTED, [keys(0), keys(3)]), Tower()
    graphdef, arrays = nnx.split(model)
    model = nnx.merge(graphdef, jax.device_put(arrays, jax.NamedSharding(mesh, P())))
    batches = jax.device_put([keys(0), keys(3)], jax.NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        found = trained(model, JITTED, batches)
    same(found, (losses, state), 1e-5)


@pytest.mark.slow
def test_tables_over_several_devices():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    found = []
    for options in ({}, {"mesh": mesh, "axis": "model"}):
        embed = jax_tt.EmbedCollection(
            {"item": TABLE}, {"shown": FEATURES["shown"]}, **options, rngs=nnx.Rngs(0)
        )

        @nnx.jit
        def step(embed, batch):
            loss, grads = jax_tt.value_and_grad(
                lambda embed: jnp.sum((embed(batch)["shown"] - 1) ** 2)
            )(embed)
            optimizer(embed).update(embed, grads)
            return loss

        found.append([step(embed, {"shown": keys(3 * k).reshape(8, 1)}) for k in range(2)])
        assert int(embed.arrays()["item"]["hash_clock"]) == 2
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_a_table_that_the_loss_does_not_use_keeps_its_new_rows():
    model = Tower()

    @nnx.jit
    def step(model, opt, ids):
        def unused(model):
            model.items(ids)
            return jnp.sum(model.head.kernel[...] ** 2)

        opt.update(model, jax_tt.grad(unused)(model))

    step(model, optimizer(model), keys(0))
    assert float(model.items.step[...]) == 0
    rows = model.items(jax_tt.dynamic.with_slots(keys(0), model.items.insert(keys(0))))
    fresh = Tower().items
    fresh.eval()
    same(rows, fresh(keys(0)))


def test_other_terms_over_the_table_are_refused():
    model = Tower()

    def penalised(model, ids):
        return loss_of(model, ids) + jnp.sum(model.items.embedding[...] ** 2)

    with pytest.raises(ValueError, match=r"embedding of fused tables not only through one lookup"):
        jax_tt.grad(penalised)(model, keys(0))


def test_rows_that_a_next_value_would_lack_are_refused():
    """The next value is that of the call which is differentiated."""

    def first(model, ids):
        rows = jnp.sum(model.items(ids) ** 2)
        return rows + jnp.sum(jax.lax.stop_gradient(model.items(keys(30))))

    with pytest.raises(ValueError, match=r"next value would lack the rows .*with_slots"):
        jax_tt.grad(first)(Tower(), keys(0))

    def last(model, ids):
        constant = jnp.sum(jax.lax.stop_gradient(model.items(keys(30))))
        return constant + jnp.sum(model.items(ids) ** 2)

    model, fresh = Tower(), Tower()
    optimizer(model).update(model, jax_tt.grad(last)(model, keys(0)))
    model.eval()
    fresh.eval()
    same(model.items(keys(30)), fresh.items(keys(30)))
    assert int((model.items.hash_touched[...] > 0).sum()) == 14


def test_linen_next_values_would_lack_rows_of_other_calls():
    layer = jax_tt.linen.TableEmbed(TABLE)
    variables = layer.init(jax.random.key(0), keys(0))
    directory = variables.pop("hash_table")
    for total in (lambda a, b: a + jax.lax.stop_gradient(b), lambda a, b: b):

        def loss(variables, total=total):
            changed, sums = {"hash_table": directory}, []
            for ids in (keys(0), keys(30)):
                rows, changed = layer.apply({**variables, **changed}, ids, mutable=["hash_table"])
                sums.append(jnp.sum(rows))
            return total(*sums)

        with pytest.raises(ValueError, match="next value would lack the rows"):
            jax_tt.linen.value_and_grad(loss)(variables)


def test_a_jax_transformation_that_closes_over_the_layer_is_refused():
    layer = Tower().items
    with pytest.raises(TypeError, match=r"a training call sets this variable.*count and insert"):
        jax.jit(lambda ids: layer(ids))(keys(0))


def test_linen_calls_insert_where_the_collection_is_mutable():
    layer = jax_tt.linen.TableEmbed(TABLE)
    variables = layer.init(jax.random.key(0), keys(0))
    hashed, fused = "hash_table", "_overwrite_with_gradient"
    model = Tower()
    for name, value in variables[fused].items():
        getattr(model.items, name).set_value(value)
    opt = optimizer(model.items)

    @jax.jit
    def step(state, hash_table, ids):
        def loss(variables):
            rows, changed = layer.apply({**variables, hashed: hash_table}, ids, mutable=[hashed])
            return jnp.mean((rows - 1) ** 2), changed[hashed]

        (value, changed), grads = jax_tt.linen.value_and_grad(loss, has_aux=True)(state.variables)
        return state.apply_gradients(grads=grads), changed, value

    state = jax_tt.linen.TrainState.create(
        apply_fn=layer.apply, variables={fused: variables[fused]}, tx=optax.sgd(0.1)
    )
    table = variables[hashed]
    for k in range(4):
        state, table, value = step(state, table, keys(3 * k))
        assert float(value) == pytest.approx(float(JITTED(model.items, opt, keys(3 * k))))
    for name, array in {**state.fused, **table}.items():
        np.testing.assert_allclose(array, getattr(model.items, name)[...], 1e-6, err_msg=name)
    rows, changed = layer.apply(
        {fused: state.fused, hashed: table}, keys(90), mutable=[hashed, fused]
    )
    again = layer.apply({fused: changed[fused], hashed: changed[hashed]}, keys(90))
    same(rows, again)
    assert (changed[fused]["embedding"] != state.fused["embedding"]).any()


def test_linen_tables_without_a_rule_are_refused():
    layer = jax_tt.linen.TableEmbed(jax_tt.hash_table(ROWS, D, policy="none"))
    variables = layer.init(jax.random.key(0), keys(0))
    with pytest.raises(ValueError, match=r"optimizer: got None.*fused rule.*Adagrad"):
        layer.apply(variables, keys(0), mutable=["hash_table"])
    rows, changed = layer.apply(variables, keys(0), mutable=["hash_table", "params"])
    same(rows, layer.apply({**variables, **changed}, keys(0)))
