"""Trains one variant: a jitted loop over minibatches, a checkpoint after every epoch, exact resume.

Everything random is a function of (seed, epoch, step) and everything else is in the checkpoint, so a run that was
killed and started again ends with the same parameters as an uninterrupted one.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_tt
from examples.retrieval import memory
from examples.retrieval.checkpoint import Run
from examples.retrieval.data import Interactions
from examples.retrieval.evaluate import Recall
from examples.retrieval.model import (
    MatrixFactorization,
    loss_fn,
    make_optimizer,
    num_bytes,
    num_parameters,
    order_bytes,
)
from examples.retrieval.orders import make_order
from examples.retrieval.settings import VARIANTS, Config
from examples.retrieval.starts import make_start

_CHUNK_SECONDS = 0.5  # the loop comes back to Python about this often, to move the progress bar
_CURVE_USERS = 10_000  # points of the recall curve are taken on at most this many test users


class Training(nnx.Module):
    """Model and optimizer, as one thing to save."""

    def __init__(
        self,
        config: Config,
        data: Interactions,
        trained: Mapping[str, np.ndarray] | None = None,
    ):
        steps = config.epochs * steps_per_epoch(config, data)
        learning_rate = optax.linear_schedule(config.learning_rate, 0.0, steps)
        start = make_start(config.start, data, config.features, config.init_std, trained)
        self.model = MatrixFactorization(
            data.num_users,
            data.num_items,
            config.features,
            VARIANTS[config.variant],
            init_std=config.init_std,
            learning_rate=learning_rate,
            tt_ranks=config.tt_rank,
            ratio=config.ratio,
            order=lambda ids, shape: make_order(config.order, data, ids, shape, start[ids]),
            start=start,
            dtype=config.dtype,
            rngs=nnx.Rngs(config.seed),
        )
        self.optimizer = make_optimizer(self.model, learning_rate)


def steps_per_epoch(config: Config, data: Interactions) -> int:
    """Minibatches an epoch; interactions that do not fill one are left to other epochs."""
    return max(1, len(data.train_users) // config.batch_size)


def train(
    config: Config,
    data: Interactions,
    workdir: Path,
    *,
    k: int = 20,
    test_users: int | None = None,
    evaluate_every: int = 0,
    evaluate_start: bool = False,
    trained: Mapping[str, np.ndarray] | None = None,
    save_rows: Path | None = None,
) -> dict[str, Any]:
    """Trains `config.variant` in `workdir`, from its last checkpoint if there is one.

    Args:
        k: length of the ranked lists.
        test_users: evaluate the result on so many random test users; default all.
        evaluate_every: epochs between points of the recall curve, which is for monitoring only; 0: none.
        evaluate_start: let the curve begin before training, at epoch 0.
        trained: rows to start from, as `starts.make_start` takes them.
        save_rows: write the rows that came out to this file, an .npz of "users" and "items".

    Returns:
        The variant's row of the report; it is written to `workdir/result.json` as well.
    """
    start_bytes = memory.resident_bytes()
    run = Run(workdir, config)
    graphdef, state = nnx.split(Training(config, data, trained))
    history: dict[str, Any] = {"loss": [], "recall": [], "step_seconds": [], "peak_bytes": 0}
    if run.epoch:
        history = run.restore(state)
        print(f"{config.variant}: continues after epoch {run.epoch}")
    train_epoch = EpochLoop(config, data, graphdef)
    curve = Recall(data, k, min(_CURVE_USERS, test_users or _CURVE_USERS))
    if evaluate_start and not run.epoch:
        value = evaluate(nnx.merge(graphdef, state).model, curve, data.num_items)
        history["recall"].append([0, value])
    steps = steps_per_epoch(config, data)
    bar = tqdm(
        total=config.epochs * steps,
        initial=run.epoch * steps,
        desc=config.variant,
        unit="step",
    )
    for epoch in range(run.epoch + 1, config.epochs + 1):
        state, loss, seconds, peak = train_epoch(state, epoch, bar)
        history["loss"].append(loss)
        history["step_seconds"].append(seconds)
        if epoch == 1:  # later ones hold what the writer of checkpoints did not give back as well
            history["peak_bytes"] = peak
        if evaluate_every and epoch % evaluate_every == 0:
            value = evaluate(nnx.merge(graphdef, state).model, curve, data.num_items)
            history["recall"].append([epoch, value])
            bar.write(f"{config.variant}: epoch {epoch}, loss {loss:.4f}, recall@{k} {value:.4f}")
        run.save(epoch, state, history)
    bar.close()
    model = nnx.merge(graphdef, state).model
    if save_rows is not None:
        _save_rows(save_rows, model, data)
    recall = Recall(data, k, test_users)
    dense = config.features * (data.num_users + data.num_items)
    result = {
        "variant": config.variant,
        "recall": evaluate(model, recall, data.num_items),
        "test_users": recall.num_users,
        "parameters": num_parameters(model),
        "bytes": num_bytes(model),
        "order_bytes": order_bytes(model),
        "state_bytes": sum(value.nbytes for value in jax.tree.leaves(state)),
        "compression": dense / num_parameters(model),
        "step_ms": 1e3 * statistics.median(history["step_seconds"]),
        "peak_bytes": history["peak_bytes"],
        "start_bytes": start_bytes,
        "loss_curve": history["loss"],
        "recall_curve": history["recall"],
        "config": asdict(config),
    }
    run.finish(result)
    return result


def evaluate(model: MatrixFactorization, recall: Recall, num_items: int) -> float:
    """Recall of the model in its current state."""
    item_rows = nnx.jit(lambda model, ids: model.item_rows(ids))
    user_rows = nnx.jit(lambda model, ids: model.user_rows(ids))
    items = item_rows(model, jnp.arange(num_items, dtype=jnp.int32))
    return recall(lambda ids: user_rows(model, ids), items)


def _save_rows(path: Path, model: MatrixFactorization, data: Interactions) -> None:
    """Writes a file that is either complete or absent, even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished.npz")
    users = model.user_rows(jnp.arange(data.num_users, dtype=jnp.int32))
    items = model.item_rows(jnp.arange(data.num_items, dtype=jnp.int32))
    np.savez(unfinished, users=np.asarray(users), items=np.asarray(items))
    unfinished.replace(path)


