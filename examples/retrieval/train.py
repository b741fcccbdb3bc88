"""Trains a model: a jitted loop over minibatches, a checkpoint after every epoch, exact resume.

Everything random is a function of (seed, epoch, step) and everything else is in the checkpoint, so a run that was
killed and started again ends with the same parameters as an uninterrupted one.
"""

import json
import os
import shutil
import statistics
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import jax_tt
from examples.retrieval.data import Interactions
from examples.retrieval.evaluate import Recall
from examples.retrieval.model import (
    MatrixFactorization,
    learning_rate,
    loss_fn,
    sizes,
    steps_per_epoch,
)
from examples.retrieval.settings import Config

_CHUNK_SECONDS = 0.5  # the loop comes back to Python about this often, to move the progress bar


class Training(nnx.Module):
    """Model and optimizer, as one thing to save. Fused tables are overwritten by their new values."""

    def __init__(self, config: Config, data: Interactions, model: MatrixFactorization):
        self.model = model
        self.optimizer = jax_tt.FusedOptimizer(model, optax.adam(learning_rate(config, data)))


def train(
    config: Config,
    data: Interactions,
    model: MatrixFactorization,
    workdir: Path,
    *,
    k: int = 20,
    test_users: int | None = None,
    evaluate_every: int = 0,
    evaluate_start: bool = False,
) -> dict[str, Any]:
    """Trains a model in `workdir`, from the last checkpoint if there is one.

    Args:
        k: length of the ranked lists.
        test_users: evaluate the result on so many random test users; default all.
        evaluate_every: epochs between points of the recall curve, which is for monitoring only; 0: none.
        evaluate_start: let the curve begin before training, at epoch 0.

    Returns:
        The line of the report; it is written to `workdir/result.json` as well.
    """
    checkpoints = Checkpoints(workdir, config, data)
    training = Training(config, data, model)
    graphdef, state = nnx.split(training)
    history: dict[str, Any] = {"loss": [], "recall": [], "step_seconds": []}
    if checkpoints.epoch:
        history = checkpoints.restore(state)
        print(f"{config.variant}: continues after epoch {checkpoints.epoch}")
    train_epoch = EpochLoop(config, data, graphdef)
    curve = Recall(data, k, min(10_000, test_users or 10_000))
    if evaluate_start and not checkpoints.epoch:
        history["recall"].append([0, evaluate(nnx.merge(graphdef, state).model, curve)])
    total = config.epochs * steps_per_epoch(config, data)
    done = checkpoints.epoch * steps_per_epoch(config, data)
    with tqdm(total=total, initial=done, desc=config.variant, unit="step") as bar:
        for epoch in range(checkpoints.epoch + 1, config.epochs + 1):
            state, loss, seconds = train_epoch(state, epoch, bar)
            history["loss"].append(loss)
            history["step_seconds"].append(seconds)
            if evaluate_every and epoch % evaluate_every == 0:
                recall = evaluate(nnx.merge(graphdef, state).model, curve)
                history["recall"].append([epoch, recall])
                bar.write(f"{config.variant}: epoch {epoch}, loss {loss:.4f}, recall {recall:.4f}")
            checkpoints.save(epoch, state, history)
    checkpoints.manager.close()
    nnx.update(training, state)
    size, dense = sizes(model), config.features * (data.num_users + data.num_items)
    recall = Recall(data, k, test_users)
    result = {
        "variant": config.variant,
        "recall": evaluate(model, recall),
        "test_users": recall.num_users,
        **size,
        "state_bytes": sum(value.nbytes for value in jax.tree.leaves(state)),
        "compression": dense / size["parameters"],
        "step_ms": 1e3 * statistics.median(history["step_seconds"]),
        "loss_curve": history["loss"],
        "recall_curve": history["recall"],
        "config": asdict(config),
    }
    _write(workdir / "result.json", result)
    return result


def evaluate(model: MatrixFactorization, recall: Recall) -> float:
    """Recall of the model in its current state."""
    rows = nnx.jit(lambda table, ids: table(ids))
    items = model.items
    if not hasattr(items, "top_k"):
        items = rows(items, jnp.arange(recall.num_items))
    return recall(lambda ids: rows(model.users, ids), items)


