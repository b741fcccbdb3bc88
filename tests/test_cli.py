"""The command line: what its commands write, and one line for every file that is no good."""

import contextlib
import gzip
import importlib
import io
import lzma
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import jax_tt
from jax_tt.cli import main
from jax_tt.order import IdOrder

pytest.importorskip("safetensors")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

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
    rows = np.asarray(jax_tt.tt_to_dense([c.astype(np.float32) for c in cores], N))
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


def error_of(found, rows):
    dense = np.asarray(jax_tt.tt_to_dense(found.cores, len(rows)), np.float64)
    if found.id_order is not None:
        dense = dense[found.id_order.rows]
    return np.linalg.norm(dense - rows) / np.linalg.norm(rows)


# compress and info


@pytest.mark.parametrize("out", ["model.safetensors", "checkpoint"])
@pytest.mark.parametrize("ordered", [False, True])
def test_compress_writes_what_info_and_layers_read(table, capsys, out, ordered):
    order = IdOrder(np.random.default_rng(1).permutation(N))
    order.save("order.npz")
    np.save("table.npy", table if not ordered else table[order.rows])
    more = ["--order", "order.npz"] if ordered else []
    ran("compress", "table.npy", "--out", out, "--ranks", "2", QUIET, *more)
    (found,) = jax_tt.load_tables(out).values()
    rows = np.load("table.npy")
    assert found.shape.ranks == (2, 2)
    assert error_of(found, rows) < 1e-2
    assert abs(found.relative_error - error_of(found, rows)) < 1e-5
    layer = jax_tt.TTEmbed(**found.arguments(), rngs=nnx.Rngs(0))
    for k, core in enumerate(found.cores):
        getattr(layer, f"core_{k}")[...] = core
    ids = np.array([0, 7, N - 1])
    np.testing.assert_allclose(layer(ids), rows[ids], atol=0.05)
    capsys.readouterr()
    ran("info", out, "--against", "table.npy", QUIET)
    heading, line = capsys.readouterr().out.strip().splitlines()
    nbytes = sum(core.nbytes for core in found.cores) + ordered * 4 * N
    assert f"{nbytes:,}" in line.split() and f"{found.relative_error:.3g}" in line.split()
    assert "error" in heading and ("ordered" in line) == ordered


def test_compress_by_tolerance_bytes_and_weights(table, capsys):
    ran("compress", "table.npy", "--out", "a.safetensors", "--tolerance", "0.01", QUIET)
    assert jax_tt.load_tables("a.safetensors")["table"].relative_error <= 0.01
    np.save("weights.npy", np.arange(N))
    args = ["--max-bytes", "1.5kB", "--weights", "weights.npy", "--picture", "e.png", QUIET]
    ran("compress", "table.npy", "--out", "b.safetensors", *args)
    found = jax_tt.load_tables("b.safetensors")["table"]
    assert found.shape.cost().bytes <= 1500
    assert Path("e.png").read_bytes()[:4] == b"\x89PNG"
    assert "by weight" in capsys.readouterr().out


def test_formats_hold_the_same_table(table, capsys):
    from safetensors.numpy import save_file

    np.savez_compressed("t.npz", item=table, other=np.arange(3))
    save_file({"item": table, "other": np.arange(3)}, "t.safetensors")
    write_torch("t.pt", {"item": table})
    lines = set()
    for path in ("t.npz", "t.safetensors", "t.pt"):
        out = f"{path}.safetensors"
        ran("compress", path, "--out", out, "--ranks", "2", "--name", "item", QUIET)
        assert error_of(jax_tt.load_tables(out)["item"], table) < 1e-2
        capsys.readouterr()
        ran("info", path)
        lines.add(capsys.readouterr().out.splitlines()[1])
    assert len(lines) == 1


