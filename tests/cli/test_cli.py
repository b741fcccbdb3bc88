"""The command line: what its commands write, and what they say of bad usage."""

import contextlib
import gzip
import importlib
import io
import json
import lzma
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jax_tt
from jax_tt.cli import main
from jax_tt.cli._arguments import byte_size
from jax_tt.order import IdOrder
from tests.cli.cli_case import QUIET, D, N, folder, ran, refused, table, write_torch

__all__ = ["folder", "table"]  # fixtures

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")


def error_of(found, rows):
    table, state = found
    dense = np.asarray(jax_tt.tables.to_dense(table, state), np.float64)
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
    (found,) = jax_tt.files.load(out).values()
    ((error, _),) = jax_tt.files.load_errors(out).values()
    rows = np.load("table.npy")
    assert jax_tt.tables.innermost(found[0]).shape.ranks == (2, 2)
    assert error_of(found, rows) < 1e-2
    assert abs(error - error_of(found, rows)) < 1e-5
    layer = jax_tt.TTEmbed.from_pretrained(found)
    ids = np.array([0, 7, N - 1])
    np.testing.assert_allclose(layer(ids), rows[ids], atol=0.05)
    capsys.readouterr()
    ran("info", out, "--against", "table.npy", QUIET)
    heading, line = capsys.readouterr().out.strip().splitlines()
    nbytes = sum(core.nbytes for core in found[0].spec.params(found[1])) + ordered * 2 * N
    assert f"{nbytes:,}" in line.split() and f"{error:.3g}" in line.split()
    assert "error" in heading and ("ordered" in line) == ordered


def test_compress_writes_sums(table, capsys):
    """What is read back adds up to the table, in layers too, and takes no more than was asked for."""
    out = "sum"
    args = ["--residuals", "--max-bytes", "2500", "--dtype", "bfloat16", "--picture", "e.png"]
    ran("compress", "table.npy", "--out", out, *args, QUIET)
    printed = capsys.readouterr().out
    found = jax_tt.files.load(out)
    assert list(found) == ["table"]
    layer = jax_tt.TableEmbed.from_pretrained(out)
    rows = np.asarray(layer(np.arange(N)), np.float32)
    assert sum(array.nbytes for array in layer.state().values()) <= 2500
    error, _ = jax_tt.files.load_errors(out)["table"]
    np.testing.assert_allclose(
        np.linalg.norm(rows - table) / np.linalg.norm(table), error, rtol=1e-2
    )
    terms = len(layer.table.tables)
    assert terms > 1 and f"a sum of {terms} tensor trains" in printed
    assert f"term {terms - 1}: rank" in printed and f"the sum {error:.3g}" in printed
    ran("info", out, "--against", "table.npy", QUIET)
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"sum of {terms} tensor trains" in line and f"{error:.3g}" in line.split()
    assert Path("e.png").read_bytes()[:4] == b"\x89PNG"


def test_sums_that_do_not_fit(table, capsys):
    for more, message in [
        (["--ranks", "2"], "--residuals: got no --max-bytes; expected the bytes of all cores"),
        (["--max-bytes", "100"], "max_bytes: got 100 bytes for 300 x 8; expected at least"),
        (["--max-bytes", "4kB", "--row-factors", "11,11"], "--row-factors: got with --residuals"),
        (["--max-bytes", "4kB", "--weights", "w", "--order", "o"], "--order, --weights: got with"),
    ]:
        argv = ["compress", "table.npy", "--out", "o.safetensors", "--residuals", QUIET, *more]
        assert message in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "size"), [("500000", 500_000), ("1.5MB", 1_500_000), ("3kB", 3000), ("2KiB", 2048)]
)
def test_sizes_are_decimal_or_binary(text, size):
    assert byte_size(text) == size


