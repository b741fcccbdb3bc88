"""Quantized tables in files, and rows of FBGEMM."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.kinds.quantized.test_quantized_tables import BITS, random_rows


@pytest.mark.parametrize("suffix", [".safetensors", ""])
def test_files(tmp_path, suffix):
    if not suffix:
        pytest.importorskip("orbax.checkpoint")
    tables = {f"items_{bits}": jax_tt.quantize(random_rows(20, 13), bits) for bits in BITS}
    path = tmp_path / f"small{suffix}"
    jax_tt.files.save(path, tables)
    found = jax_tt.files.load(path)
    assert list(found) == list(tables)
    for name, (table, state) in tables.items():
        assert found[name][0] == table
        np.testing.assert_array_equal(found[name][1]["packed"], state["packed"])
    with pytest.raises(FileExistsError, match="exists"):
        jax_tt.files.save(path, tables)
    jax_tt.files.save(path, tables, overwrite=True)


def write(path, packed, notes):
    from safetensors.numpy import save_file

    save_file({"items.packed": packed}, path, metadata={"jax_tt": json.dumps(notes)})


def test_files_of_another_layout(tmp_path):
    for notes, message in [
        ({}, r"holds no table that jax_tt.files.save writes, .* only items.packed"),
        ({"quantized": [1]}, "holds no table that jax_tt.files.save writes"),
        ({"quantized": {"other": {}}}, "no array 'other.packed'"),
        ({"quantized": {"items": {}}}, "the table 'items': 'features'"),
        ({"quantized": {"items": 3}}, "the table 'items'"),
        ({"quantized": {"items": {"features": 16, "bits": 5}}}, "bits: got 5"),
        (
            {"quantized": {"items": {"features": 16, "bits": 2}}},
            r"expected uint8 of shape \(4, 8\)",
        ),
        ({"quantized": {"items": {"features": -16, "bits": 4}}}, "features: got -16"),
    ]:
        packed = np.asarray(jax_tt.quantize(random_rows(4, 16), 4)[1]["packed"])
        write(tmp_path / "small.safetensors", packed, notes)
        with pytest.raises(jax_tt.FileError, match=message):
            jax_tt.files.load(tmp_path / "small.safetensors")


def test_files_with_damaged_rows(tmp_path):
    packed = np.array(jax_tt.quantize(random_rows(4, 16), 4)[1]["packed"])
    notes = {"quantized": {"items": {"features": 16, "bits": 4}}}
    write(tmp_path / "types.safetensors", packed.astype(np.int32), notes)
    with pytest.raises(jax_tt.FileError, match="its rows are int32"):
        jax_tt.files.load(tmp_path / "types.safetensors")
    packed[2, :2] = 0xFF
    write(tmp_path / "nan.safetensors", packed, notes)
    with pytest.raises(jax_tt.FileError, match="its rows: row 2 has the scale nan"):
        jax_tt.files.load(tmp_path / "nan.safetensors")
    with pytest.raises(FileNotFoundError):
        jax_tt.files.load(tmp_path / "none.safetensors")


def test_only_quantized_tables_are_written(tmp_path):
    table, state = jax_tt.quantize(random_rows(4, 16), 4)
    for tables, message in (
        ([table], "tables: got a list"),
        ({"a": table}, r"tables\['a'\]: got a QuantizedTable; expected a table with its state"),
        (
            {"a": (jax_tt.tables.DenseTable(4, 16), state)},
            r"tables\['a'\]: got a DenseTable; expected a tensor train",
        ),
        ({"a": (table, {})}, "state: has no packed"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_tt.files.save(tmp_path / "small.safetensors", tables)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("header", "alignment"), [("start", 1), ("start", 16), ("end", 1)])
def test_rows_of_fbgemm_and_back(bits, header, alignment):
    table, state = jax_tt.quantize(random_rows(20, 13), bits)
    rows = jax_tt.compression.to_fbgemm(table, state, header=header, alignment=alignment)
    assert rows.shape[1] == -(-table.row_bytes // alignment) * alignment
    again, state_again = jax_tt.compression.from_fbgemm(
        rows, 13, bits, header=header, alignment=alignment
    )
    assert again == table
    np.testing.assert_array_equal(state_again["packed"], state["packed"])
    back = jax_tt.compression.to_fbgemm(again, state_again, header=header, alignment=alignment)
    np.testing.assert_array_equal(back, rows)


def test_rows_that_are_not_of_fbgemm():
    table, state = jax_tt.quantize(random_rows(20, 13), 4)
    rows = jax_tt.compression.to_fbgemm(table, state)
    bad = rows.copy()
    bad[7, 2:4] = 0xFF
    for make, message in (
        (lambda: jax_tt.compression.from_fbgemm(rows, 13, 3), "FBGEMM has no rows of 3 bits"),
        (
            lambda: jax_tt.compression.from_fbgemm(rows, 13, 8),
            "rows: got 11 bytes a row; expected 17",
        ),
        (
            lambda: jax_tt.compression.from_fbgemm(rows, 7, 4, header="end"),
            "rows: got 11 bytes a row; expected 8",
        ),
        (
            lambda: jax_tt.compression.from_fbgemm(rows, 13, 2),
            "rows: got 11 bytes a row; expected 8",
        ),
        (
            lambda: jax_tt.compression.from_fbgemm(rows, 13, 4, alignment=4),
            "expected 12: .* 1 of padding",
        ),
        (lambda: jax_tt.compression.from_fbgemm(rows, 0, 4), "features: got 0"),
        (
            lambda: jax_tt.compression.from_fbgemm(rows, 13, 4, header="tail"),
            "header: got 'tail'; expected one of",
        ),
        (lambda: jax_tt.compression.from_fbgemm(rows.astype(np.int8), 13, 4), "rows: got int8"),
        (
            lambda: jax_tt.compression.from_fbgemm(rows[0], 13, 4),
            r"rows: got uint8 of shape \(11,\)",
        ),
        (
            lambda: jax_tt.compression.from_fbgemm(bad, 13, 4, name="t"),
            "t: rows: row 7 has the scale .* the offset nan",
        ),
        (
            lambda: jax_tt.compression.to_fbgemm(*jax_tt.quantize(random_rows(2, 8), 3)),
            "no rows of 3 bits",
        ),
        (
            lambda: jax_tt.compression.to_fbgemm(table, state, header="end", alignment=4),
            "alignment: got 4",
        ),
        (lambda: jax_tt.compression.to_fbgemm(table, state, alignment=0), "alignment: got 0"),
        (
            lambda: jax_tt.compression.to_fbgemm(table, {"packed": jnp.zeros((3, 3))}),
            "packed: got float32",
        ),
        (
            lambda: jax_tt.compression.to_fbgemm(jax_tt.tables.DenseTable(3, 4), {}),
            "table: got a DenseTable",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            make()