def test_torch_wrote_the_file(table, capsys):
    torch = pytest.importorskip("torch")
    weights = torch.tensor(table)
    state = {
        "model": torch.nn.Embedding.from_pretrained(weights).state_dict(),
        "half": weights.to(torch.bfloat16)[10:20, ::2].t(),
        "nested": [
            torch.nn.Parameter(weights[:2]),
            {"step": 7, "lr": 0.5, "on": True, "none": None},
        ],
    }
    torch.save(state, "t.pt")
    from jax_tt._files.arrays import open_arrays

    stored = open_arrays("t.pt")
    assert sorted(stored.arrays) == ["half", "model.weight", "nested.0"]
    np.testing.assert_array_equal(stored["model.weight"].read(), table)
    wanted = state["half"].float().numpy()
    np.testing.assert_array_equal(np.asarray(stored["half"].read(), np.float32), wanted)
    np.testing.assert_array_equal(stored["nested.0"].read(), table[:2])
    torch.save(torch.nn.Linear(2, 2), "module.pt")
    assert "names torch.nn.modules.linear.Linear" in refused(capsys, "info", "module.pt")
    torch.save(state, "legacy.pt", _use_new_zipfile_serialization=False)
    assert "legacy.pt" in refused(capsys, "info", "legacy.pt")


def test_layers_checkpoints_are_read(folder, capsys):
    import orbax.checkpoint as ocp

    order = IdOrder(np.arange(N)[::-1])
    layers = {"items": jax_tt.TTEmbedBag(N, D, tt_ranks=2, id_order=order, rngs=nnx.Rngs(0))}
    state = {name: nnx.to_pure_dict(nnx.state(layer)) for name, layer in layers.items()}
    with ocp.CheckpointManager(folder / "run") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))
    found = jax_tt.load_tables("run")["items"]
    assert found.shape == layers["items"].tt_shape and found.id_order == order
    for core, wanted in zip(found.cores, layers["items"].cores, strict=True):
        np.testing.assert_array_equal(core, wanted)
    ran("info", "run")
    assert "items" in capsys.readouterr().out


# order


def pairs():
    rng = np.random.default_rng(2)
    users = rng.integers(0, 60, 3000)
    return users, rng.integers(0, 20, 3000) * 3 + users % 3  # three groups of 20 items, scattered


@pytest.mark.parametrize("kind", ["pairs.txt", "lists.txt.gz", "pairs.csv.xz", "pairs.npy"])
def test_order_of_interactions(folder, kind, capsys):
    users, items = pairs()
    lines = "".join(f"{u} {i}\n" for u, i in zip(users, items, strict=True))
    lists = "\n".join(" ".join(map(str, [u, *items[users == u]])) for u in range(60))
    if kind == "pairs.npy":
        np.save(kind, np.stack([users, items], axis=1))
    elif kind.endswith(".gz"):
        Path(kind).write_bytes(gzip.compress(lists.encode()))
    elif kind.endswith(".xz"):
        Path(kind).write_bytes(
            lzma.compress(lines.replace(" ", ",").replace("\n", "\r\n").encode())
        )
    else:
        Path(kind).write_text(lines)
    args = ["--row-factors", "3,20", "--picture", "p.png", QUIET]
    ran("order", kind, "--out", "order.npz", *args)
    digits = IdOrder.load("order.npz").apply(np.arange(60)) // 20
    assert [len(set(digits[group::3])) for group in range(3)] == [1, 1, 1]
    assert np.load("order.npz")["row_factors"].tolist() == [3, 20]
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"
    assert "3,000 interactions" in capsys.readouterr().out


def test_order_by_other_methods(table, capsys):
    users, items = pairs()
    np.savetxt("pairs.txt", np.stack([users, items], axis=1), fmt="%d")
    ran(
        "order",
        "pairs.txt",
        "--method",
        "counts",
        "--out",
        "c.npz",
        "--num-embeddings",
        "70",
        QUIET,
    )
    counts = np.bincount(items, minlength=70)
    assert IdOrder.load("c.npz") == jax_tt.order.from_counts(counts)
    args = ["--method", "counts", "--column", "0", "--out", "u.npz", "--picture", "u.png", QUIET]
    ran("order", "pairs.txt", *args)
    assert IdOrder.load("u.npz") == jax_tt.order.from_counts(np.bincount(users))
    ran("order", "table.npy", "--method", "table", "--out", "t.npz", "--picture", "t.png", QUIET)
    shape = jax_tt.TTShape.suggest(N, D)
    assert IdOrder.load("t.npz") == jax_tt.order.from_table(table, shape, progress=False)
    np.save("tree.npy", np.arange(N)[:, None] % 5)
    ran("order", "tree.npy", "--method", "tree", "--out", "r.npz", QUIET)
    assert IdOrder.load("r.npz") == jax_tt.order.from_tree(
        np.arange(N) % 5, jax_tt.TTShape.suggest(N, 64)
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n", "holds no interactions"),
        ("1 2\n3 x4\n", "line 2 is b'3 x4'"),
        ("1 2\n3 -4\n", "line 2"),
        ("1 2.5\n", "line 1"),
        ("1 99999999999999999999\n", "number of 20 digits"),
        ("1 900000000000\n", "expected numbers near 0"),
        ("900000000000 1\n", "expected numbers near 0"),
    ],
)
def test_bad_interactions(folder, capsys, text, message):
    Path("bad.txt").write_text(text)
    assert message in refused(capsys, "order", "bad.txt", "--out", "o.npz", QUIET)
    assert os.listdir() == ["bad.txt"]