def test_compress_by_tolerance_bytes_and_weights(table, capsys):
    ran("compress", "table.npy", "--out", "a.safetensors", "--tolerance", "0.01", QUIET)
    assert jax_tt.files.load_errors("a.safetensors")["table"][0] <= 0.01
    np.save("weights.npy", np.arange(N))
    args = ["--max-bytes", "1.5kB", "--row-factors", "7,7,7", "--col-factors", "2,2,2"]
    args += ["--weights", "weights.npy", "--picture", "e.png", QUIET]
    ran("compress", "table.npy", "--out", "b.safetensors", *args)
    found, _ = jax_tt.files.load("b.safetensors")["table"]
    assert found.shape.cost().bytes <= 1500
    assert Path("e.png").read_bytes()[:4] == b"\x89PNG"
    assert "by weight" in capsys.readouterr().out


def test_weights_go_with_their_rows_into_an_order(table):
    """The train is that of the rows in the order, with their weights and not with those of other rows."""
    draw = np.random.default_rng(4)
    order, weights = IdOrder(draw.permutation(N)), draw.uniform(0, 9, N)
    order.save("order.npz")
    np.save("weights.npy", weights)
    np.save("ids.npy", table[order.rows])
    more = ["--ranks", "1", "--order", "order.npz", "--weights", "weights.npy", QUIET]
    ran("compress", "ids.npy", "--out", "a.safetensors", *more)
    found, state = jax_tt.files.load("a.safetensors")["table"]
    assert found.id_order == order
    given = weights[order.inverse.rows], weights
    own, other = (jax_tt.tt.from_dense(table, 1, weights=w).cores for w in given)
    for core, wanted, unwanted in zip(found.spec.params(state), own, other, strict=True):
        np.testing.assert_allclose(core, wanted, rtol=1e-5, atol=1e-6)
        assert np.abs(np.abs(core) - np.abs(unwanted)).max() > 0.01


def test_formats_hold_the_same_table(table, capsys):
    from safetensors.numpy import save_file

    np.savez_compressed("t.npz", item=table, other=np.arange(3))
    save_file({"item": table, "other": np.arange(3)}, "t.safetensors")
    write_torch("t.pt", {"item": table})
    lines = set()
    for path in ("t.npz", "t.safetensors", "t.pt"):
        out = f"{path}.safetensors"
        ran("compress", path, "--out", out, "--ranks", "2", "--name", "item", QUIET)
        assert error_of(jax_tt.files.load(out)["item"], table) < 1e-2
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
    from jax_tt._formats.mapped import open_arrays

    stored = open_arrays("t.pt")
    assert sorted(stored.arrays) == ["half", "model.weight", "nested.0"]
    np.testing.assert_array_equal(stored["model.weight"].read(), table)
    wanted = state["half"].float().numpy()
    np.testing.assert_array_equal(np.asarray(stored["half"].read(), np.float32), wanted)
    np.testing.assert_array_equal(stored["nested.0"].read(), table[:2])
    torch.save(torch.nn.Linear(2, 2), "module.pt")
    assert "names torch.nn.modules.linear.Linear" in refused(capsys, "info", "module.pt")
    torch.save(state, "legacy.pt", _use_new_zipfile_serialization=False)
    assert "is a bare pickle" in refused(capsys, "info", "legacy.pt")


def test_layers_checkpoints_are_read(folder, capsys):
    import orbax.checkpoint as ocp

    order = IdOrder(np.arange(N)[::-1])
    layers = {"items": jax_tt.TTEmbedBag(N, D, tt_ranks=2, id_order=order, rngs=nnx.Rngs(0))}
    state = {name: nnx.to_pure_dict(nnx.state(layer)) for name, layer in layers.items()}
    with ocp.CheckpointManager(folder / "run") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))
    found, state = jax_tt.files.load("run")["items"]
    assert (
        jax_tt.tables.innermost(found).shape == layers["items"].tt_shape and found.id_order == order
    )
    for core, wanted in zip(found.spec.params(state), layers["items"].cores, strict=True):
        np.testing.assert_array_equal(core, wanted)
    ran("info", "run")
    assert "items" in capsys.readouterr().out


