"""What is written: never over an input, over an older file only when told to, and whole or not at all."""

import contextlib
import errno
import os
import resource
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_tt
from jax_tt._formats import output
from jax_tt.cli import compress, main
from jax_tt.order import IdOrder
from tests.cli.cli_case import QUIET, N, folder, ran, refused, table

__all__ = ["folder", "table"]  # fixtures

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")


def contents(place="."):
    """Every file below a folder, with what is in it; links by where they lead."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(Path(place).rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def inputs(table):
    """Everything that the commands read, in the folder."""
    from safetensors.numpy import save_file

    save_file({"item": table}, "dense.safetensors")
    order = IdOrder(np.arange(N)[::-1])
    order.save("order.npz")
    np.savez("own.npz", pairs=np.stack([np.arange(N) % 7, np.arange(N)], axis=1))
    np.save("weights.npy", np.ones(N))
    cores = jax_tt.tt.from_dense(table, 1)
    jax_tt.files.save("ckpt", {"item": jax_tt.tt.to_table(cores)})
    os.symlink("dense.safetensors", "link.safetensors")
    os.symlink(".", "here")
    os.link("dense.safetensors", "hard.safetensors")
    return contents()


@pytest.fixture
def no_work(monkeypatch):
    """What is refused is refused before anything is computed."""

    def fail(*args, **options):
        raise AssertionError("the work began")

    monkeypatch.setattr(compress, "tt_from_dense", fail)
    monkeypatch.setattr(compress, "read_table", fail)


COMPRESS = ("compress", "dense.safetensors", "--ranks", "2", QUIET)
ORDER = ("order", "own.npz", QUIET)


@pytest.mark.usefixtures("no_work")
def test_no_output_is_an_input(inputs, capsys):
    os.symlink("own.npz", "link.npz")
    for argv, message in [
        ((*COMPRESS, "--out", "dense.safetensors"), "is the same file as dense.safetensors"),
        ((*COMPRESS, "--out", "./dense.safetensors"), "is the same file as"),
        ((*COMPRESS, "--out", "here/dense.safetensors"), "is the same file as"),
        ((*COMPRESS, "--out", "link.safetensors"), "is the same file as"),
        ((*COMPRESS, "--out", "hard.safetensors"), "is the same file as"),
        (("compress", "link.safetensors", *COMPRESS[2:], "--out", "dense.safetensors"), "same"),
        ((*ORDER, "--out", "own.npz"), "is the same file as own.npz"),
        (("order", "link.npz", QUIET, "--out", "link.npz"), "is the same file as link.npz"),
        (("compress", "ckpt", *COMPRESS[2:], "--out", "ckpt"), "is the same file as ckpt"),
        (("compress", "ckpt", *COMPRESS[2:], "--out", "ckpt/x.safetensors"), "lies in ckpt"),
        ((*COMPRESS, "--out", "."), "is a directory that holds dense.safetensors"),
        ((*COMPRESS, "--out", ".."), "is a directory that holds"),
        ((*COMPRESS, "--out", "ckpt", "--order", "ckpt/_METADATA"), "that holds ckpt/_METADATA"),
        ((*COMPRESS, "--out", "ckpt", "--weights", "ckpt"), "is the same file as ckpt"),
        ((*COMPRESS, "--out", "new", "--picture", "new/p.png"), "new/p.png: lies in new"),
    ]:
        for force in ([], ["--force"]):
            assert message in refused(capsys, *argv, *force)
            assert contents() == inputs | {"link.npz": "own.npz"}


@pytest.mark.usefixtures("no_work")
def test_hopeless_outputs_are_refused_at_once(inputs, capsys):
    for name in ("other", "empty", "folder.safetensors", "mixed", "run"):
        os.mkdir(name)
    for name in ("table.safetensors", "old.png", "file", "other/thesis.txt", "mixed/_METADATA"):
        Path(name).write_text("old")
    Path("mixed/notes.txt").write_text("old")
    os.rename("ckpt", "run/ckpt")
    os.mkfifo("pipe.safetensors")
    os.symlink("/dev/null", "null.safetensors")
    before, listed = contents(), sorted(os.listdir())
    for argv, message in [
        ((*COMPRESS, "--out", "nodir/x.safetensors"), "there is no directory"),
        ((*COMPRESS, "--out", "nodir/ckpt"), "there is no directory"),
        ((*COMPRESS, "--out", "own.npz/x"), "there is no directory"),
        ((*COMPRESS, "--out", "x.safetensors", "--picture", "nodir/p.png"), "nodir/p.png: there"),
        ((*COMPRESS, "--out", "x.h5"), "suffix .h5"),
        ((*COMPRESS, "--out", ""), "got '' for the name of an output"),
        ((*COMPRESS, "--out", "x" * 256), "cannot be written (File name too long)"),
        ((*COMPRESS, "--out", "/proc/x.safetensors"), "/proc/x.safetensors: cannot be written"),
        ((*ORDER, "--out", "nodir/x.npz"), "there is no directory"),
        (
            (*COMPRESS, "--out", "table.safetensors"),
            "exists; expected a new name, or --force to replace it.",
        ),
        ((*COMPRESS, "--out", "other"), "exists; expected a new name, or --force to replace it."),
        ((*COMPRESS, "--out", "empty"), "exists; expected a new name, or --force to replace it."),
        ((*COMPRESS, "--out", "x.safetensors", "--picture", "old.png"), "old.png: exists"),
        ((*ORDER, "--out", "order.npz"), "order.npz: exists"),
        ((*ORDER, "--out", "x.npz", "--picture", "old.png"), "old.png: exists"),
        ((*COMPRESS, "--out", "folder.safetensors", "--force"), "is no regular file"),
        ((*COMPRESS, "--out", "pipe.safetensors", "--force"), "is no regular file"),
        ((*COMPRESS, "--out", "null.safetensors", "--force"), "is no regular file"),
        ((*COMPRESS, "--out", "file", "--force"), "is not an orbax checkpoint, or holds other"),
        ((*COMPRESS, "--out", "other", "--force"), "is not an orbax checkpoint, or holds other"),
        ((*COMPRESS, "--out", "mixed", "--force"), "is not an orbax checkpoint, or holds other"),
        ((*COMPRESS, "--out", "run", "--force"), "is not an orbax checkpoint, or holds other"),
    ]:
        assert message in refused(capsys, *argv)
        assert contents() == before and sorted(os.listdir()) == listed


@pytest.mark.parametrize("out", ["latest.safetensors", "link"])
def test_force_replaces(inputs, out):
    """Also what a link leads to; the link stays."""
    tables = {"old": jax_tt.files.load("ckpt")["item"]}
    jax_tt.files.save("old.safetensors", tables)
    jax_tt.files.save("old", tables)
    os.symlink("old.safetensors", "latest.safetensors")
    os.symlink("old", "link")
    Path("old.png").write_text("old")
    ran(*COMPRESS, "--out", out, "--force", "--picture", "old.png")
    written = "old.safetensors" if out.endswith("safetensors") else "old"
    assert list(jax_tt.files.load(written)) == ["item"]
    assert Path("old.png").read_bytes()[:4] == b"\x89PNG"
    links = {"latest.safetensors": "old.safetensors", "link": "old"}
    after = contents()
    kept = {name: after[name] for name in inputs | links}
    assert kept == inputs | links
    assert {Path(name).parts[0] for name in set(after) - set(kept)} == {
        "old",
        "old.safetensors",
        "old.png",
    }


def test_force_makes_what_is_not_there(inputs):
    ran(*ORDER, "--out", "new.npz", "--force")
    ran(*COMPRESS, "--out", "new", "--force")
    assert list(jax_tt.files.load("new")) == ["item"]
    assert os.stat("new.npz").st_nlink == 1
    mask = os.umask(0)
    os.umask(mask)
    assert os.stat("new.npz").st_mode & 0o777 == 0o666 & ~mask


WRITERS = {
    "safetensors": (*COMPRESS, "--out", "old.safetensors"),
    "orbax": (*COMPRESS, "--out", "old"),
    "order": (*ORDER, "--out", "old.npz"),
    "picture": (*COMPRESS, "--out", "made.safetensors", "--picture", "old.png"),
}


def existing(table):
    old = {"old": jax_tt.tt.to_table(jax_tt.tt.from_dense(table, 1))}
    jax_tt.files.save("old.safetensors", old)
    jax_tt.files.save("old", old)
    IdOrder(np.arange(5)).save("old.npz")
    Path("old.png").write_text("old")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
@pytest.mark.parametrize("where", ["flushed", "moved"])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_failure_leaves_what_was_there(
    inputs, table, capsys, monkeypatch, error, where, force, writer
):
    if force:
        existing(table)
    before, listed = contents(), sorted(os.listdir())

    def failing(real):
        def fail(place, *others):
            # The first output of two is complete by then.
            first = writer == "picture" and "made.safetensors" not in os.listdir()
            if str(place).endswith("/new") and not first:
                raise error
            return real(place, *others)

        return fail

    if where == "flushed":
        monkeypatch.setattr(output, "flush", failing(output.flush))
    else:
        # An old directory is aside by then.
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))
    argv = [*WRITERS[writer], *(["--force"] if force else [])]
    if isinstance(error, KeyboardInterrupt):
        assert main(argv) == 130
        assert capsys.readouterr().err == ""
    else:
        assert "cannot be written (No space left)" in refused(capsys, *argv)
    made = {"made.safetensors"} if writer == "picture" else set()
    after = contents()
    assert {name: after[name] for name in set(after) - made} == before
    assert set(os.listdir()) - made == set(listed)


@contextlib.contextmanager
def largest_file(size):
    """A disk that is full after so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full(inputs, capsys):
    before, listed = contents(), sorted(os.listdir())
    for writer in ("safetensors", "orbax", "order"):
        with largest_file(64):
            message = refused(capsys, *WRITERS[writer])
        assert "cannot be written" in message
        assert contents() == before and sorted(os.listdir()) == listed