def test_interactions_cut_short(folder, capsys):
    whole = (
        lzma.compress(b"1 2\n" * 5000),
        gzip.compress(np.random.default_rng(0).bytes(99).hex().encode()),
    )
    for name, data in zip(("a.xz", "b.gz"), whole, strict=True):
        Path(name).write_bytes(data[: len(data) // 2])
        assert "damaged or cut short" in refused(capsys, "order", name, "--out", "o.npz", QUIET)


# plan


def test_plan(table, capsys):
    np.savez("trained.npz", item=table, other=table)
    Path("tables.toml").write_text(
        "[users]\nnum_embeddings = 100_000\nfeatures = 16\n[trained]\nfile = 'trained.npz'\nname = 'item'\n"
    )
    Path("ids.txt").write_text("0 5\n1 5\n" * 50)
    args = ["--budget", "100kB", "--ids", "users=ids.txt", QUIET]
    ran("plan", "--tables", "tables.toml", *args)
    users, trained = capsys.readouterr().out.splitlines()[1:3]
    assert users.split()[:3] == ["users", "tensor", "train"] and "~" in users
    assert trained.startswith("trained") and "~" not in trained


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "holds no object"),
        ('{"a": {"num_embeddings": 3}}', "expected num_embeddings and features"),
        ('{"a": {"file": "nothing.npy"}}', "no such file"),
        ('{"a": {"num_embeddings": "x", "features": 2}}', "expected an integer"),
        ('{"a": {"num_embeddings": 1000000, "features": 64}}', "expected at least"),
    ],
)
def test_bad_plans(folder, capsys, text, message):
    Path("t.json").write_text(text)
    assert message in refused(capsys, "plan", "--tables", "t.json", "--budget", "500", QUIET)


# Files that are no good


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


class Hostile:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self):
        return os.system, ("touch owned",)


@pytest.mark.parametrize("protocol", range(6))
def test_no_pickle_is_run(folder, capsys, protocol):
    program = pickle.dumps({"w": Hostile()}, protocol)
    write_torch("hostile.pt", {}, program)
    np.save("hostile.npy", np.array([Hostile()], object))
    np.savez("hostile.npz", w=np.array([Hostile()], object))
    Path("raw.pt").write_bytes(program)
    for path in ("hostile.pt", "hostile.npy", "hostile.npz", "raw.pt"):
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


