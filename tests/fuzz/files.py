"""Damaged files and odd arguments for the command line.

Small files of every format are damaged, cut, mixed, renamed and linked to each other, and a command with random
arguments runs on them in this process. It must end with status 0 or with 2 and one line, soon and in little memory; no
input and nothing else that was there may have changed but what ``--force`` replaces; and nothing is left beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_tt
from jax_tt.cli import main
from jax_tt.cli.__main__ import quieten_orbax
from tests.cli.cli_case import write_torch

SECONDS, MEMORY = 120, 1 << 30
N, D = 60, 6
ARRAYS = (".npy", ".npz", ".safetensors", ".pt", ".pth")
SUFFIXES = (*ARRAYS, "", ".txt", ".csv", ".gz", ".xz", ".json", ".toml", ".bin")


@dataclasses.dataclass
class Case:
    """A command in a folder of files.

    Attributes:
        files: names there; at first a few of any kind.
        inputs, outputs: those that the command names.
    """

    rng: np.random.Generator
    files: list[str] = dataclasses.field(default_factory=list)
    argv: list[str] = dataclasses.field(default_factory=list)
    inputs: list[str] = dataclasses.field(default_factory=list)
    outputs: list[str] = dataclasses.field(default_factory=list)

    def pick(self, choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def input(self, good: str, *option: str) -> None:
        """One of the seeds that make sense there, or any file."""
        name = (
            self.pick(self.files) if self.chance(0.2) else _add(self.rng, self.pick(good.split()))
        )
        self.files.append(name)
        if self.chance(0.03):
            name = self.pick(["", ".", "..", "nothing.npy", "/dev/null", "pipe", "a\udcff.npy"])
        self.inputs.append(name)
        self.argv += [*option, name]

    def output(self, option: str, *good: str) -> None:
        name = self.pick(good)
        if self.chance(0.25):
            link = f"link{self.rng.integers(3)}"
            used = self.pick(self.inputs or self.files)
            name = self.pick(
                [used, f"./{used}", self.pick(self.files), f"{used}/x.safetensors", f"{link}{Path(name).suffix}",
                 f"nodir/{name}", f"folder/{name}", "folder", "", ".", "..", "y" * 300, "a\udcff.safetensors"]
            )  # fmt: skip
            if name.startswith("link") and not os.path.lexists(name):
                make = self.pick([os.link, os.symlink])
                with contextlib.suppress(OSError):  # directories have no hard links
                    make(used, name)
        self.outputs.append(name)
        self.argv += [option, name]

    def maybe(self, share: float, *words: str) -> None:
        if self.chance(share):
            self.argv += words


def one(rng: np.random.Generator) -> str:
    """One run; ``"done"`` or ``"refused"``."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.mkdir("folder")
        os.mkfifo("pipe")
        case = Case(rng)
        for name in rng.permutation(sorted(os.listdir(_seeds())))[: rng.integers(1, 4)]:
            case.files.append(_add(rng, str(name)))
        if case.chance(0.1):
            os.symlink(case.files[0], "link" + Path(case.files[0]).suffix)
            case.files.append("link" + Path(case.files[0]).suffix)
        COMMANDS[rng.integers(len(COMMANDS))](case)
        before, protected = _contents(), _read_by(case.inputs)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        start = _memory("VmRSS")
        status, out, errors = _run(case.argv)
        grown = _memory("VmHWM") - start
        faulthandler.cancel_dump_traceback_later()
        try:
            _judge(case, status, out + errors, errors, before, protected)
            assert grown < MEMORY, f"took {grown:,} bytes"
        except AssertionError as error:
            _keep(folder)
            raise AssertionError(f"{case.argv}: status {status}: {error}\n{out}{errors}") from error
        return "done" if status == 0 else "refused"