def test_two_programs_write_the_same_new_file(table, tmp_path):
    """One of them makes it, the others are told; what is there is whole."""
    tables = {"t": jax_tt.tt.to_table(jax_tt.tt.from_dense(table, 2))}
    outcomes = []

    def write(start, path):
        start.wait()
        try:
            jax_tt.files.save(path, tables)
            outcomes.append("made")
        except FileExistsError:
            outcomes.append("exists")

    for path in [tmp_path / f"{k}.safetensors" for k in range(10)]:
        outcomes.clear()
        start = threading.Barrier(6)
        threads = [threading.Thread(target=write, args=(start, path)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["exists"] * 5 + ["made"]
        assert jax_tt.files.load(path)["t"][0] == tables["t"][0]
    assert not list(tmp_path.glob(".*"))


def test_what_came_to_be_since_is_kept(tmp_path):
    file, folder = tmp_path / "x.safetensors", tmp_path / "x"
    with (
        pytest.raises(jax_tt.FileError),
        output.writing(file, overwrite=False, directory=False) as new,
    ):
        Path(new).write_text("second")
        file.write_text("first")
    with (
        pytest.raises(jax_tt.FileError),
        output.writing(folder, overwrite=False, directory=True) as new,
    ):
        os.mkdir(new)
        os.mkdir(folder)
        (folder / "other").write_text("first")
    assert list(contents(tmp_path).values()) == [b"first", b"first"]


def test_no_links(tmp_path, monkeypatch):
    """A file system without hard links: a new file is made all the same, an old one is kept."""

    def link(a, b):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    order = IdOrder([1, 0])
    order.save(tmp_path / "o.npz")
    with pytest.raises(FileExistsError):
        IdOrder([0, 1]).save(tmp_path / "o.npz")
    assert IdOrder.load(tmp_path / "o.npz") == order
    order.inverse.save(tmp_path / "o.npz", overwrite=True)


def test_save_overwrites_only_when_told(table, tmp_path):
    first = {"a": jax_tt.tt.to_table(jax_tt.tt.from_dense(table, 1))}
    for name in ("t.safetensors", "t"):
        path = tmp_path / name
        jax_tt.files.save(path, first)
        with pytest.raises(
            jax_tt.FileError, match="exists; expected a new name, or overwrite=True to replace"
        ):
            jax_tt.files.save(path, {"b": first["a"]})
        assert list(jax_tt.files.load(path)) == ["a"]
        jax_tt.files.save(path, {"b": first["a"]}, overwrite=True)
        assert list(jax_tt.files.load(path)) == ["b"]
        with pytest.raises(FileNotFoundError, match="there is no directory"):
            jax_tt.files.save(tmp_path / "nodir" / name, first)


def test_save_says_what_it_takes(table, tmp_path):
    found = jax_tt.tt.from_dense(table, 1)
    pair = jax_tt.tt.to_table(found)
    for given, words in (
        ({"b": found}, r"tables\['b'\]: got an Approximation.*to_table\(\.\.\.\)"),
        ({"b": found.cores}, r"tables\['b'\]: got a tuple; expected a table with its state"),
        ({"b": (jax_tt.dense_table(4, 8), {})}, r"tables\['b'\]: got a DenseTable; expected a"),
        ({2: pair}, "tables: got the name 2; expected a string"),
        (pair, "tables: got a tuple; expected a mapping"),
    ):
        with pytest.raises(TypeError, match=words):
            jax_tt.files.save(tmp_path / "t.safetensors", given)
    for errors in (0.5, (0.5,), (0.5, [0.1]), ("small", {}), (0.5, {"median": 0.1})):
        with pytest.raises(TypeError, match=r"errors\['b'\]: got .*; expected an error or None"):
            jax_tt.files.save(tmp_path / "t.safetensors", {"b": pair}, errors={"b": errors})
    assert not (tmp_path / "t.safetensors").exists()


def test_permissions_are_those_of_any_new_file(table, tmp_path):
    tables, order = {"a": jax_tt.tt.to_table(jax_tt.tt.from_dense(table, 1))}, IdOrder([1, 0])
    (tmp_path / "any").touch()
    for path, write in (
        (tmp_path / "o.npz", order.save),
        (tmp_path / "t.safetensors", lambda path, **more: jax_tt.files.save(path, tables, **more)),
    ):
        write(path)
        assert path.stat().st_mode == (tmp_path / "any").stat().st_mode
        path.chmod(0o640)
        write(path, overwrite=True)
        assert path.stat().st_mode & 0o777 == 0o640


# Errors of reading


def test_a_missing_file_is_both(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"x")
    for read in (jax_tt.files.load, IdOrder.load):
        for kind in (FileNotFoundError, jax_tt.FileError, ValueError):
            for path in (tmp_path / "nothing.npz", tmp_path / "no" / "thing.npz"):
                with pytest.raises(kind, match=r"thing.npz: no such file"):
                    read(path)
        with pytest.raises(jax_tt.FileError, match=r"is a directory|without an orbax checkpoint"):
            read(tmp_path)
        with pytest.raises(jax_tt.FileError, match="is not a complete npz file"):
            read(tmp_path / "x.npz")


def test_files_that_may_not_be_read(table, tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, table=table)
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(
            PermissionError, match=r"t.npz: cannot be read \(Permission denied\)"
        ) as got:
            jax_tt.files.load(path)
        assert isinstance(got.value, jax_tt.FileError)
        tmp_path.chmod(0o500) if not root else None
        with pytest.raises(PermissionError, match=r"cannot be written \(Permission denied\)"):
            IdOrder([0, 1]).save(tmp_path / "new.npz")
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o700)


def test_codebooks_do_not_lose_bits_without_a_warning(tmp_path):
    path, table = tmp_path / "coded.safetensors", jax_tt.coded_table(100, 8, 4, bits=2)
    with jax.enable_x64(True):
        state = table.init(jax.random.key(0))
        wide = {name: x.astype(float) if x.dtype == np.float32 else x for name, x in state.items()}
        jax_tt.files.save(path, {"items": (table, wide)})
    with pytest.warns(UserWarning, match="arrays of 'items' are float64, which JAX rounds"):
        jax_tt.files.load(path)


def test_cores_do_not_lose_bits_without_a_warning(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "cores.npz"
    cores = {"core_0": rng.normal(size=(10, 1, 2, 3)), "core_1": rng.normal(size=(10, 3, 4, 1))}
    np.savez(path, **cores)
    for x64 in (False, True):
        with jax.enable_x64(x64), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _, state = jax_tt.files.load(path)[""]
        assert [w.filename for w in warned] == ([] if x64 else [__file__])
        assert all("float64, which JAX rounds to float32" in str(w.message) for w in warned)
        for name, core in cores.items():
            np.testing.assert_array_equal(state[name], core if x64 else core.astype(np.float32))
