"""Trains one variant: a jitted loop over minibatches, checkpoints after every epoch, exact resume.

Everything random is a function of (seed, epoch, step) and everything else is in the checkpoint, so a run that was
killed and started again ends with the parameters of one that was not.
"""

import contextlib
import json
import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from examples.retrieval.data import Interactions
from examples.retrieval.evaluate import Recall
from examples.retrieval.model import (
    MatrixFactorization,
    loss_fn,
    make_optimizer,
    num_bytes,
    num_parameters,
)
from examples.retrieval.settings import VARIANTS, Config

_CHUNK_SECONDS = 0.5  # the loop comes back to Python about this often, to move the progress bar


class Training(nnx.Module):
    """Model and optimizer, as one thing to save."""

    def __init__(self, config: Config, data: Interactions):
        self.model = MatrixFactorization(
            data.num_users,
            data.num_items,
            config.features,
            VARIANTS[config.variant],
            init_std=config.init_std,
            learning_rate=config.learning_rate,
            tt_ranks=config.tt_rank,
            rngs=nnx.Rngs(config.seed),
        )
        self.optimizer = make_optimizer(self.model, config.learning_rate)


def train(
    config: Config, data: Interactions, workdir: Path, recall: Recall, *, evaluate_every: int = 0
) -> dict[str, Any]:
    """Trains `config.variant` in `workdir`, from its last checkpoint if there is one.

    Args:
        evaluate_every: also evaluate after every so many epochs (for the curve; nothing is chosen by it).

    Returns:
        The variant's row of the report; it is written to `workdir/result.json` as well.
    """
    start_bytes = _resident_bytes()
    _check_config(config, workdir)
    graphdef, state = nnx.split(Training(config, data))
    steps_per_epoch = max(1, len(data.train_users) // config.batch_size)
    epoch_loop = EpochLoop(config, data, graphdef)
    manager = ocp.CheckpointManager(
        (workdir / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False),
    )
    done, history = 0, {"loss": [], "recall": [], "step_seconds": [], "peak_bytes": 0}
    if manager.latest_step() is not None:
        done = manager.latest_step()
        state, history = _restore(manager, state)
        if done > config.epochs:
            raise ValueError(
                f"epochs: got {config.epochs}, but the run in {workdir} has {done} epochs already. "
                "Give another --workdir, or --fresh to delete that run."
            )
        print(f"{config.variant}: continues after epoch {done}")
    bar = tqdm(
        total=config.epochs * steps_per_epoch,
        initial=done * steps_per_epoch,
        desc=config.variant,
        unit="step",
    )
    for epoch in range(done + 1, config.epochs + 1):
        state, loss, seconds, peak = epoch_loop(state, epoch, bar)
        history["loss"].append(loss)
        history["step_seconds"].append(seconds)
        history["peak_bytes"] = max(history["peak_bytes"], peak)
        if epoch == config.epochs or (evaluate_every and epoch % evaluate_every == 0):
            value = _evaluate(nnx.merge(graphdef, state).model, recall, data.num_items)
            history["recall"].append([epoch, value])
            bar.write(
                f"{config.variant}: epoch {epoch}, loss {loss:.4f}, recall@{recall.k} {value:.4f}"
            )
        _save(manager, epoch, state, history)
    bar.close()
    manager.close()
    model = nnx.merge(graphdef, state).model
    dense = config.features * (data.num_users + data.num_items)
    result = {
        "variant": config.variant,
        "recall": history["recall"][-1][1],
        "test_users": recall.num_users,
        "parameters": num_parameters(model),
        "bytes": num_bytes(model),
        "state_bytes": sum(value.nbytes for value in jax.tree.leaves(state)),
        "compression": dense / num_parameters(model),
        "step_ms": 1e3 * statistics.median(history["step_seconds"]),
        "peak_bytes": history["peak_bytes"],
        "start_bytes": start_bytes,
        "loss_curve": history["loss"],
        "recall_curve": history["recall"],
        "config": asdict(config),
    }
    write_atomically(workdir / "result.json", json.dumps(result, indent=1))
    return result


class EpochLoop:
    """Runs an epoch as a few calls of one jitted loop, so that the bar can show the loss in between."""

    def __init__(self, config: Config, data: Interactions, graphdef: Any):
        self._size = config.batch_size
        self._pairs = jnp.stack([jnp.asarray(data.train_users), jnp.asarray(data.train_items)])
        self._steps = max(1, self._pairs.shape[1] // config.batch_size)
        self._key = jax.random.key(config.seed)
        self._run = _make_run(config, data.num_items, graphdef)
        self._chunk = 1  # the first call compiles; its successors are sized by their duration

    def __call__(self, state: Any, epoch: int, bar: tqdm) -> tuple[Any, float, float, int]:
        """Returns the new state, mean loss, median seconds a step and the peak of resident memory."""
        key = jax.random.fold_in(self._key, epoch)
        order = jax.random.permutation(key, self._pairs, axis=1)
        total, loss, seconds, start = jnp.zeros((), jnp.float32), 0.0, [], 0
        while start < self._steps:
            count = min(self._chunk, self._steps - start)
            began = time.perf_counter()
            # The sum runs through the calls: their number depends on the clock, the loss must not.
            state, total = self._run(state, total, order, key, start, start + count)
            before, loss = loss, float(total)  # waits for the device
            seconds.append((time.perf_counter() - began) / count)
            bar.update(count)
            bar.set_postfix(epoch=epoch, loss=f"{(loss - before) / count:.4f}")
            if len(seconds) > 1:
                self._chunk = max(1, int(_CHUNK_SECONDS / seconds[-1]))
            else:
                _reset_peak()
            start += count
        return state, loss / self._steps, statistics.median(seconds[1:] or seconds), _peak_bytes()


def _make_run(config: Config, num_items: int, graphdef: Any) -> Callable[..., Any]:
    shape = (config.negatives if config.loss == "softmax" else config.batch_size,)
    objective = partial(loss_fn, loss=config.loss, l2=config.l2)

    @partial(jax.jit, donate_argnums=0)
    def run(
        state: Any, total: jax.Array, pairs: jax.Array, key: jax.Array, first: int, last: int
    ) -> Any:
        """Steps first..last-1 of an epoch with shuffled pairs [2, n]; returns (state, total + sum of losses)."""

        def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            state, total = carry
            training = nnx.merge(graphdef, state)
            users, items = jax.lax.dynamic_slice_in_dim(pairs, i * size, size, axis=1)
            # A random item is among a user's own too rarely to be worth looking up.
            negatives = jax.random.randint(jax.random.fold_in(key, i), shape, 0, num_items)
            grad = nnx.value_and_grad(objective, has_aux=True)
            (_, loss), grads = grad(training.model, users, items, negatives)
            training.optimizer.update(training.model, grads)
            return nnx.state(training), total + loss

        size = min(config.batch_size, pairs.shape[1])
        return jax.lax.fori_loop(first, last, step, (state, total))

    return run


def _evaluate(model: MatrixFactorization, recall: Recall, num_items: int) -> float:
    rows = nnx.jit(lambda model, ids: model.user_rows(ids))
    items = nnx.jit(lambda model, ids: model.item_rows(ids))(
        model, jnp.arange(num_items, dtype=jnp.int32)
    )
    return recall(lambda ids: rows(model, ids), items)


def _save(manager: ocp.CheckpointManager, epoch: int, state: Any, history: dict[str, Any]) -> None:
    """Written under another name and renamed when complete: a kill leaves this checkpoint or the one before."""
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(nnx.to_pure_dict(state)), history=ocp.args.JsonSave(history)
    )
    manager.save(epoch, args=items)


def _restore(manager: ocp.CheckpointManager, state: Any) -> tuple[Any, dict[str, Any]]:
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
    found = manager.restore(
        manager.latest_step(),
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(like), history=ocp.args.JsonRestore()
        ),
    )
    nnx.replace_by_pure_dict(state, found["state"])
    return state, found["history"]


def _check_config(config: Config, workdir: Path) -> None:
    """A run continues under its own settings only; more epochs may be added to it."""
    path = workdir / "config.json"
    if path.exists():
        old = json.loads(path.read_text())
        new = asdict(config)
        changed = {
            name: (old.get(name), new[name])
            for name in new
            if name != "epochs" and old.get(name) != new[name]
        }
        if changed:
            raise ValueError(
                f"workdir: {workdir} holds a run with other settings (old, new): {changed}. "
                "Give another --workdir, or --fresh to delete that run."
            )
        return
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    write_atomically(path, json.dumps(asdict(config), indent=1))


def write_atomically(path: Path, text: str) -> None:
    """The file is complete or absent, whenever the process is killed."""
    partial_path = path.with_suffix(".partial")
    partial_path.write_text(text)
    os.replace(partial_path, path)


def _resident_bytes() -> int:
    return _status("VmRSS")


def _peak_bytes() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    """A memory figure of this process; where the system has no /proc, its peak since the start."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _reset_peak() -> None:
    """Forgets the peak so far, so that compilation does not count; not every system lets a process do that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