def _judge(
    case: Case,
    status: Any,
    text: str,
    errors: str,
    before: dict[str, str],
    protected: set[tuple[int, int]],
) -> None:
    assert status in (0, 2), "another status"
    assert "Traceback" not in text and "Error:" not in text, "a traceback"
    if status == 2:
        lines = errors.splitlines()
        assert lines and ("usage: " in errors or lines[-1].startswith("jax-tt: error: ")), "no line"
        # Bars take lines too.
        assert len(lines) == 1 or "usage: " in errors or "--no-progress" not in case.argv, "lines"
        assert "out of memory" not in errors, "memory"
    after = _contents()
    targets = [os.path.realpath(name) for name in case.outputs if name]

    def written(name: str) -> bool:
        place = os.path.abspath(name)
        return any(place == one or place.startswith(f"{one}{os.sep}") for one in targets)

    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    # A picture that fails comes after the output, which is complete by then.
    allowed = status == 0 or "--picture" in case.argv
    for name in changed:
        assert allowed and written(name), f"{name} was changed"
        assert name not in before or "--force" in case.argv, f"{name} was replaced"
    assert protected <= _read_by(case.inputs), "an input was replaced"


def _run(argv: list[str]) -> tuple[Any, str, str]:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status: Any = main(argv)
        except SystemExit as stopped:
            status = stopped.code
        if any(map(os.path.isdir, argv)):
            gc.collect()  # what orbax left behind speaks now
    return status, out.getvalue(), errors.getvalue()


def _memory(what: str) -> int:
    listed = Path("/proc/self/status")
    lines = listed.read_text().splitlines() if listed.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(what)), 0)


def _keep(folder: str) -> None:
    """The files of a failure, for whoever looks into it."""
    kept = os.environ.get("JAX_TT_FUZZ_KEEP")
    if kept:
        shutil.copytree(folder, kept, symlinks=True, ignore=lambda *_: {"pipe"})


def _contents() -> dict[str, str]:
    """Digest of everything in the folder."""
    found = {}
    for path in Path().rglob("*"):
        name = str(path)
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _read_by(names: list[str]) -> set[tuple[int, int]]:
    """Identities of files, and of all in directories."""
    found = set()
    for name in names:
        if name in ("", ".", "..") or name.startswith("/"):
            continue
        place = Path(name)
        for path in (place, *(place.rglob("*") if place.is_dir() else ())):
            with contextlib.suppress(OSError):
                known = os.stat(path)
                found.add((known.st_dev, known.st_ino))
    return found


# Commands


def _compress(case: Case) -> None:
    case.argv += ["compress"]
    case.input(TABLES)
    sizes = (
        ["--ranks", case.pick(["1", "2", "3,2", "9,9,9,9", "0", "99999999"])],
        ["--tolerance", case.pick(["0.1", "0.9", "0", "1", "-1", "nan", "1e-300"])],
        ["--kind", case.pick(["quantized", "low_rank", "x"])],
    )
    case.argv += (size := case.pick(sizes))
    if "--kind" in size:
        case.argv += ["--max-bytes", case.pick(["500", "1kB", "4MiB", "1", "999TB"])]
    case.output("--out", "new.safetensors", "new", "new.safetensors", "new/", "new.h5")
    if case.chance(0.15):
        case.input("order.npz factors.npz", "--order")
    if case.chance(0.15):
        case.input("weights.npy counts.npy", "--weights")
    case.maybe(0.05, "--row-factors", case.pick(["8,8", "60,1", "1,1", "4,4,4", "20,30"]))
    case.maybe(0.05, "--col-factors", case.pick(["2,3", "6,1", "1,1", "2,2,2"]))
    case.maybe(0.05, "--residuals")
    case.maybe(0.1, "--dtype", case.pick(["bfloat16", "float16", "float64", "int8", "x", ""]))
    _common(case)


def _order(case: Case) -> None:
    case.argv += ["order"]
    method = case.pick([*METHODS, "x"])
    case.input(METHODS.get(method, PAIRS))
    case.output("--out", "new.npz", "new.npz", "new.npz", "new.NPZ", "new.txt")
    case.maybe(0.95, "--method", method)
    case.maybe(0.2, "--column", case.pick("012"))
    case.maybe(0.2, "--num-embeddings", case.pick(["60", "100", "1", "0", "-3", "x"]))
    case.maybe(0.2, "--row-factors", case.pick(["8,8", "60", "1,1", "100,1", "9999999,9999999"]))
    _common(case)


