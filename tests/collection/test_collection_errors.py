"""What is wrong with a collection or with its batch is said with the names of the feature and of the table."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
from jax_tt import Bags, Collection, Feature, KeyedBags, Lookup, optimizers
from jax_tt._base import reports
from jax_tt.extension import StepInputs
from tests.conftest import native_available

DENSE = jax_tt.dense_table(10, 4, optimizer=optimizers.SGD(0.1))
TRAIN = jax_tt.tt_table(20, 6, tt_ranks=2)
COLLECTION = Collection(
    {"user": DENSE, "item": TRAIN},
    {
        "user_id": Feature("user"),
        "clicked": Feature("item", combiner="mean"),
        "shown": Feature("item", combiner=None),
    },
)
IDS = np.array([[1, 2], [3, 4]])
BATCH = {"user_id": IDS, "clicked": IDS, "shown": IDS}


@pytest.fixture(scope="module")
def state():
    return jax.jit(COLLECTION.init)(jax.random.key(0))


def look_up(state, batch=BATCH, lookup=None, **options):
    lookup = Lookup(method="reference") if lookup is None else lookup
    return jax_tt.lookup_features(COLLECTION, state, batch, lookup, **options)


LAYER = {"t": (10, 4)}  # the arguments of a layer
DESCRIPTIONS = (
    ({}, {"a": Feature("t")}, TypeError, "tables: got {}; expected a mapping"),
    ({"t": jax_tt.tables.DenseTable}, {}, TypeError, r"\['t'\]: got .*expected a jax_tt.Table"),
    (LAYER, {}, TypeError, r"e\.g\. jax_tt\.dense_table\(1000, 16\)"),
    ({1: DENSE}, {}, TypeError, "tables: got the name 1; expected strings"),
    ({"t": DENSE}, {}, TypeError, "features: got {}; expected a mapping"),
    ({"t": DENSE}, {"a": "t"}, TypeError, r"features\['a'\]: got 't'.*Feature\(\"item\"\)"),
    ({"t": DENSE}, {"a": Feature("u")}, ValueError, r"\['a'\]: got the table 'u'.*'t'"),
    ({"t": DENSE, "u": TRAIN}, {"a": Feature("t")}, ValueError, "no feature uses 'u'; add one"),
)


def test_descriptions():
    for tables, features, error, message in DESCRIPTIONS:
        with pytest.raises(error, match=message):
            pytest.fail(f"{Collection(tables, features)} is taken")


def test_features():
    with pytest.raises(ValueError, match=r"combiner: got 'avg'.*or None for a sequence"):
        Feature("item", combiner="avg")
    with pytest.raises(TypeError, match=r"table: got DenseTable.*the name of a table"):
        Feature(DENSE)  # pyright: ignore[reportArgumentType]
    rate = jnp.float32(0.1)
    rule = optimizers.SGD(rate)
    with pytest.raises(TypeError, match=r"tables\['t'\]: optimizer: SGD holds an array"):
        Collection({"t": jax_tt.dense_table(10, 4, optimizer=rule)}, {"t": Feature("t")})


def test_a_description_is_hashable_and_compares_by_value():
    again = Collection(dict(COLLECTION.tables), dict(COLLECTION.features))
    assert again == COLLECTION and hash(again) == hash(COLLECTION)
    features = dict(reversed(list(COLLECTION.features.items())))
    assert Collection(COLLECTION.tables, features) != COLLECTION  # another order of columns
    assert "user_id" in repr(COLLECTION)


def test_a_pickled_description_has_no_hash_of_its_process():
    collection = Collection({"a": jax_tt.tt_table(10, 4, tt_ranks=2)}, {"a": Feature("a")})
    hash(collection)
    again = pickle.loads(pickle.dumps(collection))
    assert again == collection and "_hash" not in vars(again.tables)


def test_names_that_do_not_exist():
    table = jax_tt.dense_table(10, 4)
    given = {"item": table, "user": table}, {"item": Feature("item"), "user": Feature("user")}
    described = Collection(*given)
    layer = jax_tt.EmbedCollection(*given, rngs=nnx.Rngs(0))
    assert nnx.clone(layer).tables.keys() == {"item", "user"}
    found: Any
    for kind, found in (
        ("table", described.tables),
        ("feature", described.features),
        ("table", layer.tables),
    ):
        with pytest.raises(
            KeyError, match=f"{kind}: got 'itme'; .* item, user. Did you mean item?"
        ) as caught:
            found["itme"]
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert caught.value.args[1:] == ("itme", ("item", "user"))  # names, and no tables
        assert "itme" not in found


SPLIT = TRAIN.shape.split_ids(IDS)
CLICKED, SHOWN = "feature 'clicked' of 'item': bags", "feature 'shown' of 'item': bags"
BATCHES: tuple[tuple[Any, type[Exception], str], ...] = (
    (IDS, TypeError, "batch: got an ndarray; expected KeyedBags, or a dict to ids"),
    ({**BATCH, "label": IDS}, ValueError, "batch: got the feature 'label', which .*{name: batch"),
    ({"user_id": IDS, "shown": IDS}, ValueError, r"no feature 'clicked' \(of the table 'item'\)"),
    (KeyedBags.from_bags({"user_id": IDS, "shown": IDS}), ValueError, "no feature 'clicked'"),
    ({**BATCH, "clicked": IDS[0]}, ValueError, CLICKED + r": got int32 of shape \(2,\)"),
    ({**BATCH, "clicked": IDS * 1.0}, ValueError, CLICKED + ": got dtype float"),
    (
        {**BATCH, "user_id": Bags(np.arange(3), np.zeros(0, np.int32))},
        ValueError,
        r"feature 'user_id' of 'user': bags.offsets: got .*shape \(0,\); expected \[B \+ 1\]",
    ),
    (
        {**BATCH, "clicked": Bags(IDS, weights=jnp.ones(3))},
        ValueError,
        CLICKED + r".weights: got .*shape \(3,\)",
    ),
    (
        {**BATCH, "shown": Bags(IDS, weights=jnp.ones((2, 2)))},
        ValueError,
        SHOWN + ".weights: got weights for a sequence",
    ),
    (
        {**BATCH, "user_id": Bags(SPLIT)},
        ValueError,
        "feature 'user_id' of 'user': bags.ids: got SplitIds; a dense table",
    ),
    (
        {**BATCH, "shown": SPLIT},
        ValueError,
        "table item .*: feature 'shown' has SplitIds and feature 'clicked' integers",
    ),
    (
        {**BATCH, "shown": IDS.astype(np.uint32)},
        ValueError,
        "table item .*: ids of types clicked int32, shown uint32",
    ),
)


def test_batches(state):
    for batch, error, message in BATCHES:
        with pytest.raises(error, match=message):
            pytest.fail(f"gives {look_up(state, batch)}, and not {message}")


def keyed(ids=(1, 2, 3), offsets=(0, 1, 2, 3), weights=None, keys=tuple(BATCH), sizes=(1, 1, 1)):
    return KeyedBags(np.array(ids), np.array(offsets), weights, keys, sizes)


KEYED = (
    ({"keys": (), "sizes": ()}, r"keys: got \(\); expected names of features"),
    ({"keys": ("user_id", "user_id", "shown")}, "keys: got 'user_id' more than once"),
    ({"sizes": (1, 2)}, r"batch_sizes: got 2 for 3 features \(user_id, clicked, shown\)"),
    ({"sizes": (1, -1, 3)}, "batch_sizes: got -1 for feature 'clicked'"),
    ({"sizes": (1, 1, 2)}, r"offsets: got .*shape \(4,\); .*expected \(5,\) for .* 4 bags"),
    ({"ids": [[1, 2, 3]]}, r"ids: got .*shape \(1, 3\); expected \[capacity\]"),
    ({"weights": np.ones(2)}, r"weights: got .*shape \(2,\); expected one weight per id, \(3,\)"),
)


def test_keyed_bags_that_do_not_fit_together(state):
    for arguments, message in KEYED:
        with pytest.raises(ValueError, match=message):
            pytest.fail(f"{arguments} gives {look_up(state, keyed(**arguments))}")


def test_lists_in_keyed_bags(state):
    """Lists of static fields become tuples; those of arrays are taken as `Bags` take them."""
    assert keyed(keys=list(BATCH), sizes=[1, 1, 1]) == keyed()
    lists = KeyedBags([1, 2, 3], [0, 1, 2, 3], None, tuple(BATCH), (1, 1, 1))
    jax.tree.map(np.testing.assert_array_equal, look_up(state, lists), look_up(state, keyed()))
    with pytest.raises(TypeError, match="ids: got a str"):
        look_up(state, KeyedBags("abc", [0, 1, 2, 3], None, tuple(BATCH), (1, 1, 1)))
    with pytest.raises(ValueError, match="unweighted: got the feature 'label'; expected some of"):
        KeyedBags(np.arange(3), np.arange(4), np.ones(3), tuple(BATCH), (1, 1, 1), ("label",))


def test_split_ids_of_all_features_of_a_table(state):
    split = TRAIN.shape.split_ids(IDS)
    rows, _ = look_up(state, {**BATCH, "clicked": Bags(split), "shown": split})
    want, _ = look_up(state)
    jax.tree.map(np.testing.assert_array_equal, rows, want)


def test_layouts(state):
    for batch, layout, message in (
        (BATCH, "wide", "layout: got 'wide'; expected one of 'features'"),
        (BATCH, "concatenated", "got feature 'shown' of 'item', a sequence"),
        (
            {**BATCH, "shown": IDS[0, :1]},
            "concatenated",
            "got 1 samples of feature 'shown' of 'item' and 2 of 'user_id'",
        ),
        (
            {**BATCH, "shown": IDS[0]},
            "stacked",
            "got 6 columns of feature 'clicked' of 'item' and 4 of 'user_id'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            look_up(state, batch, layout=layout)


def test_states_and_options(state):
    with pytest.raises(ValueError, match=r"state: got no table 'item'; .* 'user', 'item'"):
        look_up({"user": state["user"]})
    short = {**state["user"], "embedding": state["user"]["embedding"][:5]}
    with pytest.raises(ValueError, match=r"user: embedding: got float32 of shape \(5, 4\)"):
        look_up({**state, "user": short})
    with pytest.raises(TypeError, match=r"inputs: got .*; expected a StepInputs"):
        look_up(state, inputs={"hyperparameters": {}})
    with pytest.raises(ValueError, match="lookup: got combiner='mean'; every feature has its own"):
        look_up(state, lookup=Lookup("mean"))
    for given, error, message in (
        ({"learning_rate": 0.1}, TypeError, "hyperparameters: got .*from tables to mappings"),
        ({"ad": {}}, ValueError, "hyperparameters: got the table 'ad'; .* 'user', 'item'"),
        ({"item": {"learning_rate": 1.0}}, ValueError, r"hyperparameters\['item'\]: .* optax"),
    ):
        with pytest.raises(error, match=message):
            look_up(state, inputs=StepInputs(hyperparameters=given))
    with pytest.raises(
        ValueError, match="arrays: got the table 'ad'; expected some of 'item', 'updates', 'user'"
    ):
        COLLECTION.replaced(state, {"ad": {}})
    with pytest.raises(ValueError, match="gradients: got no table 'user'"):
        COLLECTION.overwritten(state, {"item": state["item"]})
    summed = jax.tree.map(lambda array: 2 * array, state)
    with pytest.raises(
        ValueError, match=r"the fused tables are not next values: the sentinel is 2\.0"
    ):
        COLLECTION.overwritten(state, summed)
    alone = Collection({"item": TRAIN}, {"clicked": Feature("item")})
    with pytest.raises(ValueError, match=r"grad_scale: .* a collection without optimizers"):
        jax_tt.lookup_features(alone, state, {"clicked": IDS}, inputs=StepInputs(2.0))


HAS_NO_USER = "state: got no table 'user'"
# What is done with a state, the error, and its message.
STATES: tuple[tuple[Any, type[Exception], str], ...] = (
    (
        lambda state: jax_tt.lookup_features(dict(COLLECTION.tables), state, BATCH),
        TypeError,
        r"collection: got a dict; .* jax_tt\.Collection\(tables, features\)",
    ),
    (
        lambda state: look_up(None),
        TypeError,
        "state: got None; expected a mapping from tables to arrays by name, as Collection.init",
    ),
    (
        lambda state: look_up({**state, "user": None}),
        TypeError,
        r"state\['user'\]: got None; expected the arrays of the table by name",
    ),
    (
        lambda state: COLLECTION.trained({}),
        ValueError,
        HAS_NO_USER + "; expected what Collection.init returns, .* 'user', 'item'",
    ),
    (lambda state: COLLECTION.trained(None), TypeError, "state: got None"),
    (
        lambda state: COLLECTION.trained({**state, "item": {}}),
        ValueError,
        "item: state: has no core_0, core_1",
    ),
    (lambda state: COLLECTION.replaced(None, {}), TypeError, "state: got None"),
    (lambda state: COLLECTION.replaced(state, None), TypeError, "arrays: got None"),
    (
        lambda state: COLLECTION.replaced(state, {"user": 1.0}),
        TypeError,
        r"arrays\['user'\]: got a float",
    ),
    (
        lambda state: COLLECTION.replaced(state, {"user": {"embeding": 1.0}}),
        ValueError,
        r"arrays\['user'\]: got the array 'embeding', .* does not have; expected 'embedding'",
    ),
    (lambda state: COLLECTION.overwritten({}, state), ValueError, HAS_NO_USER),
    (lambda state: COLLECTION.overwritten(state, None), TypeError, "gradients: got None"),
    (
        lambda state: COLLECTION.overwritten(state, {"user": {**state["user"], "slot_mu_0": 1.0}}),
        ValueError,
        r"gradients\['user'\]: got the array 'slot_mu_0'",
    ),
    (
        lambda state: COLLECTION.overwritten(state, {"user": {}}),
        ValueError,
        r"gradients\['user'\]: got no 'embedding'; .* Collection.trained returns",
    ),
    (lambda state: COLLECTION.maintain({}), ValueError, HAS_NO_USER),
)


def test_arrays_by_table_and_name(state):
    for call, error, message in STATES:
        with pytest.raises(error, match=message):
            pytest.fail(f"gives {call(state)}, and not {message}")


def test_a_state_without_the_trained_arrays_gets_them_back(state):
    trained = COLLECTION.trained(state)
    others = {
        name: {array: value for array, value in own.items() if array not in trained[name]}
        for name, own in state.items()
    }
    again = COLLECTION.replaced(others, trained)
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.skipif(not native_available(), reason="the reference reads NaN")
def test_ids_out_of_range_are_reported_with_the_features(state):
    bad = {**BATCH, "shown": np.array([[1, 20], [3, 4]])}
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"item \(features clicked, shown\)"):
        jax.block_until_ready(look_up(state, bad, Lookup(bounds="error", method="native")))


def test_ids_out_of_range_are_warned_of_with_the_features(state):
    reports.forget()
    bad = {**BATCH, "user_id": np.array([[1, 12], [3, 4]])}
    with pytest.warns(
        jax_tt.OutOfRangeWarning, match=r"id 12 at position 1 .*'user \(features user_id\)'"
    ):
        look_up(state, bad, Lookup(bounds="warn", method="reference"))
        jax.effects_barrier()


def test_hyperparameters_and_the_scale_of_the_loss_by_table(state):
    def loss(trained, inputs):
        arrays = COLLECTION.replaced(state, trained)
        rows, _ = look_up(arrays, inputs=inputs)
        return jnp.sum(rows["user_id"] ** 2)

    step = jax.jit(jax.grad(loss))
    trained = COLLECTION.trained(state)
    inputs = StepInputs(4.0, None, {"user": {"learning_rate": 0.4}})
    got, want = step(trained, inputs), step(trained, StepInputs())
    np.testing.assert_allclose(got["user"]["embedding"], want["user"]["embedding"], rtol=1e-6)