class EpochLoop:
    """Runs an epoch as a few calls of one jitted loop, so that the bar can show the loss in between."""

    def __init__(self, config: Config, data: Interactions, graphdef: Any):
        self._pairs = jnp.stack([jnp.asarray(data.train_users), jnp.asarray(data.train_items)])
        self._steps = steps_per_epoch(config, data)
        self._key = jax.random.key(config.seed)
        self._run = _jitted_steps(config, data.num_items, graphdef)
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
            start += count
            bar.update(count)
            bar.set_postfix(epoch=epoch, loss=f"{(loss - before) / count:.4f}")
            if len(seconds) == 1:
                memory.reset_peak()  # neither compilation nor evaluation counts
            else:
                self._chunk = max(1, int(_CHUNK_SECONDS / seconds[-1]))
        typical = statistics.median(seconds[1:] or seconds)
        return state, loss / self._steps, typical, memory.peak_bytes()


def _jitted_steps(config: Config, num_items: int, graphdef: Any) -> Callable[..., Any]:
    """`(state, total, pairs [2, n], key, first, last) -> (state, total + losses)`: steps first..last-1 of an epoch."""
    shape = (config.negatives if config.loss == "softmax" else config.batch_size,)
    objective = partial(loss_fn, loss=config.loss, l2=config.l2)

    @partial(jax.jit, donate_argnums=0)
    def run(state: Any, total: Any, pairs: Any, key: Any, first: int, last: int) -> Any:
        def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            state, total = carry
            training = nnx.merge(graphdef, state)
            users, items = jax.lax.dynamic_slice_in_dim(pairs, i * size, size, axis=1)
            # A random item is among a user's own too rarely to be worth looking up.
            negatives = jax.random.randint(jax.random.fold_in(key, i), shape, 0, num_items)
            grad = jax_tt.value_and_grad(objective, has_aux=True)
            (_, loss), grads = grad(training.model, users, items, negatives)
            training.optimizer.update(training.model, grads)
            return nnx.state(training), total + loss

        size = min(config.batch_size, pairs.shape[1])
        return jax.lax.fori_loop(first, last, step, (state, total))

    return run
