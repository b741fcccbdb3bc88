"""What the tests of the command line share: a folder with a table, and how a run ends."""

import struct
import zipfile

import numpy as np
import pytest

import jax_tt
from jax_tt.cli import main

N, D = 300, 8
QUIET = "--no-progress"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(folder):
    """Exactly a tensor train of rank 2, plus a little noise."""
    rng = np.random.default_rng(0)
    shape = jax_tt.TTShape.suggest(N, D, ranks=2)
    cores = [rng.normal(size=core) for core in shape.core_shapes]
    rows = np.asarray(jax_tt.tt.to_dense([c.astype(np.float32) for c in cores], N))
    rows = (rows + 1e-3 * rng.normal(size=rows.shape)).astype(np.float32)
    np.save("table.npy", rows)
    return rows


def refused(capsys, *argv):
    """The one line of the error."""
    assert main([*argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("jax-tt: error: ")
    return line


def ran(*argv):
    assert main([*argv]) == 0


def write_torch(path, arrays, program=None, stored=None):
    """A file as torch.save writes it, or with another pickle or other contents of the storages."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("t/data.pkl", pickled(arrays) if program is None else program)
        for k, array in enumerate(arrays.values()):
            archive.writestr(f"t/data/{k}", array.tobytes() if stored is None else stored)


def pickled(arrays):
    """The pickle of a dict of float32 tensors, protocol 2, by hand."""

    def text(value):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    def numbers(values):
        return b"(" + b"".join(b"J" + struct.pack("<i", v) for v in values) + b"t"

    out = b"\x80\x02}("
    for k, (name, array) in enumerate(arrays.items()):
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(str(k)) + text("cpu")
        storage += b"J" + struct.pack("<i", array.size) + b"tQ"
        strides = [step // 4 for step in array.strides]
        sizes = b"K\x00" + numbers(array.shape) + numbers(strides) + b"\x89"
        empty = b"ccollections\nOrderedDict\n)R"
        out += (
            text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + sizes + empty + b"tR"
        )
    return out + b"u."
