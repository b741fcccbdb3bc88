"""Arrays for serving in files that are mapped, and frozen collections."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags, Feature, optimizers
from tests.conftest import native_available
from tests.processes import run_python

safetensors = pytest.importorskip("safetensors.numpy")

RNG = np.random.default_rng(0)
RULE = optimizers.Adam(0.1)
UPDATE = jax_tt.Update(optimizers.RowWiseAdagrad(0.1))


def arrays():
    """Of all sizes of elements, with sizes that are no multiples of the alignment."""
    return {
        "items": {"packed": RNG.integers(0, 256, (31, 5)).astype(np.uint8)},
        "head": {"kernel": jnp.ones((3, 1)), "bias": jnp.zeros((), jnp.bfloat16)},
        "none": np.zeros((0, 4), np.float16),
        "deep": {"a/b": {"c": np.array([True, False, True])}},
        "list": {0: np.ones(2, np.float32), 10: {"bias": np.zeros(1, np.float32)}},  # of nnx.List
        "last": np.arange(64, dtype=np.int32)[::2],
    }


def test_round_trip(tmp_path):
    path = tmp_path / "model.safetensors"
    want = arrays()
    jax_tt.files.save_arrays(path, want)
    got = jax_tt.files.map_arrays(path)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    # Other programs can read it.
    found = safetensors.load_file(path)
    np.testing.assert_array_equal(found["items/packed"], want["items"]["packed"])
    with pytest.raises(jax_tt.FileError, match="exists"):
        jax_tt.files.save_arrays(path, want)
    jax_tt.files.save_arrays(path, {"other": np.ones(3, np.float32)}, overwrite=True)
    # What is mapped stays as it was.
    np.testing.assert_array_equal(got["last"], want["last"])
    assert list(jax_tt.files.map_arrays(path)) == ["other"]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have their own memory")
def test_arrays_are_the_file(tmp_path):
    """A mapped array shows what is written to the file, and a donated one does not change it."""
    path = tmp_path / "model.safetensors"
    jax_tt.files.save_arrays(
        path, {"a": np.ones(3, np.uint8), "rows": np.zeros((1000, 7), np.float32)}
    )
    found = jax_tt.files.map_arrays(path)
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    assert (8 + length) % 64 == 0
    assert json.loads(before[8 : 8 + length])["rows"]["data_offsets"][0] % 64 == 0
    with open(path, "r+b") as file:
        file.seek(8 + length + 64)
        file.write(np.float32(5).tobytes())
    assert found["rows"][0, 0] == 5
    donated = jax.jit(lambda rows: rows.at[0, 0].set(7), donate_argnums=0)(found["rows"])
    assert donated[0, 0] == 7
    assert jax_tt.files.map_arrays(path)["rows"][0, 0] == 5


def test_what_is_not_written(tmp_path):
    for given, message in [
        ([np.ones(3)], "arrays: got a list; expected a mapping"),
        ({"a": {0.5: np.ones(3)}}, r"arrays\['a'\]: got the key 0.5; expected strings or integers"),
        ({"a": {}}, r"arrays\['a'\]: got an empty mapping"),
        ({"a": "text"}, r"arrays\['a'\]: got "),
        ({"a": np.ones(3, np.complex64)}, "got complex64; expected one of F64"),
        ({"a": None}, r"arrays\['a'\]: "),
        ({"a/b": np.ones(1), "a": {"b": np.ones(1)}}, "'a/b' twice"),
        ({"__padding_0": np.ones(1)}, "one of padding"),
        ({"key": lambda: jax.random.key(0)}, "jax.random.key_data"),
    ]:
        if isinstance(given, dict):
            given = {name: value() if callable(value) else value for name, value in given.items()}
        with pytest.raises((TypeError, ValueError), match=message):
            jax_tt.files.save_arrays(tmp_path / "model.safetensors", given)
        assert not list(tmp_path.iterdir())


def test_files_that_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(jax_tt.FileError, match="unknown suffix"):
        jax_tt.files.save_arrays(tmp_path / "model.bin", {"a": np.ones(3)})
    with pytest.raises(FileNotFoundError):
        jax_tt.files.map_arrays(path)
    safetensors.save_file({"a": np.ones(3)}, path)
    with pytest.raises(
        jax_tt.FileError, match=r"was not written by jax_tt.files.save_arrays; it holds a"
    ):
        jax_tt.files.map_arrays(path)
    for notes in ({"arrays": {"b": ["b"]}}, {"arrays": {"a": "a b"}}, {"arrays": {"a": []}}):
        metadata = {"jax_tt": json.dumps(notes)}
        safetensors.save_file({"a": np.ones(3)}, path, metadata=metadata)
        with pytest.raises(jax_tt.FileError):
            jax_tt.files.map_arrays(path)
    jax_tt.files.save_arrays(path, {"a": np.ones(3)}, overwrite=True)
    path.write_bytes(path.read_bytes()[:-70])
    with pytest.raises(jax_tt.FileError, match="not a complete safetensors file"):
        jax_tt.files.map_arrays(path)


def test_arrays_of_64_bits_are_not_shortened(tmp_path, x64):
    path = tmp_path / "model.safetensors"
    jax_tt.files.save_arrays(path, {"a": np.array([2**40])})
    assert jax_tt.files.map_arrays(path)["a"].tolist() == [2**40]
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"a: got int64.*jax_enable_x64"):
        jax_tt.files.map_arrays(path)


def collection():
    """Tables of every kind, most of them trained."""
    order = jax_tt.order.IdOrder(RNG.permutation(60))
    cores: dict[str, Any] = {"tt_ranks": 3, "row_factors": (8, 8)}
    tables = {
        "dense": jax_tt.dense_table(50, 8, optimizer=RULE),
        "plain": jax_tt.dense_table(50, 8, param_dtype="bfloat16"),
        "train": jax_tt.tt_table(60, 8, **cores, optimizer=RULE, id_order=order),
        "cached": jax_tt.tt_table(60, 8, **cores, optimizer=RULE, cache=jax_tt.RowCache(10)),
        "int8": jax_tt.tables.QuantizedTable(40, 16, 8, UPDATE),
        "int3": jax_tt.tables.QuantizedTable(40, 13, 3),
        "hash": jax_tt.hash_table(capacity=8, features=64, optimizer=RULE, safe_check="ignore"),
    }
    return jax_tt.Collection(tables, {name: Feature(name, combiner="mean") for name in tables})


BAGS = {
    "weighted": Bags.from_ragged([[3, 9], [], [7, 7, 1]], [[0.5, 2.0], [], [1.0, -0.25, 3.0]]),
    "ragged": Bags.from_ragged([[39], [1, 2], []]),
}


def batch_of(described):
    """Every other feature has weights; the keys of the table of keys are split, as a traced function needs them."""
    names = enumerate(described.features)
    batch = {name: BAGS["weighted" if k % 2 == 0 else "ragged"] for k, name in names}
    bags = batch["hash"]
    return batch | {
        "hash": Bags(jax_tt.dynamic.split_keys(np.asarray(bags.ids)), bags.offsets, bags.weights)
    }


@pytest.fixture(scope="module")
def trained():
    """A collection, its state, and what it answers to a batch."""
    described = collection()
    state, batch = jax.jit(described.init)(jax.random.key(0)), batch_of(described)
    want = jax.jit(lambda state: jax_tt.lookup_features(described, state, batch)[0])(state)
    return described, state, batch, want


def test_a_frozen_collection_answers_as_the_trained_one(trained):
    described, state, batch, want = trained
    served, own = described.frozen(state)
    got = jax.jit(lambda own: jax_tt.lookup_features(served, own, batch)[0])(own)
    assert all(table.update is None for table in served.tables.values())
    assert own["int8"]["packed"].dtype == jnp.uint8
    names = {name for arrays in own.values() for name in arrays}
    assert not {name for name in names if "slot" in name or name in ("step", "sentinel", "used")}
    for name in want:
        assert np.asarray(got[name]).tobytes() == np.asarray(want[name]).tobytes(), name


@pytest.mark.skipif(not native_available(), reason="needs the CPU module")
def test_a_program_in_a_fresh_process(trained, tmp_path):
    """Without Flax and torch, on mapped arrays, with CPU and CUDA in one program: answers are equal bit for bit."""
    described, state, batch, _ = trained
    served, own = described.frozen(state)

    def serve(arrays, batch):
        return jax_tt.lookup_features(served, arrays, batch, bounds="zero")[0]

    exporter = jax.export.export(
        jax.jit(serve), disabled_checks=jax_tt.export.checks(), platforms=("cpu", "cuda")
    )
    (tmp_path / "serve.program").write_bytes(exporter(own, batch).serialize())
    jax_tt.files.save_arrays(tmp_path / "arrays.safetensors", own)
    want = jax.jit(serve)(own, batch)
    code = """
import sys
sys.modules["flax"] = None
import jax, jax_tt, numpy as np
jax_tt.export.register()
program = jax.export.deserialize(open("serve.program", "rb").read())
assert program.platforms == ("cpu", "cuda")
arrays = jax_tt.files.map_arrays("arrays.safetensors")
weighted = jax_tt.Bags.from_ragged([[3, 9], [], [7, 7, 1]], [[0.5, 2.0], [], [1.0, -0.25, 3.0]])
ragged = jax_tt.Bags.from_ragged([[39], [1, 2], []])
batch = {name: (weighted, ragged)[k & 1] for k, name in enumerate(%r)}
batch["hash"] = jax_tt.Bags(jax_tt.dynamic.split_keys(weighted.ids), weighted.offsets, weighted.weights)
np.savez("answers.npz", **jax.jit(program.call)(arrays, batch))
assert "torch" not in sys.modules
"""
    code %= (list(batch),)
    run_python("-c", code, folder=tmp_path, only=True, PATH="", JAX_PLATFORMS="cpu")
    answers = np.load(tmp_path / "answers.npz")
    for name, rows in want.items():
        assert answers[name].tobytes() == np.asarray(rows).tobytes(), name