def test_compress_takes_rows_of_safetensors_in_any_order(table):
    from safetensors.numpy import save_file

    save_file({"t": table, "empty": np.zeros((0, 3), np.float32)}, "t.safetensors")
    IdOrder(np.arange(N)[::-1]).save("order.npz")
    more = ["--order", "order.npz", "--ranks", "2", QUIET]
    ran("compress", "t.safetensors", "--name", "t", "--out", "a.safetensors", *more)
    ran("compress", "table.npy", "--out", "b.safetensors", *more)
    one, other = (jax_tt.files.load(f"{name}.safetensors").popitem()[1][1] for name in "ab")
    jax.tree.map(np.testing.assert_array_equal, one, other)


# order


def pairs():
    rng = np.random.default_rng(2)
    users = rng.integers(0, 60, 3000)
    return users, rng.integers(0, 20, 3000) * 3 + users % 3  # three groups of 20 items, scattered


def test_order_of_interactions(folder, capsys):
    users, items = pairs()
    np.save("pairs.npy", np.stack([users, items], axis=1))
    lines = "".join(f"{u} {i}\n" for u, i in zip(users, items, strict=True))
    Path("pairs.txt").write_text(lines)
    lists = "\n".join(" ".join(map(str, [u, *items[users == u]])) for u in range(60))
    Path("lists.txt.gz").write_bytes(gzip.compress(lists.encode()))
    windows = lines.replace(" ", ",").replace("\n", "\r\n")
    Path("pairs.csv.xz").write_bytes(lzma.compress(windows.encode()))
    for kind in ("pairs.npy", "pairs.txt", "lists.txt.gz", "pairs.csv.xz"):
        more = ["--row-factors", "3,20", "--force", QUIET]
        more += ["--picture", "p.png"] if kind == "pairs.npy" else []
        ran("order", kind, "--out", "order.npz", *more)
        digits = IdOrder.load("order.npz").apply(np.arange(60)) // 20
        assert [len(set(digits[group::3])) for group in range(3)] == [1, 1, 1], kind
        assert np.load("order.npz")["row_factors"].tolist() == [3, 20]
        assert "3,000 interactions" in capsys.readouterr().out
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"


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