def _plan(case: Case) -> None:
    case.argv += [
        "plan",
        "--no-progress",
        "--budget",
        case.pick(["500", "1kB", "4kB", "1GiB", "0"]),
    ]
    case.input("tables.json tables.toml more.json", "--tables")
    if case.chance(0.8):
        _add(case.rng, case.pick(["t.npz", "t.safetensors", "several.npz"]))
    case.maybe(0.1, "--seed", case.pick(["1", "-1", "x"]))
    if case.chance(0.5):
        case.argv += ["--ids"]
        for _ in range(case.rng.integers(1, 3)):
            case.input(f"{PAIRS} counts.npy")
            name = case.pick(["a=", "b=", "a=", "c=", "", "="])
            case.argv[-1] = name + case.argv[-1]


def _info(case: Case) -> None:
    case.argv += ["info", "--no-progress"]
    case.input(f"{TABLES} cores.safetensors checkpoint cores.npz cores.npz")
    if case.chance(0.4):
        case.input(TABLES, "--against")
    case.maybe(0.1, "--name", case.pick(["t", "x", ""]))
    case.maybe(0.1, "--against-name", case.pick(["t", "x", ""]))


def _common(case: Case) -> None:
    case.maybe(0.97, "--no-progress")
    case.maybe(0.5, "--force")
    case.maybe(0.1, "--name", case.pick(["t", "x", "", "a/b", "\udcff", "t.core_0"]))
    case.maybe(0.1, "--seed", case.pick(["1", "-1", str(2**70), "x"]))
    if case.chance(0.03):
        case.output("--picture", "new.png", "new.svg", "new.txt")


TABLES = "table.npy big.npy fortran.npy t.npz several.npz t.safetensors half.safetensors t.pt"
PAIRS = "pairs.txt lists.csv pairs.gz lists.xz pairs.npy"
METHODS = {
    "interactions": PAIRS,
    "counts": f"{PAIRS} counts.npy",
    "table": TABLES,
    "tree": "tree.npy",
}
COMMANDS = (_compress, _compress, _order, _order, _plan, _info, _info)


# Files


def _add(rng: np.random.Generator, name: str) -> str:
    """A seed in this folder, as it is or damaged, or under another suffix; its name there."""
    place, new = Path(_seeds()) / name, name
    if rng.random() < 0.08:
        new = Path(name).stem + str(rng.choice(SUFFIXES))
    if os.path.lexists(new):
        return new
    damaged = rng.random() < 0.4
    if place.is_dir():
        shutil.copytree(place, new)
        parts = _files_below(new)
        for part in rng.permutation(np.array(parts, object))[: rng.integers(1, 3) * damaged]:
            _damage(rng, part)
    else:
        shutil.copy(place, new)
        if damaged:
            _damage(rng, Path(new))
    return new


def _damage(rng: np.random.Generator, path: Path) -> None:
    """One to three changes of a file; inside of compressed text as often as outside."""
    packers = {".gz": gzip, ".xz": lzma}
    packer: Any = packers.get(path.suffix) if rng.random() < 0.5 else None
    data = path.read_bytes()
    with contextlib.suppress(OSError, lzma.LZMAError, EOFError):
        data = packer.decompress(data) if packer else data
        for _ in range(rng.integers(1, 4)):
            data = _changed(rng, data)
        data = packer.compress(data) if packer else data
    path.unlink() if rng.random() < 0.02 else path.write_bytes(data)


