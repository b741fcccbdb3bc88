"""`EmbedCollection` for NNX and linen: fused and optax tables learn together; single layers read its checkpoints."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

import jax_tt
import jax_tt.linen
from jax_tt import Bags, Feature, KeyedBags, Lookup, optimizers
from jax_tt._kinds.cached.table import cache_directory_of

RULE = optimizers.RowWiseAdagrad(0.1)
CACHE = jax_tt.RowCache(8, ways=4, refresh_every=2)
TABLES = {
    "items": jax_tt.dense_table(50, 6, optimizer=RULE),  # also the name of a method of dicts
    "words": jax_tt.tt_table(60, 8, tt_ranks=3),
    "users": jax_tt.tt_table(60, 8, tt_ranks=3, optimizer=optimizers.Adagrad(0.1), cache=CACHE),
}
FEATURES = {
    "clicked": Feature("items", combiner="mean"),
    "largest": Feature("items", combiner="max"),
    "title": Feature("words"),
    "user": Feature("users", combiner=None),
}
BATCH = {
    "clicked": Bags.from_ragged([[1, 2], [60]], capacity=4),  # an id out of range
    "largest": np.array([[1, 2, 3], [3, 4, 4]], np.int32),
    "title": np.array([[1, 2], [3, 9]], np.int32),
    "user": np.array([7, 9], np.int32),
}


class Model(nnx.Module):
    def __init__(self) -> None:
        self.rate = nnx.Variable(jnp.float32(0.1))
        rule = optimizers.RowWiseAdagrad(self.rate)
        tables = {**TABLES, "items": jax_tt.dense_table(50, 6, optimizer=rule)}
        self.embed = jax_tt.EmbedCollection(tables, FEATURES, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(28, 1, rngs=nnx.Rngs(1))

    def __call__(self, batch: Any) -> jax.Array:
        return self.head(self.embed.concatenated(batch))


@nnx.jit
def step(model: Any, opt: Any, batch: Any) -> jax.Array:
    loss, grads = jax_tt.value_and_grad(lambda m: jnp.mean((m(batch) - 1) ** 2))(model)
    opt.update(model, grads)
    return loss


look_up = nnx.jit(lambda embed, batch: embed(batch))


@pytest.fixture(scope="module")
def trained() -> Any:
    """A model after four steps, and its losses."""
    model = Model()
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.05))
    losses = [float(step(model, opt, BATCH)) for _ in range(4)]
    return model, opt, losses


def test_nnx_trains_all_tables(trained):
    model, _, losses = trained
    assert losses[3] < losses[0] / 4
    tables = model.embed.tables
    assert model.embed.collection.sharing == ("items",)
    assert (float(model.embed.steps["items"][...]), float(tables["users"].step[...])) == (4, 4)
    assert int(tables["items"].out_of_range[...]) == 4
    statistics = tables["users"].cache_statistics()
    assert (statistics["calls"], statistics["refreshes"]) == (4, 2)
    assert model.embed.collection.tables["words"].name == "words"


def test_a_rate_that_changes_between_steps(trained):
    model, opt, _ = nnx.clone(trained)
    model.rate[...] = 0.0
    before = np.array(model.embed.tables["items"].embedding[...])
    step(model, opt, BATCH)
    np.testing.assert_array_equal(model.embed.tables["items"].embedding[...], before)
    assert "learning_rate" in model.embed.tables["items"].hyperparameters


def test_single_layers_read_the_tables(trained):
    """And a collection reads those of single layers."""
    model, _, _ = trained
    rows = look_up(model.embed, BATCH)
    layer = jax_tt.TTEmbedBag(60, 8, tt_ranks=3, rngs=nnx.Rngs(5))
    nnx.update(layer, nnx.state(model.embed)["tables"]["words"])
    np.testing.assert_array_equal(layer(BATCH["title"]), rows["title"])
    cached = jax_tt.TTEmbed(
        60, 8, tt_ranks=3, optimizer=optimizers.Adagrad(0.1), cache=CACHE, rngs=nnx.Rngs(5)
    )
    nnx.update(cached, nnx.state(model.embed.tables["users"]))
    np.testing.assert_array_equal(cached(BATCH["user"]), rows["user"])
    other = jax_tt.EmbedCollection(TABLES, FEATURES, rngs=nnx.Rngs(6))
    nnx.update(other.tables["users"], nnx.state(cached))
    np.testing.assert_array_equal(look_up(other, BATCH)["user"], rows["user"])


def test_states_of_all_tables(trained):
    """As single layers have them; read by another collection."""
    model, _, _ = trained
    states = model.embed.states()
    layer = jax_tt.TableEmbedBag(model.embed.collection.separated_tables["items"], rngs=nnx.Rngs(5))
    assert sorted(layer.state()) == sorted(states["items"])
    assert float(states["items"]["step"]) == 4
    other = jax_tt.EmbedCollection(TABLES, FEATURES, rngs=nnx.Rngs(6))
    short = {**states, "items": {**states["items"], "embedding": jnp.zeros((3, 8))}}
    with pytest.raises(ValueError, match="items: embedding: got float32 of shape"):
        other.set_states(short)
    counts = {**states, "users": {**states["users"], "cache_tags": jnp.zeros(3)}}
    with pytest.raises(ValueError, match=r"users: cache_tags: got float32 of shape \(3,\)"):
        other.set_states(counts)
    assert int(other.steps["items"][...]) == 0
    other.set_states(states)
    assert int(other.steps["items"][...]) == 4
    jax.tree.map(np.testing.assert_array_equal, look_up(other, BATCH), look_up(model.embed, BATCH))


ADAM = optimizers.Adam(0.1)
NAMES = ("t", "b", "m")


def layer_of(names: Any, seed: int) -> Any:
    """A layer whose tables and features come in this order."""
    tables = {name: jax_tt.dense_table(5, 4, optimizer=ADAM) for name in names}
    features = {name: jax_tt.Feature(name) for name in names}
    return jax_tt.EmbedCollection(tables, features, statistics=True, rngs=nnx.Rngs(seed))


@functools.partial(nnx.jit, static_argnums=2)
def step_of(embed: Any, opt: Any, used: tuple[str, ...]) -> None:
    batch = {name: jnp.array([[1] * (k + 1)]) for k, name in enumerate(NAMES)}

    def loss(embed: Any) -> jax.Array:
        rows = embed(batch)
        return sum((jnp.sum(rows[name]) for name in used), jnp.zeros(()))

    opt.update(embed, jax_tt.grad(loss)(embed))


def pure(embed: Any) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(embed)))


def test_tables_in_another_order_restore_their_counts(tmp_path):
    """Steps and statistics are by name in what generic code saves, and the next step of Adam is the same."""
    first, restored, given = layer_of(NAMES, 0), layer_of(NAMES[::-1], 1), layer_of(NAMES[::-1], 1)
    opt = jax_tt.FusedOptimizer(first, optax.sgd(0.1))
    step_of(first, opt, ("t",))
    step_of(first, opt, ("t", "m"))
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(tmp_path / "saved", pure(first))
    saved = checkpointer.restore(tmp_path / "saved", item=pure(restored))
    state = nnx.state(restored)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(restored, state)
    requests = {name: own.requests for name, own in restored.statistics().items()}
    assert requests == {"t": 2, "b": 4, "m": 6}
    given.set_states(first.states())
    step_of(first, opt, NAMES)
    for other in (restored, given):
        steps = {name: float(own["step"]) for name, own in other.states().items()}
        assert steps == {"t": 2, "b": 0, "m": 1}
        step_of(other, jax_tt.FusedOptimizer(other, optax.sgd(0.1)), NAMES)
        jax.tree.map(np.testing.assert_array_equal, other.states(), first.states())


def test_a_checkpoint_of_other_tables_is_refused_by_name():
    """Also where the shapes of all arrays are the same."""
    first, other = layer_of(NAMES, 0), layer_of(("t", "b", "extra"), 0)
    with pytest.raises(ValueError, match="extra"):
        serialization.from_state_dict(pure(other), pure(first))
    with pytest.raises(ValueError, match="states: got no table 'extra'"):
        other.set_states(first.states())


def test_linen_tables_in_another_order_restore_their_counts():
    steps = dict(zip(NAMES, (3.0, 0.0, 5.0), strict=True))
    made = {}
    for names in (NAMES, NAMES[::-1]):
        tables = {name: jax_tt.dense_table(5, 4, optimizer=ADAM) for name in names}
        features = {name: jax_tt.Feature(name) for name in names}
        module = jax_tt.linen.EmbedCollection(tables, features)
        batch = {name: np.array([[1, 2]], np.int32) for name in names}
        variables = module.init(jax.random.key(0), batch)
        _, counts = module.apply(variables, batch, mutable=["statistics"])
        made[names] = {**variables, **counts}
    fused = made[NAMES][OVERWRITTEN]
    assert sorted(fused["t"]) == ["embedding", "slot_mu_0", "slot_nu_0"]
    in_order = jnp.array([steps[name] for name in sorted(NAMES)])
    saved = {**made[NAMES], OVERWRITTEN: {**fused, "step": in_order}}
    found = serialization.from_bytes(made[NAMES[::-1]], serialization.to_bytes(saved))
    for variables in (saved, found):
        # Where a table alone has them.
        tables = jax_tt.checkpoint.save_args(module, variables)[OVERWRITTEN]
        assert {name: float(tables[name]["step"]) for name in NAMES} == steps
    assert set(found["statistics"]["totals"]) == set(NAMES)


def test_a_table_is_called_on_its_own_outside_of_losses(trained):
    table = nnx.clone(trained[0].embed.tables["items"])
    assert trained[0].embed.tables["words"].attend(jnp.ones((3, 8))).shape == (3, 60)
    rows = table(jnp.array([0, 49]))
    np.testing.assert_array_equal(rows, table.embedding[...][jnp.array([0, 49])])
    with pytest.raises(TypeError, match="items: this table of a collection was called on its own"):
        jax_tt.grad(lambda table: jnp.sum(table(jnp.array([1]))))(table)


def test_keyed_bags_and_layouts(trained):
    embed = nnx.clone(trained[0].embed)
    embed.eval()
    before = pure(embed)
    batch = {**BATCH, "user": BATCH["user"][:, None]}
    rows = look_up(embed, KeyedBags.from_bags(batch, capacity=16))
    for name, want in look_up(embed, BATCH).items():
        np.testing.assert_array_equal(rows[name][:2], want)
    jax.tree.map(np.testing.assert_array_equal, pure(embed), before)  # evaluation counts nothing
    with pytest.raises(ValueError, match="got 8 columns of feature 'title' of 'words'"):
        embed.stacked(BATCH)


def test_changes_of_a_table_between_steps(trained):
    """A table that grew is described anew, and the caches of a model are refreshed."""
    model, opt, _ = nnx.clone(trained)
    rows = look_up(model.embed, BATCH)
    model.embed.tables["words"].grow(90, rngs=nnx.Rngs(2), opt=opt, model=model)
    assert model.embed.collection.tables["words"].num_embeddings == 90
    after = look_up(model.embed, {**BATCH, "title": np.array([[1, 2], [3, 89]], np.int32)})
    np.testing.assert_allclose(after["title"][0], rows["title"][0], rtol=1e-6)
    model.embed.tables["users"].populate()
    assert model.embed.tables["users"].cache_statistics()["refreshes"] == 3
    items = look_up(model.embed, BATCH)["clicked"]
    model.embed.tables["items"].grow(90, rngs=nnx.Rngs(2), opt=opt, model=model)
    assert model.embed.collection.tables["items"].num_embeddings == 90
    # The other id was out of range before.
    np.testing.assert_array_equal(look_up(model.embed, BATCH)["clicked"][0], items[0])


def test_options_of_one_table(trained):
    embed = nnx.clone(trained[0].embed)
    embed.tables["items"].bounds = "clip"
    rows = look_up(embed, BATCH)
    want = embed.tables["items"].embedding[...][49]
    np.testing.assert_array_equal(rows["clicked"][1], want)


def test_nnx_arguments():
    with pytest.raises(ValueError, match="lookup: got combiner='mean'"):
        jax_tt.EmbedCollection(TABLES, FEATURES, Lookup("mean"), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"tables\['items'\]: got 3; expected a jax_tt.Table"):
        jax_tt.EmbedCollection({**TABLES, "items": 3}, FEATURES, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="tables: got None; expected a mapping"):
        jax_tt.EmbedCollection(None, FEATURES, rngs=nnx.Rngs(0))


# --- Linen


class Linen(nn.Module):
    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        embed = jax_tt.linen.EmbedCollection(TABLES, FEATURES, name="embed")
        return nn.Dense(1, name="head")(embed.concatenated(batch))


OVERWRITTEN = "_overwrite_with_gradient"
COUNTS = ("row_cache", "out_of_range")


@functools.cache
def linen_variables() -> Any:
    return jax.jit(Linen().init)(jax.random.key(0), BATCH)


@jax.jit
def linen_step(state: Any, counts: Any) -> Any:
    def loss(params: Any) -> Any:
        out, changed = Linen().apply({**params, **counts}, BATCH, mutable=list(COUNTS))
        return jnp.mean((out - 1) ** 2), changed

    (value, counts), grads = jax_tt.linen.value_and_grad(loss, has_aux=True)(state.variables)
    return state.apply_gradients(grads=grads), counts, value


def test_linen_trains_all_tables():
    variables = dict(linen_variables())
    counts = {"row_cache": variables.pop("row_cache")}
    state = jax_tt.linen.TrainState.create(
        apply_fn=Linen().apply, variables=variables, tx=optax.sgd(0.05)
    )
    losses = []
    for _ in range(4):
        state, counts, loss = linen_step(state, counts)
        losses.append(float(loss))
    assert losses[3] < losses[0] / 2
    assert state.fused["embed"]["step"].tolist() == [4]
    assert int(counts["out_of_range"]["embed"]["items"]["count"]) == 4
    refreshed = jax_tt.linen.refresh_caches(Linen(), {**state.variables, **counts}, BATCH)
    directory = cache_directory_of(refreshed["row_cache"]["embed"]["users"])
    assert directory.statistics()["refreshes"] == 1


def test_a_linen_collection_is_a_static_argument():
    made = (jax_tt.linen.EmbedCollection(dict(TABLES), dict(FEATURES)) for _ in range(2))
    one, other = made
    assert one == other and hash(one) == hash(other)
    shapes = jax.jit(lambda embed: embed.tables["items"].num_embeddings, static_argnums=0)
    assert shapes(one) == TABLES["items"].num_embeddings


def test_linen_and_nnx_agree(trained):
    """With the same arrays, rows are equal bit for bit; and a single linen layer reads a table."""
    embed = trained[0].embed
    arrays = {name: dict(module.state()) for name, module in embed.tables.items()}
    fused = {name: arrays[name] for name in ("items", "users")}
    buffers = {n: fused["users"].pop(n) for n in embed.tables["users"].table.spec.buffers}
    shared = {name: getattr(embed, name)[...] for name in ("step", "sentinel", "used")}
    variables = {
        "params": {"words": arrays["words"]},
        OVERWRITTEN: fused | shared,
        "row_cache": {"users": buffers},
    }
    module = jax_tt.linen.EmbedCollection(TABLES, FEATURES)
    rows = jax.jit(module.apply)(variables, BATCH)
    jax.tree.map(np.testing.assert_array_equal, rows, dict(look_up(embed, BATCH)))
    layer = jax_tt.linen.TableEmbed(jax_tt.tt_table(60, 8, tt_ranks=3), combiner="sum")
    own = {"params": arrays["words"]}
    np.testing.assert_array_equal(layer.apply(own, BATCH["title"]), rows["title"])
    scores = module.apply(variables, "words", jnp.ones((3, 8)), method="attend")
    assert scores.shape == (3, 60)
    with pytest.raises(ValueError, match="table: got 'word'; expected one of items, words, users"):
        module.apply(variables, "word", jnp.ones((3, 8)), method="attend")


def test_a_reordered_table_is_listed_without_its_order():
    for optimizer in (None, jax_tt.optimizers.SGD(0.1)):
        table = jax_tt.tt_table(60, 8, tt_ranks=2, optimizer=optimizer)
        embed = jax_tt.EmbedCollection({"a": table}, {"a": jax_tt.Feature("a")}, rngs=nnx.Rngs(0))
        embed.tables["a"].reorder(jax_tt.order.IdOrder(np.arange(60)[::-1].copy()))
        assert str(embed.collection) == str(embed)
        assert ("(shared)" in str(embed)) == (optimizer is not None)
        assert embed.collection.nbytes == embed.nbytes == table.nbytes + 2 * 60