def test_hostile_tensors(table, capsys):
    arrays = {"w": table}
    good = pickled(arrays)
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


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
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
        ("a.npz", b"PK\x03\x04 and then nothing", "is no whole npz file"),
        ("a.pt", b"PK\x03\x04 and then nothing", "is no whole torch file"),
        ("a.pt", b"\x80\x02.", "is no whole torch file"),
        ("a.safetensors", b"\xff" * 8 + b"{}", "is no whole safetensors file"),
        ("a.safetensors", struct.pack("<Q", 2) + b"[]", "is no whole safetensors file"),
        (
            "a.safetensors",
            struct.pack("<Q", 58) + b'{"w":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}',
            "is no whole safetensors file",
        ),
        ("a.bin", b"x", "unknown format .bin"),
        ("a", b"x", "unknown format"),
    ],
)
def test_damaged_files(folder, capsys, name, data, message):
    Path(name).write_bytes(data)
    assert message in refused(capsys, "info", name)
    refused(capsys, "compress", name, "--out", "o.safetensors", "--ranks", "2", QUIET)
    assert os.listdir() == [name]


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
        zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("w.npy", "w") as file,
    ):
        file.write(header)
        for _ in range(2**7):
            file.write(bytes(2**20))
    assert "zip bomb" in refused(capsys, "info", "bomb.npz")
    with zipfile.ZipFile("bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("t/data.pkl", b"\x80\x02." + bytes(2**27))
    assert "bomb.pt" in refused(capsys, "info", "bomb.pt")


def test_checkpoints_that_would_grow(folder, capsys):
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(folder / "zeros", {"w": np.zeros((2**22, 5), np.float32)})
    assert "w claims 83,886,080 bytes" in refused(capsys, "info", "zeros")


def test_damaged_checkpoints(table, capsys):
    assert "no such file" in refused(capsys, "info", "nothing")
    os.mkdir("empty")
    assert "without an orbax checkpoint" in refused(capsys, "info", "empty")
    os.mkdir("odd")
    Path("odd/_METADATA").write_text("{")
    assert "is no whole orbax checkpoint" in refused(capsys, "info", "odd")
    ran("compress", "table.npy", "--out", "two/a", "--ranks", "1", QUIET)
    ran("compress", "table.npy", "--out", "two/b", "--ranks", "1", QUIET)
    assert "holds 2 checkpoints; expected one of them: a, b" in refused(capsys, "info", "two")
    assert "exists" in refused(
        capsys, "compress", "table.npy", "--out", "two", "--ranks", "1", QUIET
    )
    data = [path for path in Path("two/a").rglob("d/*") if path.is_file()]
    for path in data:
        path.write_bytes(path.read_bytes()[:40])
    refused(capsys, "info", "two/a", "--against", "table.npy", QUIET)
    for path in data:
        path.unlink()
    refused(capsys, "info", "two/a", "--against", "table.npy", QUIET)


def test_tables_that_do_not_fit(table, capsys):
    run = ["compress", "table.npy", "--out", "o.safetensors"]
    broken = table.copy()
    broken[17, 3] = np.nan
    np.save("nan.npy", broken)
    assert "row 17 holds NaN" in refused(
        capsys, "compress", "nan.npy", *run[2:], "--ranks", "2", QUIET
    )
    IdOrder(np.arange(N)[::-1]).save("order.npz")
    by_order = ["--order", "order.npz", "--ranks", "2", QUIET]
    assert "the row of id 17" in refused(capsys, "compress", "nan.npy", *run[2:], *by_order)
    np.save("short.npy", table[:-1])
    assert "orders 300 ids; expected 299" in refused(
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
    assert jax_tt.load_tables("good.npz")["x"].shape.num_embeddings == 20
    np.savez("bad.npz", **{"x.core_0": a, "x.core_1": b[:, :2]})
    assert "do not fit together" in refused(capsys, "info", "bad.npz")
    np.savez("nan.npz", **{"x.core_0": a * np.nan, "x.core_1": b})
    with pytest.raises(ValueError, match=r"x\.core_0 holds NaN"):
        jax_tt.load_tables("nan.npz")
    np.savez("order.npz", **{"x.core_0": a, "x.core_1": b, "x.id_order": np.zeros(20, int)})
    with pytest.raises(ValueError, match="is no order of ids"):
        jax_tt.load_tables("order.npz")
    np.savez("none.npz", w=a)
    with pytest.raises(ValueError, match="holds no tensor-train table"):
        jax_tt.load_tables("none.npz")
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


@pytest.mark.parametrize(
    "argv",
    [[], ["order"], ["compress", "t.npy"], ["compress", "t", "--out", "o", "--max-bytes", "2XB"]],
)
def test_usage_errors(folder, capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: jax-tt" in capsys.readouterr().err


def test_missing_packages_are_named(table, capsys, monkeypatch):
    real = importlib.import_module

    def import_module(name, *args):
        if name.partition(".")[0] in ("safetensors", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", import_module)
    run = ["compress", "table.npy", "--out", "o.safetensors", "--ranks", "2", QUIET]
    assert "pip install 'jax-tt[cli]'" in refused(capsys, *run)
    run[3] = "checkpoint"
    assert "pip install 'jax-tt[cli]'" in refused(capsys, *run, "--picture", "p.png")


def test_progress_goes_to_stderr(table, capsys):
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        ran("compress", "table.npy", "--out", "o.safetensors", "--ranks", "2")
    assert "block" in shown.getvalue()
    assert "block" not in capsys.readouterr().out
