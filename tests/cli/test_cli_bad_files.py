"""Files that are damaged, hostile or do not fit: one line of the command line for each, and nothing run."""

import logging
import os
import pickle
import struct
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

import jax_tt
from jax_tt._formats import torch_file
from jax_tt.cli.__main__ import quieten_orbax
from jax_tt.order import IdOrder
from tests.cli.cli_case import QUIET, D, N, folder, pickled, ran, refused, table, write_torch

__all__ = ["folder", "table"]  # fixtures

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")


class Hostile:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self):
        return os.system, ("touch owned",)


def test_no_pickle_is_run(folder, capsys):
    np.save("hostile.npy", np.array([Hostile()], object))
    np.savez("hostile.npz", w=np.array([Hostile()], object))
    paths = ["hostile.npy", "hostile.npz"]
    for protocol in range(6):
        program = pickle.dumps({"w": Hostile()}, protocol)
        write_torch(f"hostile{protocol}.pt", {}, program)
        Path(f"raw{protocol}.pt").write_bytes(program)
        paths += [f"hostile{protocol}.pt", f"raw{protocol}.pt"]
    for path in paths:
        refused(capsys, "info", path)
        refused(capsys, "compress", path, "--out", "o.safetensors", "--ranks", "2", QUIET)
    refused(capsys, "order", "hostile.npy", "--out", "o.npz", QUIET)
    assert not os.path.exists("owned")
    pickle.loads(program)
    assert os.path.exists("owned")  # the trap does spring


def nested(depth):
    """Lists that hold the one before ten times over: small in the pickle, without end when walked."""
    value = []
    for _ in range(depth):
        value = [value] * 10
    return value


