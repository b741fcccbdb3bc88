"""Descriptions and layers survive pickling, e.g. as what a process that loads data is given."""

import functools
import pickle
from copy import copy, deepcopy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from tests.layers.test_pretrained_kinds import KINDS, saved
from tests.processes import run_python

N, D = 16, 8
RULE = jax_tt.optimizers.Adagrad(0.1)
IDS = jnp.array([[1, 2], [3, 15]])
KEYS = jax_tt.dynamic.split_keys(np.array([[2**40, 2], [3, 4]]))
ROWS = np.arange(N * D, dtype=np.float32).reshape(N, D)
CORES = jax_tt.tt.init(jax.random.key(0), jax_tt.TTShape.suggest(N, D, ranks=2))
ORDER = jax_tt.order.from_counts(np.arange(N))
CACHE = jax_tt.RowCache(4, ways=2)

TABLES: dict[str, Any] = {
    "dense": jax_tt.dense_table(N, D, optimizer=RULE),
    "tt": jax_tt.tt_table(N, D, tt_ranks=2),
    "cached": jax_tt.tt_table(N, D, tt_ranks=2, cache=CACHE, optimizer=RULE),
    "ordered": jax_tt.tt_table(N, D, tt_ranks=2, id_order=ORDER),
    "hash": jax_tt.hash_table(N, D, admission=2, initializer=jax_tt.dynamic.Uniform(0.1)),
    "quantized": jax_tt.tables.QuantizedTable(N, D, bits=4, rotated=True),
    "quantized, fused": jax_tt.tables.QuantizedTable(N, D, update=jax_tt.Update(RULE)),
    "sum": jax_tt.tables.SumTable(
        (jax_tt.tables.DenseTable(N, D), jax_tt.tt_table(N, D, tt_ranks=2))
    ),
    "coded": jax_tt.coded_table(N, D, 2),
}
FEATURES = {name: jax_tt.Feature(name) for name in TABLES}
LAYERS: dict[str, Any] = {
    "EmbedBag, fused": functools.partial(jax_tt.EmbedBag, N, D, optimizer=RULE),
    "TTEmbedBag": functools.partial(jax_tt.TTEmbedBag, N, D, cache=CACHE, id_order=ORDER),
    "TableEmbed": functools.partial(
        jax_tt.TableEmbed, jax_tt.hash_table(N, D, safe_check="ignore")
    ),
    "EmbedCollection": functools.partial(
        jax_tt.EmbedCollection, {"dense": TABLES["dense"]}, {"dense": FEATURES["dense"]}
    ),
}
LINEN: dict[str, Any] = {
    "cached": jax_tt.linen.TableEmbed(TABLES["cached"], combiner="sum"),
    "rows": jax_tt.linen.TableEmbed.from_pretrained(ROWS),
    "cores": jax_tt.linen.TableEmbed.from_pretrained(CORES, combiner="mean"),
}


def slower(step: Any) -> Any:
    return 0.1 / (step + 1)


NEED_FUNCTIONS = (
    jax_tt.optimizers.Optimizer,
    jax_tt.optimizers.Custom,
    jax_tt.optimizers.RowGradients,
)
OTHERS: dict[str, Any] = {
    "TTShape": jax_tt.TTShape.suggest(N, D, ranks=2),
    "Lookup": jax_tt.Lookup("mean"),
    "IdOrder": ORDER,
    "Placement": jax_tt.Placement.round_robin(page_size=4),
    "rule with a schedule": jax_tt.optimizers.Adam(slower),
} | {
    kind.__name__: kind(0.1)  # pyright: ignore[reportCallIssue]
    for kind in vars(jax_tt.optimizers).values()
    if isinstance(kind, type)
    and issubclass(kind, jax_tt.optimizers.Optimizer)
    and kind not in NEED_FUNCTIONS
}


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def ids_of(table: Any) -> Any:
    return KEYS if table.ids.takes_keys else IDS


