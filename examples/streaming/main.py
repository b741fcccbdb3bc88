"""Trains a click model on a stream of 64-bit ids that come and go: in one process, in two, and in tiers of memory.

python -m examples.streaming.main [--steps 300] [--batch-size 256] [--rows 16384] [--help]
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from examples.dlrm.metrics import auc
from examples.streaming.synthetic import Clicks, DriftingClicks

ROOT = Path(__file__).resolve().parents[2]
RULE = jax_tt.optimizers.RowWiseAdagrad(0.1)
# Of a new row, which depends on its id alone, wherever it is.
FIRST = {"seed": 0, "initializer": jax_tt.dynamic.Normal(0.05)}
NAMES = ("user", "item")
FEATURES = {name: jax_tt.Feature(name, combiner=None) for name in NAMES}


class ClickModel(nnx.Module):
    """The log-odds of a click are bias + a + b + <u, v> for the rows [a, u] of the user and [b, v] of the item."""

    def __init__(self, table: jax_tt.Table, mesh: Mesh | None = None) -> None:
        over = {} if mesh is None else {"mesh": mesh, "axis": "model"}
        tables = dict.fromkeys(NAMES, table)
        self.embed = jax_tt.EmbedCollection(tables, FEATURES, rngs=nnx.Rngs(0), **over)
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, ids: Any) -> jax.Array:
        rows = self.embed(ids)
        user, item = rows["user"], rows["item"]
        return self.bias + user[:, 0] + item[:, 0] + jnp.sum(user[:, 1:] * item[:, 1:], axis=1)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: ClickModel, opt: jax_tt.FusedOptimizer, ids: Any, labels: Any) -> jax.Array:
    """One step; returns the log-odds [B] before it. The call of the model inserts ids that are new."""

    def loss(model: ClickModel) -> tuple[jax.Array, jax.Array]:
        logits = model(ids)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), logits

    grads, logits = jax_tt.grad(loss, has_aux=True)(model)
    opt.update(model, grads)
    return logits


def made(table: jax_tt.Table, mesh: Mesh | None = None) -> tuple[ClickModel, jax_tt.FusedOptimizer]:
    """A model and its optimizer, of which every process makes its part."""

    @nnx.jit
    def make() -> tuple[ClickModel, jax_tt.FusedOptimizer]:
        model = ClickModel(table, mesh)
        return model, jax_tt.FusedOptimizer(model, optax.sgd(0.1))

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return make()


def in_processes(options: Any, stream: DriftingClicks) -> Iterator[np.ndarray]:
    """Hash tables, sharded over the processes if there are several; yields this process's log-odds of every step."""
    table = jax_tt.hash_table(options.rows, 16, optimizer=RULE, ways=16, **FIRST)
    if options.processes == 1:
        model, opt = made(table)
        for clicks in stream.batches():
            ids = model.embed.host_batch(clicks.ids)
            yield np.asarray(train_step(model, opt, ids, clicks.labels))
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{options.port}"
    jax.distributed.initialize(address, options.processes, options.process)
    mesh = jax.make_mesh((jax.device_count(),), ("model",))
    places, size = NamedSharding(mesh, P("model")), stream.batch_size // options.processes
    own = slice(options.process * size, (options.process + 1) * size)
    model, opt = made(table, mesh)

    def divided(clicks: Clicks) -> Any:
        ids = {name: jax_tt.dynamic.split_keys(x[own]) for name, x in clicks.ids.items()}
        parts = ids, clicks.labels[own]
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(places, x), parts)

    for clicks in stream.batches():
        logits = train_step(model, opt, *divided(clicks))
        yield np.concatenate([np.asarray(shard.data) for shard in logits.addressable_shards])


def in_tiers(options: Any, stream: DriftingClicks) -> Iterator[np.ndarray]:
    """A quarter of the rows on the device, the others in host memory and on disk."""
    table = jax_tt.dense_table(options.rows // 4, 16, optimizer=RULE, takes_slots=True)
    model, opt = made(table)
    tier = jax_tt.Tier(host_rows=options.rows // 4, ways=16, **FIRST)
    tiers = dict.fromkeys(NAMES, tier)
    batches = ({**clicks.ids, "labels": clicks.labels} for clicks in stream.batches())
    with (
        tempfile.TemporaryDirectory() as path,
        jax_tt.nnx.LayerTiers(model.embed, tiers, path=path, depth=2) as below,
    ):
        for staged in below.prefetch(batches):
            yield np.asarray(train_step(model, opt, staged.batch, staged.other["labels"]))


def work(options: Any) -> None:
    """Trains in one way, and writes the log-odds [steps, B] and the seconds of a step, without the first ones."""
    stream = DriftingClicks(options.steps, options.batch_size)
    steps = in_tiers(options, stream) if options.tiers else in_processes(options, stream)
    logits, times = [], []
    for found in steps:
        logits.append(found)
        times.append(time.perf_counter())
    seconds = np.median(np.diff(times)) if len(times) > 1 else np.nan
    np.savez(options.out, logits=np.stack(logits), seconds=seconds)


def started(argv: list[str], out: Path, *more: str) -> tuple[subprocess.Popen[bytes], Path]:
    command = [sys.executable, "-m", "examples.streaming.main", *argv, *more, "--out", str(out)]
    return subprocess.Popen(command, cwd=ROOT), out


def results(workers: list[tuple[subprocess.Popen[bytes], Path]]) -> tuple[np.ndarray, float]:
    """The log-odds [steps, B] of the processes of one run, side by side, and the seconds of a step."""
    for worker, _ in workers:
        if worker.wait():
            raise SystemExit(f"a process ended with status {worker.returncode}")
    files = [np.load(out) for _, out in workers]
    return np.concatenate([file["logits"] for file in files], 1), float(files[0]["seconds"])


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=256, help="a multiple of the processes")
    parser.add_argument("--rows", type=int, default=16_384, help="of each of the two tables")
    for name, kind in {"processes": int, "process": int, "port": int, "out": Path}.items():
        parser.add_argument(f"--{name}", type=kind, default=1 if name == "processes" else None)
    parser.add_argument("--tiers", action="store_true")
    options = parser.parse_args(argv)
    if options.out is not None:
        work(options)
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    print("run                AUC largest difference      a step")
    stream, one = DriftingClicks(options.steps, options.batch_size), None
    labels = np.concatenate([clicks.labels for clicks in stream.batches()])
    with tempfile.TemporaryDirectory() as folder:
        for name, more in {
            "one process": [()],
            "two processes": [
                ("--processes", "2", "--process", str(k), "--port", port) for k in range(2)
            ],
            "with tiers": [("--tiers",)],
        }.items():
            outs = [Path(folder) / f"{name} {k}.npz" for k in range(len(more))]
            logits, seconds = results(
                [started(argv, out, *own) for out, own in zip(outs, more, strict=True)]
            )
            one = logits if one is None else one
            quality, difference = auc(logits.reshape(-1), labels), np.abs(logits - one).max()
            print(f"{name:14} {quality:8.4f} {difference:18.1e} {1e3 * seconds:11.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