def test_bad_interactions(folder, capsys):
    for text, message in [
        ("", "is empty"),
        ("\n\n", "got no interactions"),
        ("1 2\n3 x4\n", "line 2 is '3 x4'"),
        ("user,item\n1,2\n", "line 1 is 'user,item'; expected integers >= 0 separated"),
        ("1 2\n3 -4\n", "line 2"),
        ("1 2.5\n", "line 1"),
        ("1 99999999999999999999\n", "number of 20 digits"),
        ("1 900000000000\n", "expected numbers near 0"),
        ("900000000000 1\n", "expected numbers near 0"),
    ]:
        Path("bad.txt").write_text(text)
        assert message in refused(capsys, "order", "bad.txt", "--out", "o.npz", QUIET)
        assert os.listdir() == ["bad.txt"]
    for name, data in {
        "a.xz": lzma.compress(b"1 2\n" * 5000),
        "b.gz": gzip.compress(np.random.default_rng(0).bytes(99).hex().encode()),
    }.items():
        Path(name).write_bytes(data[: len(data) // 2])
        assert "damaged or cut short" in refused(capsys, "order", name, "--out", "o.npz", QUIET)


# plan


def test_plan(table, capsys):
    np.savez("trained.npz", item=table, other=table)
    Path("tables.toml").write_text(
        "[users]\nnum_embeddings = 100_000\nfeatures = 16\n[trained]\nfile = 'trained.npz'\nname = 'item'\n"
    )
    Path("ids.txt").write_text("0 5\n1 5\n" * 50)
    args = ["--budget", "100kB", "--ids", "users=ids.txt", "--kinds", QUIET]
    ran("plan", "--tables", "tables.toml", *args)
    users, trained = capsys.readouterr().out.splitlines()[1:3]
    assert users.split()[:3] == ["users", "tensor", "train"] and "~" in users
    assert trained.startswith("trained") and "~" not in trained
    np.savez("trained.npz", item=np.random.default_rng(0).normal(size=(500, 16)))
    ran("plan", "--tables", "tables.toml", "--budget", "20kB", "--kinds", "quantized", QUIET)
    trained = capsys.readouterr().out.splitlines()[2]
    assert "quantized, " in trained and "bits a number" in trained


def test_plan_by_the_rows_to_start_from(folder, capsys):
    users, items = pairs()
    Path("pairs.txt").write_text("".join(f"{i} {u}\n" for u, i in zip(users, items, strict=True)))
    entry = "[items]\nnum_embeddings = 60\nfeatures = 8\ninteractions = 'pairs.txt'\ncolumn = 0\n"
    Path("tables.toml").write_text(entry)
    ran("plan", "--tables", "tables.toml", "--budget", "700", "--kinds", QUIET)
    found = capsys.readouterr().out.splitlines()[1]
    rows = jax_tt.order.spectral_rows((users, items), 60, 8, progress=False)[1]
    (planned,) = jax_tt.plan({"items": rows}, 700, kinds=()).values()
    assert "~" not in found and f" {planned.error:.3g} " in found and planned.kind in found
    Path("tables.toml").write_text(entry.replace("column = 0", "column = 2"))
    message = refused(capsys, "plan", "--tables", "tables.toml", "--budget", "700", QUIET)
    assert "items has column 2; expected 1 or 0" in message


def test_bad_plans(folder, capsys):
    for text, message in [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "holds no object"),
        ('{"a": {"num_embeddings": 3}}', "expected num_embeddings and features"),
        ('{"a": {"file": "nothing.npy"}}', "no such file"),
        ('{"a": {"num_embeddings": "x", "features": 2}}', "expected an integer"),
        ('{"a": {"num_embeddings": 1000000, "features": 64}}', "expected at least"),
    ]:
        Path("t.json").write_text(text)
        assert message in refused(capsys, "plan", "--tables", "t.json", "--budget", "500", QUIET)


# several devices


def test_measure_and_plan_on_devices(folder, capsys, monkeypatch):
    def measured(mesh, axis, *, progress):
        return jax_tt.planning.Bandwidths(exchange=2e9, machine=f"{mesh.shape[axis]} devices")

    monkeypatch.setattr("jax_tt.cli.measure.measure_bandwidths", measured)
    ran("measure", "--devices", "2", "--out", "machine.json", QUIET)
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    found = jax_tt.planning.Bandwidths.load("machine.json")
    assert printed.pop("machine") == found.machine
    assert found.machine == "2 devices" and found.exchange == 2e9
    assert printed == {name: format(getattr(found, name), ".3g") for name in printed}
    assert set(printed) == {"exchange", "message_seconds", "gather", "update", "route"}
    again = ["measure", "--devices", "2", "--out", "machine.json", QUIET]
    assert "machine.json" in refused(capsys, *again)
    ran(*again, "--force")
    for count in "1", "1000":
        message = refused(capsys, "measure", "--devices", count, "--out", "other.json", QUIET)
        assert f"--devices: got {count}; expected 2 to " in message
    with monkeypatch.context() as patch:
        patch.setattr("jax.device_count", lambda: 1)
        message = refused(capsys, "measure", "--out", "other.json", QUIET)
    assert "--devices: got none, and there is one device" in message
    assert not Path("other.json").exists()
    capsys.readouterr()

    Path("tables.toml").write_text(
        "[users]\nnum_embeddings = 100_000\nfeatures = 16\n[days]\nnum_embeddings = 7\nfeatures = 4\n"
    )
    ids = np.random.default_rng(0).integers(0, 100_000, (2 * 64, 4))
    np.save("ids.npy", ids)
    sampled = ["--ids", "users=ids.npy", "--steps", "2", "--optimizer", "adam"]
    args = ["plan", "--tables", "tables.toml", "--devices", "4", QUIET]
    ran(*args, *sampled, "--bandwidths", "machine.json", "--picture", "pages.png")
    out = capsys.readouterr().out
    tables = {
        name: jax_tt.dense_table(*sizes, optimizer=jax_tt.optimizers.Adam(0.1))
        for name, sizes in {"users": (100_000, 16), "days": (7, 4)}.items()
    }
    bandwidths = jax_tt.planning.Bandwidths.load("machine.json")
    expected = jax_tt.planning.plan_placements(
        tables, 4, {"users": ids.reshape(-1)}, steps=2, bandwidths=bandwidths
    )
    assert str(expected) in out
    assert Path("pages.png").stat().st_size > 1000
    assert "Use more devices" in refused(capsys, *args, "--device-memory", "1kB")
    assert "machine.toml" in refused(capsys, *args, "--bandwidths", "machine.toml")
    alone = [word for word in args if word not in ("--devices", "4")]
    assert "expected --devices N" in refused(
        capsys, *alone, "--budget", "1MB", "--picture", "p.png"
    )


def test_usage_errors(folder, capsys):
    for argv in [
        [],
        ["order"],
        ["compress", "t.npy"],
        ["compress", "t", "--out", "o", "--max-bytes", "2XB"],
    ]:
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
        assert "usage: jax-tt" in capsys.readouterr().err


def test_missing_packages_are_named(table, capsys, monkeypatch):
    real = importlib.import_module

    def import_module(name, *args):
        if name.partition(".")[0] in ("orbax", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", import_module)
    run = ["compress", "table.npy", "--out", "checkpoint", "--ranks", "2", QUIET]
    assert "pip install 'jax-tt[cli]'" in refused(capsys, *run)
    run[3] = "o.safetensors"
    assert "pip install 'jax-tt[cli]'" in refused(capsys, *run, "--picture", "p.png")


def test_progress_goes_to_stderr(table, capsys):
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        ran("compress", "table.npy", "--out", "o.safetensors", "--ranks", "2")
    assert "block" in shown.getvalue()
    assert "block" not in capsys.readouterr().out


def test_info_counts_optimizer_state_apart(folder, capsys):
    rng = np.random.default_rng(0)
    cores = {"core_0": rng.normal(size=(10, 1, 2, 3)), "core_1": rng.normal(size=(10, 3, 4, 1))}
    moments = {f"opt.opt_state.0.mu.items.{name}": 0 * core for name, core in cores.items()}
    params = {f"model.items.{name}": core for name, core in cores.items()}
    slots = {"model.shops.embedding": np.ones((5, 4)), "model.shops.slot_sum_0": np.ones((5, 4))}
    np.savez(
        "model.npz", **{k: v.astype(np.float32) for k, v in (params | moments | slots).items()}
    )
    ran("info", "model.npz", QUIET)
    _, *lines, last = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["model.items", "model.shops.embedding"]
    assert last == "optimizer state: 3 arrays of 800 bytes"
    ran("info", "model.npz", "--json", QUIET)
    found = json.loads(capsys.readouterr().out)
    assert found["optimizer state"] == {"arrays": 3, "bytes": 800}
    train, dense = found["tables"]
    assert (train["table"], train["kind"], train["rows"], train["ranks"]) == (
        "model.items", "tensor train", 100, [3],
    )  # fmt: skip
    assert (dense["kind"], dense["rows"], dense["bytes"]) == ("dense", 5, 80)
    assert list(jax_tt.files.load("model.npz")) == ["model.items"]
