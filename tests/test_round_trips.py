"""What leaves the library comes back: a list of all of it, and one test that takes each of them there and back."""

import contextlib
import functools
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from tests.cli.cli_case import QUIET, ran
from tests.layers.test_pretrained_kinds import KINDS, made
from tests.processes import run_python

N, D = 40, 8
KEYS = np.array([0, 7, 2**32 + 7, 2**63 + 11, 2**64 - 2], np.uint64)
NONE = 2**64 - 1
RULE = jax_tt.optimizers.RowWiseAdagrad(0.1)
HASH = jax_tt.hash_table(16, D, optimizer=RULE, safe_check="ignore")
TRAIN = jax_tt.TTShape(10**12, 4, 1, (252,) * 5, (4, 1, 1, 1, 1))
FEATURES = {"key": jax_tt.Feature("key"), "item": jax_tt.Feature("item")}
TABLES = {"key": HASH, "item": jax_tt.dense_table(N, D)}
COLLECTION = jax_tt.Collection(TABLES, FEATURES)
IDS = np.array([[3, 1], [0, N - 1]], np.int32)


def equal(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@functools.cache
def inserted() -> Any:
    """What an insertion of the keys returned, and the state after it."""
    return jax_tt.dynamic.insert(HASH, HASH.init(jax.random.key(0)), KEYS)


# Keys


def split_keys(folder: Path) -> None:
    for keys in (KEYS, KEYS.reshape(5, 1), KEYS.view(np.int64), KEYS[:0]):
        joined = jax_tt.dynamic.join_keys(jax_tt.dynamic.split_keys(keys))
        np.testing.assert_array_equal(joined, keys.view(np.uint64))
    words = jax.jit(lambda keys: keys)(jax_tt.dynamic.split_keys(KEYS))
    np.testing.assert_array_equal(jax_tt.dynamic.join_keys(words), KEYS)


def keys_with_slots(folder: Path) -> None:
    located = jax_tt.dynamic.with_slots(KEYS, inserted()[0])
    np.testing.assert_array_equal(jax_tt.dynamic.join_keys(located), KEYS)


def keys_that_were_inserted(folder: Path) -> None:
    report, state = inserted()
    assert set(jax_tt.dynamic.join_keys(report.keys)[: len(KEYS)]) == set(KEYS)
    assert set(jax_tt.dynamic.keys_of(HASH, state)["key"]) == set(KEYS)


def keys_of_the_best_rows(folder: Path) -> None:
    _, state = inserted()
    _, best = jax_tt.top_k(HASH, state, jnp.ones((1, D)), len(KEYS) + 1)
    ((*keys, none),) = jax_tt.dynamic.join_keys(best)
    assert set(keys) == set(KEYS) and none == NONE
    rows, _ = jax_tt.lookup(HASH, state, best, train=False)
    again, _ = jax_tt.lookup(HASH, state, np.array(keys), train=False)
    np.testing.assert_array_equal(rows[0, :-1], again)


def digits_of_a_train(folder: Path) -> None:
    ids = np.array([[0, 10**12 - 1], [123_456_789_012, 5]])
    np.testing.assert_array_equal(TRAIN.join_ids(TRAIN.split_ids(ids)), ids)
    outside = TRAIN.split_ids(np.array([-3, 10**12, 2**62]))
    assert TRAIN.join_ids(outside).tolist() == [-1, 10**12, 10**12]


def orders_of_ids(folder: Path) -> None:
    order = jax_tt.order.from_counts(np.arange(N))
    order.save(folder / "order.npz")
    assert jax_tt.order.IdOrder.load(folder / "order.npz") == order


# Batches


def keyed_batches(folder: Path) -> None:
    """Ids of tables with keys and without, in one array, before and after a key needs more than 32 bits."""
    for key in (7, 2**32 + 7, 2**63 + 11):
        batch = jax_tt.KeyedBags.from_lengths(
            ["key", "item"], np.array([key, 5, 3, 1], np.uint64), [2, 0, 1, 1]
        )
        for one in (batch, pickle.loads(pickle.dumps(batch))):
            found = jax.jit(lambda batch: batch)(COLLECTION.host_batch(one))
            bags = found["key"]
            assert bags.offsets.tolist() == [0, 2, 2]
            assert jax_tt.dynamic.join_keys(bags.ids)[:2].tolist() == [key, 5]
            assert found["item"].ids[:2].tolist() == [3, 1]


def bags_of_an_exported_program(folder: Path) -> None:
    bags = jax_tt.Bags(jax_tt.dynamic.split_keys(KEYS), np.array([0, 5], np.int32))
    program = jax.export.export(jax.jit(lambda bags: bags))(bags).serialize()
    equal(jax.export.deserialize(program).call(bags), jax.tree.map(jnp.asarray, bags))


# States and parameters


def states_in_mapped_files(folder: Path) -> None:
    _, state = inserted()
    jax_tt.files.save_arrays(folder / "state.safetensors", {"key": state})
    equal(jax_tt.files.map_arrays(folder / "state.safetensors"), {"key": state})


def states_in_dumps(folder: Path) -> None:
    _, state = inserted()
    jax_tt.files.dump(HASH, state, folder / "dump")
    _, loaded = jax_tt.files.load_dump(HASH, HASH.init(jax.random.key(1)), folder / "dump")
    rows, want = (jax_tt.lookup(HASH, one, KEYS, train=False)[0] for one in (loaded, state))
    np.testing.assert_array_equal(rows, want)


def states_of_collections_in_checkpoints(folder: Path) -> None:
    state = COLLECTION.init(jax.random.key(0))
    state["key"] = {name: inserted()[1][name] for name in state["key"]}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", jax_tt.checkpoint.save_args(COLLECTION, state))
        checkpointer.wait_until_finished()
        target = jax_tt.checkpoint.target(COLLECTION, state)
        arrays = checkpointer.restore(folder / "state", target, strict=False)
    equal(jax_tt.checkpoint.restore(COLLECTION, state, arrays), state)


class Towers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.towers = nnx.List([jax_tt.EmbedBag(N, D, rngs=rngs) for _ in range(2)])

    def __call__(self, ids: Any) -> jax.Array:
        return self.towers[0](ids) + self.towers[1](ids)


def models_with_lists(folder: Path) -> None:
    """As arguments of an exported program, and their arrays in a file."""
    model = Towers(nnx.Rngs(0))
    model.eval()
    graph, state = nnx.split(model)
    params, tree = jax.tree.flatten(state)

    def serve(params: Any, ids: Any) -> jax.Array:
        return nnx.merge(graph, jax.tree.unflatten(tree, params))(ids)

    exporter = jax.export.export(jax.jit(serve), disabled_checks=jax_tt.export.checks())
    program = jax.export.deserialize(exporter(params, IDS).serialize())
    want = model(IDS)
    np.testing.assert_array_equal(program.call(params, IDS), want)
    arrays = nnx.to_pure_dict(state)
    jax_tt.files.save_arrays(folder / "model.safetensors", arrays)
    mapped = jax_tt.files.map_arrays(folder / "model.safetensors")
    equal(mapped, arrays)
    other = Towers(nnx.Rngs(1))
    nnx.update(other, mapped)
    np.testing.assert_array_equal(other(IDS), want)


# Descriptions


def layers_that_prepare_batches() -> dict[str, Any]:
    rows = np.ones((50_000, D), np.float32)
    sizes = len(rows), D
    of_rows = jax_tt.quantized_table(*sizes, embedding_init=lambda *_: rows)
    return {
        "Embed": (jax_tt.Embed(*sizes, rngs=nnx.Rngs(0)), [3, 1]),
        "EmbedBag": (jax_tt.EmbedBag(*sizes, optimizer=RULE, rngs=nnx.Rngs(0)), [[3], [1, 2]]),
        "quantized": (jax_tt.TableEmbedBag.from_pretrained(jax_tt.quantize(rows)), [[3], []]),
        "linen": (jax_tt.linen.TableEmbed.from_pretrained(rows, combiner="sum"), [[3], [1, 2]]),
        "hash": (jax_tt.TableEmbed(HASH, rngs=nnx.Rngs(0)), KEYS),
        "EmbedCollection": (
            jax_tt.EmbedCollection(TABLES, FEATURES, rngs=nnx.Rngs(0)),
            {"key": KEYS, "item": [[3], [], [], [], [1]]},
        ),
        "linen.EmbedCollection": (
            jax_tt.linen.EmbedCollection({**TABLES, "item": of_rows}, FEATURES),
            {"key": KEYS, "item": [[3], [], [], [], [1]]},
        ),
    }


# A process without devices: a backend that started would be an error.
WORKER = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    calls = pickle.load(file)
with open(sys.argv[1] + ".batches", "wb") as file:
    pickle.dump({name: call(ids) for name, (call, ids) in calls.items()}, file)
"""


def host_batch_of_layers(folder: Path) -> None:
    """Of the description alone, in a process that loads data and has no device."""
    given = layers_that_prepare_batches()
    calls = {name: (layer.host_batch, ids) for name, (layer, ids) in given.items()}
    for name, (call, _) in calls.items():
        assert len(pickle.dumps(call)) < 25_000, name  # of what a used table has cached, too
    (folder / "calls").write_bytes(pickle.dumps(calls))
    run_python("-c", WORKER, folder / "calls", JAX_PLATFORMS="none")
    batches = pickle.loads((folder / "calls.batches").read_bytes())
    equal(batches, {name: call(ids) for name, (call, ids) in calls.items()})


def constants_of_plans(folder: Path) -> None:
    bandwidths = jax_tt.planning.Bandwidths()
    bandwidths.save(str(folder / "bandwidths.json"))
    assert jax_tt.planning.Bandwidths.load(str(folder / "bandwidths.json")) == bandwidths


# Checkpoints and files of every kind


def tables_in_files(folder: Path) -> None:
    tables = {kind: made(kind) for kind in KINDS}
    errors = {"tt": (0.5, {0.5: 0.25})}
    jax_tt.files.save(folder / "tables.safetensors", tables, errors=errors)
    assert jax_tt.files.load_errors(folder / "tables.safetensors") == errors
    found = jax_tt.files.load(folder / "tables.safetensors")
    for kind, (table, state) in tables.items():
        rows, want = (jax_tt.lookup(*pair, IDS)[0] for pair in (found[kind], (table, state)))
        np.testing.assert_array_equal(rows, want)


def layers_in_checkpoints(folder: Path) -> None:
    """Read without the program that trained them, as tables and by ``jax-tt info``."""
    described = jax_tt.quantized_table(N, D, bits=4, optimizer=RULE)
    layers: dict[str, Any] = {
        kind: jax_tt.TableEmbed.from_pretrained(made(kind))
        for kind in ("quantized", "mixed", "product", "tt_sum")
    }
    layers["trained"] = jax_tt.TableEmbed(described, rngs=nnx.Rngs(0))
    layers["hash"] = jax_tt.TableEmbed(HASH, rngs=nnx.Rngs(0))
    layers["hash"](KEYS)
    with ocp.StandardCheckpointer() as checkpointer:
        for name, state in (
            ("plain", {name: nnx.to_pure_dict(nnx.state(one)) for name, one in layers.items()}),
            ("nested", {name: nnx.state(one) for name, one in layers.items()}),
        ):
            checkpointer.save(folder / name, state)
    for name in ("plain", "nested"):
        found = jax_tt.files.load(folder / name)
        assert sorted(found) == sorted(layers.keys() - {"hash"})
        for kind, pair in found.items():
            rows = jax_tt.lookup(*pair, IDS)[0]
            np.testing.assert_array_equal(rows, layers[kind](IDS))
        listed = listing(folder / name)
        assert listed.keys() == layers.keys()
        assert listed["trained"] == ("4 bits a number", N, D)
        assert listed["hash"] == (f"hash table, {len(KEYS)} keys", 16, D)


def listing(path: Path) -> dict[str, Any]:
    """What ``jax-tt info --json`` prints of every table."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ran("info", str(path), "--json", QUIET)
    tables = json.loads(printed.getvalue())["tables"]
    return {one["table"]: (one["kind"], one["rows"], one["columns"]) for one in tables}


LEAVES: tuple[Callable[[Path], None], ...] = (
    split_keys,
    keys_with_slots,
    keys_that_were_inserted,
    keys_of_the_best_rows,
    digits_of_a_train,
    orders_of_ids,
    keyed_batches,
    bags_of_an_exported_program,
    states_in_mapped_files,
    states_in_dumps,
    states_of_collections_in_checkpoints,
    models_with_lists,
    host_batch_of_layers,
    constants_of_plans,
    tables_in_files,
    layers_in_checkpoints,
)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_what_leaves_comes_back(leaf: Callable[[Path], None], tmp_path: Path) -> None:
    leaf(tmp_path)


def test_words_that_are_no_keys_are_refused() -> None:
    for given, error, message in (
        (KEYS, TypeError, "keys: got uint64 of shape .*; expected SplitIds, or words of keys"),
        ([1, 2], TypeError, "keys: got a list; expected SplitIds"),
        (TRAIN.split_ids([1]), ValueError, r"got words of shape \(1, 5\).*TTShape.join_ids"),
    ):
        with pytest.raises(error, match=message):
            jax_tt.dynamic.join_keys(given)
    with pytest.raises(TypeError, match=r"keys: got a traced array; .*Join keys outside jit"):
        jax.jit(jax_tt.dynamic.join_keys)(jax_tt.dynamic.split_keys(KEYS))
    with pytest.raises(
        ValueError, match=r"join_ids: ids.digits: got .*expected 5 digits.*dynamic.join_keys"
    ):
        TRAIN.join_ids(jax_tt.dynamic.split_keys(KEYS))
    with pytest.raises(TypeError, match="join_ids: ids: got a list; expected SplitIds"):
        TRAIN.join_ids([1])  # pyright: ignore[reportArgumentType]