def test_hostile_tensors(table, capsys, monkeypatch):
    monkeypatch.setattr(torch_file, "_MOST_VALUES", 10_000)
    arrays = {"w": table}
    good, strides = pickled(arrays), struct.pack("<i", D) + b"J" + struct.pack("<i", 1)
    cases = {
        "stored": (good, b"\0" * 16, "claims more numbers"),
        "cut": (good[: len(good) // 2], None, "damaged"),
        "empty": (b"", None, "damaged"),
        "laughs": (pickle.dumps(nested(40), 2), None, "nested more than"),
        "stack": (b"\x80\x02" + b"R.", None, "damaged"),
        "setstate": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", None, "opcode NEWOBJ"),
        "storage type": (
            good.replace(b"FloatStorage", b"FloatStorag3"),
            None,
            "which is no tensor",
        ),
        "huge": (
            good.replace(struct.pack("<i", N), struct.pack("<i", 2**31 - 1)),
            None,
            "claims more",
        ),
        "strides": (
            good.replace(strides, struct.pack("<i", 2 * D) + strides[4:]),
            None,
            "claims more",
        ),
        "negative": (good.replace(b"K\x00(J", b"J\xff\xff\xff\xff(J"), None, "damaged"),
    }
    for name, (program, stored, message) in cases.items():
        write_torch("t.pt", arrays, program, stored)
        assert message in refused(capsys, "info", "t.pt"), name
    with zipfile.ZipFile("t.pt", "w") as archive:
        archive.writestr("t/data.pkl", good)
    assert "missing from the archive" in refused(capsys, "info", "t.pt")


def npy(header, data=b"", magic=b"\x93NUMPY\x01\x00"):
    text = (header + "\n").encode()
    return magic + struct.pack("<H", len(text)) + text + data


FLOATS = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"


def test_damaged_files(folder, capsys):
    for name, data, message in [
        ("a.npy", b"", "is empty"),
        ("a.npy", b"PNG", "is no .npy file"),
        ("a.npy", b"\x93NUMPY", "version"),
        ("a.npy", npy(FLOATS % "(3, 4)")[:30], "header is damaged"),
        ("a.npy", npy("{'descr': '\0"), "header is damaged"),
        ("a.npy", npy(FLOATS % "(3, 4)", b"\0" * 47), "claims 48 bytes"),
        ("a.npy", npy(FLOATS % f"({2**60}, 4)"), "claims 18,446"),
        ("a.npy", npy(FLOATS % "(-3, 4)", b"\0" * 48), "claims the shape"),
        ("a.npy", npy("__import__('os').system('touch owned')"), "header is damaged"),
        ("a.npy", npy(FLOATS % "(3, 4)", b"\0" * 48, b"\x93NUMPY\x09\x00"), "version 9"),
        ("a.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"), "Python objects"),
        ("a.npz", b"PK\x03\x04 and then nothing", "is not a complete npz file"),
        ("a.pt", b"PK\x03\x04 and then nothing", "is not a complete torch file"),
        ("a.pt", b"\x80\x02.", "is a bare pickle, the format of torch.save before torch 1.6"),
        ("a.safetensors", b"\xff" * 8 + b"{}", "is not a complete safetensors file"),
        ("a.safetensors", struct.pack("<Q", 2) + b"[]", "is not a complete safetensors file"),
        (
            "a.safetensors",
            struct.pack("<Q", 58) + b'{"w":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}',
            "is not a complete safetensors file",
        ),
        ("a.bin", b"x", "got the format .bin"),
        ("a", b"x", "got the format"),
    ]:
        Path(name).write_bytes(data)
        assert message in refused(capsys, "info", name)
        refused(capsys, "compress", name, "--out", "o.safetensors", "--ranks", "2", QUIET)
        assert os.listdir() == [name]
        os.remove(name)


def test_a_header_of_python_2_is_read_without_a_warning(table, capsys):
    data = Path("table.npy").read_bytes()
    Path("old.npy").write_bytes(data.replace(b"(300, 8), }  ", b"(300L, 8L), }"))
    for name in ("table.npy", "old.npy"):
        ran("info", name)
    out, errors = capsys.readouterr()
    assert not errors and len(set(out.splitlines())) == 2


def test_cut_short_anywhere(table, capsys):
    """A prefix of a file is never read as if it were whole."""
    from safetensors.numpy import save_file

    np.savez("t.npz", item=table)
    save_file({"item": table}, "t.safetensors")
    write_torch("t.pt", {"item": table})
    for path in ("table.npy", "t.npz", "t.safetensors", "t.pt"):
        data = Path(path).read_bytes()
        for share in (0.01, 0.3, 0.7, 0.999):
            Path(f"cut_{path}").write_bytes(data[: int(share * len(data))])
            refused(
                capsys, "compress", f"cut_{path}", "--out", "o.safetensors", "--ranks", "2", QUIET
            )


def test_zip_bombs(folder, capsys):
    header = npy(FLOATS % f"({2**22}, 8)")
    with (
        zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("w.npy", "w") as file,
    ):
        file.write(header)
        for _ in range(2**7):
            file.write(bytes(2**20))
    assert "zip bomb" in refused(capsys, "info", "bomb.npz")
    with zipfile.ZipFile("bomb.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("t/data.pkl", b"\x80\x02." + bytes(2**27))
    assert "bomb.pt" in refused(capsys, "info", "bomb.pt")


def test_checkpoints_that_would_grow(folder, capsys):
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(folder / "zeros", {"w": np.zeros((2**22, 5), np.float32)})
    assert "w claims 83,886,080 bytes" in refused(capsys, "info", "zeros")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see quieten_orbax
def test_damaged_checkpoints(table, capsys):
    assert "no such file" in refused(capsys, "info", "nothing")
    os.mkdir("empty")
    assert "without an orbax checkpoint" in refused(capsys, "info", "empty")
    os.mkdir("odd")
    Path("odd/_METADATA").write_text("{")
    assert "is not a complete orbax checkpoint" in refused(capsys, "info", "odd")
    os.mkdir("two")
    ran("compress", "table.npy", "--out", "two/a", "--ranks", "2", QUIET)
    ran("compress", "table.npy", "--out", "two/b", "--ranks", "2", QUIET)
    assert "holds 2 checkpoints; expected one of them: a, b" in refused(capsys, "info", "two")
    assert "exists" in refused(
        capsys, "compress", "table.npy", "--out", "two", "--ranks", "2", QUIET
    )
    data = [path for path in Path("two/a").rglob("d/*") if path.is_file()]
    for path in data:
        path.write_bytes(path.read_bytes()[:40])
    refused(capsys, "info", "two/a", "--against", "table.npy", QUIET)
    for path in data:
        path.unlink()
    refused(capsys, "info", "two/a", "--against", "table.npy", QUIET)


def test_a_damaged_checkpoint_is_told_once(monkeypatch):
    """orbax leaves futures behind that fail one by one after the first; only their noise is dropped."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(logging.getLogger("asyncio"), "level", logging.NOTSET)
    quieten_orbax()
    for message in ("Event loop is closed", "another error"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(message)))
    assert [str(one.exc_value) for one in told] == ["another error"]
    assert not logging.getLogger("asyncio").isEnabledFor(logging.ERROR)


def test_tables_that_do_not_fit(table, capsys):
    run = ["compress", "table.npy", "--out", "o.safetensors"]
    broken = table.copy()
    broken[17, 3] = np.nan
    np.save("nan.npy", broken)
    assert "row 17: got NaN" in refused(
        capsys, "compress", "nan.npy", *run[2:], "--ranks", "2", QUIET
    )
    IdOrder(np.arange(N)[::-1]).save("order.npz")
    by_order = ["--order", "order.npz", "--ranks", "2", QUIET]
    assert "the row of id 17" in refused(capsys, "compress", "nan.npy", *run[2:], *by_order)
    np.save("short.npy", table[:-1])
    assert "got an order of 300 ids; expected 299" in refused(
        capsys, "compress", "short.npy", *run[2:], *by_order
    )
    assert "holds ['rows" not in refused(
        capsys, *run, "--order", "table.npy", "--ranks", "2", QUIET
    )
    np.savez("twice.npz", rows=np.zeros(N, int))
    assert "is no order of ids" in refused(
        capsys, *run, "--order", "twice.npz", "--ranks", "2", QUIET
    )
    np.save("ints.npy", np.arange(12).reshape(3, 4))
    assert "expected floats" in refused(
        capsys, "compress", "ints.npy", *run[2:], "--ranks", "2", QUIET
    )
    np.savez("two.npz", a=table, b=table)
    assert "say which by --name: a, b" in refused(
        capsys, "compress", "two.npz", *run[2:], "--ranks", "2"
    )
    assert "no array 'c'; it holds a, b" in refused(
        capsys, "compress", "two.npz", *run[2:], "--ranks", "2", "--name", "c"
    )
    np.save("weights.npy", np.ones(3))
    assert "weights" in refused(capsys, *run, "--weights", "weights.npy", "--ranks", "2", QUIET)
    assert "--picture" in refused(capsys, *run, "--picture", "p.txt", "--ranks", "2", QUIET)
    assert "suffix .h5" in refused(capsys, *run[:3], "o.h5", "--ranks", "2", QUIET)
    assert not os.path.exists("o.safetensors")


def test_cores_that_do_not_fit(folder, capsys):
    a, b = np.ones((4, 1, 2, 3), np.float32), np.ones((5, 3, 2, 1), np.float32)
    np.savez("good.npz", **{"x.core_0": a, "x.core_1": b})
    assert jax_tt.files.load("good.npz")["x"][0].num_embeddings == 20
    np.savez("bad.npz", **{"x.core_0": a, "x.core_1": b[:, :2]})
    assert "do not fit together" in refused(capsys, "info", "bad.npz")
    np.savez("nan.npz", **{"x.core_0": a * np.nan, "x.core_1": b})
    with pytest.raises(ValueError, match=r"x\.core_0 holds NaN"):
        jax_tt.files.load("nan.npz")
    np.savez("order.npz", **{"x.core_0": a, "x.core_1": b, "x.id_order": np.zeros(20, int)})
    with pytest.raises(ValueError, match="is no order of ids"):
        jax_tt.files.load("order.npz")
    np.savez("none.npz", w=a)
    with pytest.raises(ValueError, match=r"holds no table that .* and no tensor train"):
        jax_tt.files.load("none.npz")
    from safetensors.numpy import save_file

    arrays = {"x.core_0": a, "x.core_1": b}
    for notes, message in (
        ("[", "metadata is damaged"),
        ("[]", "expected an object"),
        ('{"tables": {"x": {"num_embeddings": 10000000000}}}', "row_factors"),
        ('{"tables": {"x": {"num_embeddings": "all"}}}', "num_embeddings"),
        ('{"tables": {"x": {"relative_error": []}}}', "are no numbers"),
        ('{"tables": {"x": {"row_errors": [[1, 2, 3]]}}}', "are no numbers"),
    ):
        save_file(arrays, "m.safetensors", metadata={"jax_tt": notes})
        assert message in refused(capsys, "info", "m.safetensors")


def test_orders_of_other_ids_than_the_rows_are_refused(folder):
    from safetensors.numpy import save_file

    cores = {"x.core_0": np.ones((4, 1, 2, 3)), "x.core_1": np.ones((5, 3, 2, 1))}
    notes = {"jax_tt": '{"tables": {"x": {"num_embeddings": 19}}}'}
    for count in (18, 20):
        save_file(cores | {"x.id_order": np.arange(count)}, "m.safetensors", notes)
        message = f"x.id_order, an order of {count} ids; expected 19, the rows of the table"
        with pytest.raises(jax_tt.FileError, match=message):
            jax_tt.files.load("m.safetensors")