def _changed(rng: np.random.Generator, data: bytes) -> bytes:
    size = len(data)
    # Headers are at the beginning or at the end.
    ends = [size, size, min(size, 200), min(size, 64)]
    at = int(rng.integers(max(1, ends[rng.integers(4)])))
    at = max(0, size - 1 - at) if rng.random() < 0.2 else at
    run = int(rng.integers(1, 1 + max(1, min(64, size - at))))
    other = int(rng.integers(max(1, size)))
    number = int(rng.choice([0, 1, -1, 2**31 - 1, 2**31, 2**40, 2**63 - 1]))
    changes = (
        lambda: data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :],
        lambda: data[:at] + rng.bytes(run) + data[at + run :],
        lambda: data[:at],
        lambda: data[:at] + data[at + run :],
        lambda: data[:at] + data[other : other + run] + data[at:],
        lambda: data[:at] + number.to_bytes(9, "little", signed=True)[:8] + data[at + 8 :],
        lambda: data[:at] + bytes([int(rng.choice(list(b"0123456789-,. \n'(){}[]")))]) + data[at + 1 :],
        lambda: data + rng.bytes(run),
        lambda: _any_seed(rng)[: size // 2] + data[size // 2 :],
        lambda: _any_seed(rng),
        lambda: b""
    )  # fmt: skip
    weights = np.array([4, 4, 3, 3, 3, 4, 4, 1, 1, 0.5, 0.2])
    return changes[rng.choice(len(changes), p=weights / weights.sum())]() if size else rng.bytes(9)


def _any_seed(rng: np.random.Generator) -> bytes:
    files = _files_below(_seeds())
    return files[rng.integers(len(files))].read_bytes()


def _files_below(folder: str) -> list[Path]:
    """In an order that does not depend on orbax's random names."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return sorted(files, key=lambda path: (str(path.parent), path.stat().st_size, path.name))


@functools.cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory()  # removed when the process ends


@functools.cache
def _seeds() -> str:
    """A folder with a small valid file of every kind."""
    quieten_orbax()
    place = _folder().name
    with contextlib.chdir(place):
        _write_seeds()
    return place


def _write_seeds() -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    table = rng.normal(size=(N, D)).astype(np.float32)
    pairs = np.stack([rng.integers(0, 9, 200), rng.integers(0, N, 200)], axis=1)
    order = jax_tt.order.IdOrder(rng.permutation(N))
    arrays: dict[str, Any] = {
        "table": table,
        "big": table.astype(">f8"),
        "fortran": np.asfortranarray(table.astype(np.float16)),
        "long": table.astype(np.longdouble),
        "complex": table.astype(np.complex64),
        "text": np.array(["a", "b"]),
        "pairs": pairs,
        "tree": np.stack([np.arange(N) // 20, np.arange(N) // 5], axis=1).astype(">i4"),
        "counts": rng.integers(0, 9, N),
        "weights": rng.random(N),
        "empty": np.zeros((0, D), np.float32),
        "scalar": np.float32(3),
    }
    for name, array in arrays.items():
        np.save(f"{name}.npy", array)
    np.savez("t.npz", t=table)
    np.savez_compressed("several.npz", t=table, counts=arrays["counts"], pairs=pairs)
    order.save("order.npz")
    np.savez("factors.npz", rows=order.rows, row_factors=[8, 8])
    save_file({"t": table}, "t.safetensors")
    save_file({"t": table.astype(jnp.bfloat16), "x": np.zeros((0, 3))}, "half.safetensors")
    write_torch("t.pt", {"t": table, "emb.weight": table})
    cores = jax_tt.tt.from_dense(table, 2)
    stored = {"t": jax_tt.tt.to_table(cores, order), "u": jax_tt.tt.to_table(cores)}
    jax_tt.files.save("cores.safetensors", stored)
    jax_tt.files.save("checkpoint", stored)
    np.savez("cores.npz", **{f"core_{k}": np.asarray(core) for k, core in enumerate(cores.cores)})
    lines = "".join(f"{user} {item}\n" for user, item in pairs).encode()
    lists = b"".join(b"%d,%d,%d\r\n" % (k % 7, k, (k * k) % N) for k in range(N))
    Path("pairs.txt").write_bytes(lines)
    Path("lists.csv").write_bytes(lists)
    Path("pairs.gz").write_bytes(gzip.compress(lines, mtime=0))
    Path("lists.xz").write_bytes(lzma.compress(lists))
    tables = {"a": {"num_embeddings": 1000, "features": 16}, "b": {"file": "t.npz"}}
    Path("tables.json").write_text(json.dumps(tables))
    Path("more.json").write_text(json.dumps({"a": {"file": "several.npz", "name": "t"}}))
    Path("tables.toml").write_text(
        "[a]\nnum_embeddings = 5000\nfeatures = 8\n[b]\nfile = 't.safetensors'\nname = 't'\n"
    )
