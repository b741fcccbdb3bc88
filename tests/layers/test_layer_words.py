"""Messages for what users of layers try: wrong keywords, keys instead of generators, casts, other Flax wrappers."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen

RULE = jax_tt.optimizers.Adagrad(0.1)
IDS = jnp.array([[1, 2], [3, 4]])
KEY = jax.random.key(0)
TABLE = jax_tt.dense_table(10, 4)
HASHED = jax_tt.hash_table(16, 4)
FEATURES = {"a": jax_tt.Feature("a")}
SIZES: dict[str, tuple[Any, ...]] = {
    "Embed": (10, 4),
    "EmbedBag": (10, 4),
    "TTEmbed": (10, 4),
    "TTEmbedBag": (10, 4),
    "TableEmbed": (TABLE,),
    "TableEmbedBag": (TABLE,),
    "EmbedCollection": ({"a": TABLE}, FEATURES),
}
FACTORIES = {"dense_table": (10, 4), "tt_table": (10, 4), "hash_table": (16, 4)}
# A keyword, what accepts it, and the advice.
NEAR = {
    "ranks": ("TTEmbed", "did you mean tt_ranks?"),
    "mode": ("EmbedBag", "did you mean combiner?"),
    "cache": ("Embed", "a row cache is for tensor-train tables: TTEmbed, TTEmbedBag or tt_table"),
    "cache_size": ("TTEmbedBag", "did you mean cache?"),
    "embedding_dim": ("TTEmbedBag", "did you mean features?"),
}


def refused(caller: str, keyword: str, advice: str = "") -> Any:
    message = f"{caller}: got an unexpected argument {keyword!r}; {advice}"
    return pytest.raises(TypeError, match=f"^{re.escape(message)}")


def test_wrong_keywords_name_the_class() -> None:
    for name, sizes in SIZES.items():
        with refused(name, "quux", "expected some of "):
            getattr(jax_tt, name)(*sizes, quux=1, rngs=nnx.Rngs(0))
        if hasattr(jax_tt.linen, name):
            with refused(name, "quux", "expected some of "):
                getattr(jax_tt.linen, name)(*sizes, quux=1)


def test_subclasses_of_users_have_their_name() -> None:
    class Items(jax_tt.EmbedBag):
        def __init__(self, num_embeddings: int, *, rngs: nnx.Rngs, **options: Any) -> None:
            super().__init__(num_embeddings, 4, rngs=rngs, **options)

    assert Items(10, combiner="mean", rngs=nnx.Rngs(0)).combiner == "mean"
    with refused("Items", "combine", "did you mean combiner?"):
        Items(10, combine="mean", rngs=nnx.Rngs(0))


def test_wrong_keywords_name_the_nearest() -> None:
    for keyword, (name, advice) in NEAR.items():
        with refused(name, keyword, advice):
            getattr(jax_tt, name)(*SIZES[name], **{keyword: 4}, rngs=nnx.Rngs(0))


def test_wrong_keywords_of_factories() -> None:
    for name, sizes in FACTORIES.items():
        with refused(name, "quux", "expected some of "):
            getattr(jax_tt, name)(*sizes, quux=1)
        with refused(name, "optimiser", "did you mean optimizer?"):
            getattr(jax_tt, name)(*sizes, optimiser=RULE)


def test_a_key_in_place_of_generators() -> None:
    for name, sizes in SIZES.items():
        with pytest.raises(
            TypeError, match=r"^rngs: got a PRNGKeyArray; expected flax.nnx.Rngs, e.g. rngs=nnx"
        ):
            getattr(jax_tt, name)(*sizes, rngs=KEY)
    layer = jax_tt.TTEmbed(10, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"^rngs: got a PRNGKeyArray"):
        layer.grow(20, rngs=KEY)  # pyright: ignore[reportArgumentType]


def test_ranks_that_make_a_table_larger() -> None:
    message = r"^tt_ranks: cores of ranks \(172, 176\) have 6,478,224 entries, and the dense table has 6,400,000"
    with pytest.raises(ValueError, match=message):
        jax_tt.TTEmbed(100_000, 64, tt_ranks=10**6, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        jax_tt.tt_table(100_000, 64, tt_ranks=10**6)
    # The default ranks of a small table are as many as its factors have use for.
    assert jax_tt.TTEmbed(10, 4, rngs=nnx.Rngs(0)).tt_shape.num_params > 40
    assert jax_tt.tt_table(100_000, 64, tt_ranks=64).num_embeddings == 100_000


def test_a_cast_of_a_fused_layer() -> None:
    layer = jax_tt.Embed(10, 4, optimizer=RULE, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state)
    message = "slot_sum_0: got bfloat16 .* Leave fused tables out of casts of a model: param_dtype="
    with pytest.raises(ValueError, match=message):
        nnx.merge(graph, state)(IDS)


def test_the_state_of_a_collection_in_place_of_a_table() -> None:
    collection = jax_tt.Collection(
        {"item": HASHED, "a": TABLE}, {"i": jax_tt.Feature("item"), **FEATURES}
    )
    state = collection.init(KEY)
    table: Any = collection.tables["item"]
    advice = r"e.g. collection.tables\['item'\] with state\['item'\]"
    for function in (jax_tt.dynamic.keys_of, jax_tt.dynamic.statistics):
        with pytest.raises(
            TypeError, match=f"table: got a Collection; expected a HashTable, {advice}"
        ):
            function(collection, state)  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            ValueError,
            match=r"state: got the arrays of several tables, item, a; .* state\['item'\]",
        ):
            function(table, state)
    assert jax_tt.dynamic.statistics(table, state["item"])["keys"] == 0


def test_a_layer_with_a_cache_that_a_scan_closes_over() -> None:
    cache = jax_tt.RowCache(4, ways=2)
    layer = jax_tt.TTEmbed(100, 4, tt_ranks=2, cache=cache, rngs=nnx.Rngs(0))

    def rows() -> jax.Array:
        return jax.lax.scan(lambda carry, ids: (carry, layer(ids)), 0, IDS)[1]

    with pytest.raises(
        TypeError, match=r"cache_\w+: a training call sets this variable, .* nnx.scan, or"
    ):
        rows()
    layer.eval()
    np.testing.assert_allclose(rows(), layer(IDS), rtol=1e-6)


def test_a_bridged_linen_layer_is_trained() -> None:
    """`ToNNX` of a fused layer trains as the NNX layer does."""
    layer = jax_tt.Embed(10, 4, optimizer=RULE, rngs=nnx.Rngs(0))
    bridged: Any = nnx.bridge.ToNNX(
        jax_tt.linen.TableEmbed(jax_tt.dense_table(10, 4, optimizer=RULE)), rngs=nnx.Rngs(0)
    ).lazy_init(IDS)
    for name, array in layer.state().items():
        assert isinstance(getattr(bridged, name), jax_tt.FusedParam)
        getattr(bridged, name).set_value(jnp.array(array))
    grad = getattr(jax_tt, "grad", nnx.grad)
    for model in (layer, bridged):
        optimizer = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
        for _ in range(2):
            optimizer.update(model, grad(lambda model: jnp.sum(model(IDS) ** 2))(model))
    for name, array in layer.state().items():
        np.testing.assert_array_equal(getattr(bridged, name)[...], array)
    assert float(bridged.step[...]) == 2


def test_sizes_of_a_hash_table_in_the_old_order() -> None:
    message = r"capacity 4 and 16 features, .* hash_table\(capacity=4, features=16\)"
    with pytest.raises(ValueError, match=message):
        jax_tt.hash_table(4, 16, ways=4)
    assert jax_tt.hash_table(capacity=4, features=16, ways=4).num_embeddings == 4


def test_methods_for_keys_name_the_layer_and_its_table() -> None:
    calls = {"insert": ([1],), "remove": ([1],), "grow_if_full": ()}
    for name, args in calls.items():
        for layer, table in (
            (jax_tt.EmbedBag(10, 4, rngs=nnx.Rngs(0)), r"EmbedBag\(10, 4\)"),
            (jax_tt.TableEmbed(jax_tt.dense_table(10, 4, name="item"), rngs=nnx.Rngs(0)), "item"),
        ):
            message = rf"{type(layer).__name__}\.{name}: {table}: table: got a DenseTable; expected a Hash"
            with pytest.raises(TypeError, match=message):
                getattr(layer, name)(*args)


def test_keys_in_place_of_a_state() -> None:
    state, keys = HASHED.init(KEY), np.array([1, 2])
    for call in (jax_tt.dynamic.insert, jax_tt.dynamic.remove):
        with pytest.raises(TypeError, match="state: got an ndarray; expected arrays by name"):
            call(HASHED, keys, state)  # pyright: ignore[reportArgumentType]
