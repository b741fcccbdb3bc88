"""Coded tables in files."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt

ROWS = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
WAYS = {
    "product": {"num_codes": 3, "bits": 3},
    "rotated": {"num_codes": 2, "bits": 4, "rotation": "fit"},
    "sums": {"num_codes": 6, "bits": 3, "terms": 2},
    "hot": {"num_codes": 6, "bits": 3, "terms": 2, "hot": 7, "hot_terms": 3, "rotation": "fit"},
    "additive": {"num_codes": 4, "bits": 5, "kind": "additive", "param_dtype": jnp.bfloat16},
}


@functools.cache
def encoded(way):
    return jax_tt.encode(ROWS, **WAYS[way], progress=False)


@pytest.mark.parametrize("suffix", [".safetensors", ""])
def test_files(tmp_path, suffix):
    if not suffix:
        pytest.importorskip("orbax.checkpoint")
    tables = {way: encoded(way) for way in WAYS}
    path = tmp_path / f"small{suffix}"
    jax_tt.files.save(path, tables)
    found = jax_tt.files.load(path)
    assert list(found) == list(tables)
    for way, (table, state) in tables.items():
        assert found[way][0] == table
        assert found[way][1].keys() == state.keys()
        for name, array in state.items():
            assert found[way][1][name].dtype == array.dtype
            np.testing.assert_array_equal(found[way][1][name], array)
    with pytest.raises(FileExistsError, match="exists"):
        jax_tt.files.save(path, tables)


def test_files_of_another_layout(tmp_path):
    for change, message in [
        ({"features": 7}, "the table 'items': num_codes: got 3; expected a divisor of features=7"),
        ({"bits": 20}, "the table 'items': bits: got 20"),
        ({"bits": 4}, "the table 'items'"),
        ({"kind": "sum"}, "the table 'items': kind: got 'sum'"),
        ({"rotated": True}, "no array 'items.rotation'"),
        ({"codebooks": np.full((24, 2), np.nan, np.float32)}, "its codebooks hold NaN"),
        ({"codes": np.zeros((40, 5), np.uint8)}, r"expected uint8 of shape \(40, 2\)"),
    ]:
        from safetensors.numpy import save_file

        table, state = encoded("product")
        arrays = {
            f"items.{key}": np.asarray(change.get(key, array)) for key, array in state.items()
        }
        fields = ("features", "num_codes", "bits", "kind", "rotated", "terms")
        notes = {name: getattr(table, name) for name in fields}
        notes |= {key: value for key, value in change.items() if key in notes}
        path = tmp_path / "small.safetensors"
        save_file(arrays, path, metadata={"jax_tt": json.dumps({"coded": {"items": notes}})})
        with pytest.raises(jax_tt.FileError, match=message):
            jax_tt.files.load(path)


def test_files_of_other_things(tmp_path):
    path = tmp_path / "small.safetensors"
    table, state = encoded("product")
    with pytest.raises(TypeError, match="tables: got a tuple; expected a mapping"):
        jax_tt.files.save(path, (table, state))
    with pytest.raises(TypeError, match=r"tables\['a'\]: got a CodedTable; expected a table with"):
        jax_tt.files.save(path, {"a": table})
    fused = jax_tt.extension.with_update(table, jax_tt.Update(jax_tt.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="got a table with an optimizer"):
        jax_tt.files.save(path, {"a": (fused, state)})
    wide = (jnp.ones((2, 1, 1, 9)), jnp.ones((3, 9, 2, 1)))
    with pytest.raises(ValueError, match=r"tables\['a'\]: got cores of ranks \(9,\).*tt\.round"):
        jax_tt.files.save(path, {"a": jax_tt.tt.to_table(wide)})
    assert not path.exists()


def test_a_file_of_all_kinds(tmp_path):
    path = tmp_path / "small.safetensors"
    train = jax_tt.tt.from_dense(ROWS, 2)
    order = jax_tt.order.IdOrder(np.arange(40)[::-1])
    tables = {
        "coded": encoded("hot"),
        "quantized": jax_tt.quantize(ROWS, 4),
        "mixed": jax_tt.compression.quantize_mixed(ROWS, 300),
        "train": jax_tt.tt.to_table(train, order),
        "": jax_tt.tt.to_table(train),
    }
    errors = {"train": (train.relative_error, train.row_errors), "coded": (0.5, {})}
    jax_tt.files.save(path, tables, errors=errors)
    found = jax_tt.files.load(path)
    assert found.keys() == tables.keys() and jax_tt.files.load_errors(path) == errors
    for name, (table, state) in tables.items():
        assert found[name][0] == table
        jax.tree.map(np.testing.assert_array_equal, found[name][1], dict(state))
    with pytest.raises(ValueError, match=r"errors: got \['other'\]; expected names of tables"):
        jax_tt.files.save(path, tables, errors={"other": (0.5, {})}, overwrite=True)


def test_files_with_wrong_places(tmp_path):
    table, state = encoded("hot")
    path = tmp_path / "small.safetensors"
    for wrong in (state["hot_places"].at[0, 1].add(1 << 30), state["hot_places"].at[0, 0].add(5)):
        jax_tt.files.save(path, {"items": (table, {**state, "hot_places": wrong})}, overwrite=True)
        with pytest.raises(jax_tt.FileError, match="its hot_places do not tell the places of 7"):
            jax_tt.files.load(path)