class EpochLoop:
    """Runs an epoch as a few calls of one jitted loop, so that the bar can show the loss in between."""

    def __init__(self, config: Config, data: Interactions, graphdef: Any):
        self._pairs = jnp.stack([jnp.asarray(data.train_users), jnp.asarray(data.train_items)])
        self._steps = steps_per_epoch(config, data)
        self._key = jax.random.key(config.seed)
        self._config, self._num_items, self._graphdef = config, data.num_items, graphdef
        self._run = jax.jit(self._run_steps, donate_argnums=0)
        self._chunk = 1  # the first call compiles; its successors are sized by their duration

    def __call__(self, state: Any, epoch: int, bar: tqdm) -> tuple[Any, float, float]:
        """Returns the new state, mean loss, and median seconds a step."""
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
            start += count
            bar.update(count)
            bar.set_postfix(epoch=epoch, loss=f"{(loss - before) / count:.4f}")
            if len(seconds) > 1:
                self._chunk = max(1, int(_CHUNK_SECONDS / seconds[-1]))
        return state, loss / self._steps, statistics.median(seconds[1:] or seconds)

    def _run_steps(
        self, state: Any, total: Any, pairs: Any, key: Any, first: int, last: int
    ) -> Any:
        """Steps first..last-1 of an epoch, on train pairs ``[2, n]``; adds their losses to the total."""
        size = min(self._config.batch_size, pairs.shape[1])
        shape = (self._config.negatives,)
        grad = jax_tt.value_and_grad(partial(loss_fn, l2=self._config.l2), has_aux=True)

        def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            state, total = carry
            training = nnx.merge(self._graphdef, state)
            users, items = jax.lax.dynamic_slice_in_dim(pairs, i * size, size, axis=1)
            # A random item is among a user's train items too rarely to be worth looking up.
            negatives = jax.random.randint(jax.random.fold_in(key, i), shape, 0, self._num_items)
            (_, loss), grads = grad(training.model, users, items, negatives)
            training.optimizer.update(training.model, grads)
            return nnx.state(training), total + loss

        return jax.lax.fori_loop(first, last, step, (state, total))


class Checkpoints:
    """The last checkpoint of a run, in its folder.

    Orbax writes a checkpoint under a temporary name and renames it when it is complete, so that a killed run leaves
    either that checkpoint or the previous one. A folder that holds a run with other settings or data is rejected.
    """

    def __init__(self, workdir: Path, config: Config, data: Interactions):
        _check_config({**asdict(config), "data": data.checksum()}, workdir)
        self.manager = ocp.CheckpointManager(
            (workdir / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False),
        )

        self.epoch = self.manager.latest_step() or 0  # that a run continues after

    def save(self, epoch: int, state: nnx.State, history: dict[str, Any]) -> None:
        """Saves the model, the optimizer and the figures collected so far."""
        arrays = ocp.args.StandardSave(nnx.to_pure_dict(state))
        both = ocp.args.Composite(state=arrays, history=ocp.args.JsonSave(history))
        self.manager.save(epoch, args=both)

    def restore(self, state: nnx.State) -> dict[str, Any]:
        """Overwrites `state` with the saved one and returns the history."""
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
        arrays = ocp.args.StandardRestore(like)
        both = ocp.args.Composite(state=arrays, history=ocp.args.JsonRestore())
        saved = self.manager.restore(self.epoch, args=both)
        nnx.replace_by_pure_dict(state, saved["state"])
        return saved["history"]


def _check_config(new: dict[str, Any], workdir: Path) -> None:
    path = workdir / "config.json"
    if not path.exists():
        shutil.rmtree(workdir, ignore_errors=True)
        workdir.mkdir(parents=True)
        _write(path, new)
        return
    old = json.loads(path.read_text())
    changed = {
        name: (old.get(name), value) for name, value in new.items() if old.get(name) != value
    }
    if changed:
        what = "another data file" if [*changed] == ["data"] else "other settings"
        raise ValueError(
            f"workdir: {workdir} holds a run with {what} (old, new): {changed}. "
            "Give another --workdir, or --fresh to delete that run."
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that is complete or absent."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content) + "\n")
    os.replace(unfinished, path)