@functools.partial(jax.jit, static_argnums=0)
def init_and_look_up(table: Any, ids: Any) -> Any:
    state = table.init(jax.random.key(0))
    return state, jax_tt.lookup(table, state, ids, train=False)[0]


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    table = TABLES[name]
    want = init_and_look_up(table, ids_of(table))
    again = copied(table)  # used before: what it has cached is pickled as well
    assert again == table
    equal(init_and_look_up(again, ids_of(again)), want)


def test_other_descriptions() -> None:
    for name, value in OTHERS.items():
        assert copied(value) == value, name


def test_collections() -> None:
    collection = jax_tt.Collection(TABLES, FEATURES)
    shapes = jax.eval_shape(collection.init, jax.random.key(0))
    again = copied(collection)
    assert again == collection and hash(again) == hash(collection)
    equal(
        jax.tree.map(lambda a: a.shape, jax.eval_shape(again.init, jax.random.key(0))),
        jax.tree.map(lambda a: a.shape, shapes),
    )


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    layer = LAYERS[name](rngs=nnx.Rngs(0))
    inputs = {"dense": IDS} if name == "EmbedCollection" else KEYS if name == "TableEmbed" else IDS
    call = nnx.jit(lambda layer: layer(inputs))
    fresh = copied(layer)
    want = call(layer)
    equal((call(fresh), call(copied(layer))), (want, call(layer)))  # the second one was used before


@pytest.mark.parametrize("name", LINEN)
def test_linen_layers(name: str) -> None:
    layer = LINEN[name]
    want = jax.jit(layer.init)(jax.random.key(0), IDS)
    equal(jax.jit(copied(layer).init)(jax.random.key(0), IDS), want)


def test_tables_on_a_mesh_say_what_to_pickle() -> None:
    mesh, tables = jax.make_mesh((2,), ("model",)), {"dense": TABLES["dense"]}
    features = {"dense": FEATURES["dense"]}
    sharded: dict[str, Any] = jax_tt.shard_tables(tables, mesh, "model")
    for what in (
        sharded["dense"],
        jax_tt.Collection(sharded, features),
        jax_tt.EmbedCollection(tables, features, mesh=mesh, axis="model", rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(TypeError, match=r"Pickle the table that it shards"):
            pickle.dumps(what)
    assert copied(sharded["dense"].table) == tables["dense"]
    assert deepcopy(sharded) == copy(sharded) == sharded


# What a process does that nothing else has prepared: reads every kind from a file, then looks rows up.
PROGRAM = """
import pickle, sys
import numpy as np
import jax_tt

folder = sys.argv[1]
path = folder + "/tables.safetensors"
names = sorted(jax_tt.files.load(path))
layers = [jax_tt.TableEmbed.from_pretrained(path, table=name) for name in names]
print(*(type(layer.table).__name__ for layer in layers))
with open(folder + "/described", "rb") as file:
    collection, state, layer, batch = pickle.load(file)
rows, _ = jax_tt.lookup_features(collection, state, batch)
np.savez(folder + "/rows.npz", **rows, layer=layer(batch["dense"]))
"""


@pytest.mark.slow
def test_another_process_takes_files_collections_and_layers(tmp_path: Any) -> None:
    path = saved(tmp_path, *KINDS)
    tables = {"dense": TABLES["dense"], "hash": jax_tt.hash_table(N, D, safe_check="ignore")}
    collection = jax_tt.Collection(tables, {name: FEATURES[name] for name in tables})
    state, layer = collection.init(jax.random.key(0)), jax_tt.Embed(N, D, rngs=nnx.Rngs(0))
    batch = {"dense": np.asarray(IDS), "hash": KEYS}
    (tmp_path / "described").write_bytes(pickle.dumps((collection, state, layer, batch)))
    kinds = run_python("-c", PROGRAM, tmp_path).split()
    layers = [jax_tt.TableEmbed.from_pretrained(path, table=name) for name in sorted(KINDS)]
    assert kinds == [type(layer.table).__name__ for layer in layers]
    got, (want, _) = (
        np.load(tmp_path / "rows.npz"),
        jax_tt.lookup_features(collection, state, batch),
    )
    for name, rows in {**want, "layer": layer(IDS)}.items():
        np.testing.assert_allclose(got[name], rows, rtol=1e-6)
