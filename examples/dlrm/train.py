"""Trains one variant in this process and measures it."""

import hashlib
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from examples.dlrm import metrics
from examples.dlrm.batch import Batch, ClickData, Position
from examples.dlrm.checkpoint import Checkpoints, Progress
from examples.dlrm.config import VARIANTS, Config
from examples.dlrm.data_criteo import CriteoClicks
from examples.dlrm.data_synthetic import SyntheticClicks
from examples.dlrm.model import DLRM, create, hit_rate
from examples.dlrm.result import Result, forget_peak_memory, peak_memory

WARM_UP = 2  # steps that compile; not timed


def open_data(config: Config) -> ClickData:
    """The click log that the settings name."""
    if config.data == "synthetic":
        return SyntheticClicks(
            config.table_sizes,
            config.batch_size,
            config.eval_examples,
            seed=config.seed,
            zipf=config.zipf,
            id_order=config.id_order,
        )
    evaluation = Path(config.eval_data) if config.eval_data else None
    return CriteoClicks(
        Path(config.data), config.table_sizes, config.batch_size, config.eval_examples, evaluation
    )


class Scores(NamedTuple):
    """Quality on held-out examples; nan or None where it is not known."""

    auc: float = math.nan
    log_loss: float = math.nan
    best_auc: float | None = None


class Learner:
    """The compiled functions of one model; its values travel as a state.

    Args:
      graphdef: structure of the pair (model, optimizer), from `nnx.split`.
    """

    def __init__(self, graphdef: nnx.GraphDef):
        self._graphdef = graphdef
        # Donated: the old tables are overwritten where they lie.
        self.step = jax.jit(self._step, donate_argnums=0)
        self.predict = jax.jit(self._predict)

    def _step(self, state: nnx.State, batch: Batch) -> tuple[nnx.State, jax.Array]:
        """The state after one step, and the loss before it."""
        model, optimizer = nnx.merge(self._graphdef, state)
        dense, ids, label = map(jnp.asarray, batch)

        def loss_of(model: DLRM) -> jax.Array:
            return jnp.mean(optax.sigmoid_binary_cross_entropy(model(dense, ids), label))

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    def _predict(self, state: nnx.State, batch: Batch) -> jax.Array:
        """Log-odds of a click [B]."""
        model, _ = nnx.merge(self._graphdef, state)
        model.eval()
        return model(jnp.asarray(batch.dense), jnp.asarray(batch.ids))


def train(config: Config, variant: str) -> Result:
    """Trains to `config.steps` (from the last checkpoint, where asked to) and evaluates.

    Raises:
      SystemExit: the data is too short for the steps, or the loss is not finite; says what to do.
    """
    start_bytes = peak_memory()
    data = open_data(config)
    checkpoints = None
    if config.checkpoint_dir is not None:
        directory = Path(config.checkpoint_dir) / variant
        checkpoints = Checkpoints(directory, config.fingerprint(), config.resume)
    graphdef, state, progress = _start(config, variant, data, checkpoints)
    jax.block_until_ready(state)
    forget_peak_memory()  # what counts is training, not how the first values were drawn
    learner = Learner(graphdef)
    state = _loop(config, variant, data, learner, state, progress, checkpoints)
    scores, curve = Scores(), progress.curve
    if config.eval_examples:
        scores = evaluate(learner, state, data, progress.position)
        curve = [*curve, (progress.step, scores.auc)]
    tables = _tables(state)
    return Result(
        variant=variant,
        steps=progress.step,
        examples=progress.step * config.batch_size,
        auc=scores.auc,
        log_loss=scores.log_loss,
        best_auc=scores.best_auc,
        curve=curve,
        table_parameters=sum(x.size for x in tables if jnp.issubdtype(x.dtype, jnp.floating)),
        table_bytes=sum(x.nbytes for x in tables),
        state_bytes=sum(x.nbytes for x in jax.tree.leaves(state)),
        step_ms=statistics.median(progress.step_ms[WARM_UP:] or progress.step_ms),
        peak_bytes=max(progress.peak_bytes, peak_memory()),
        start_bytes=start_bytes,
        digest=digest(state) if checkpoints else None,
        hit_rate=hit_rate(nnx.merge(graphdef, state)[0]),
    )


def _loop(
    config: Config,
    variant: str,
    data: ClickData,
    learner: Learner,
    state: nnx.State,
    progress: Progress,
    checkpoints: Checkpoints | None,
) -> nnx.State:
    """Trains with a progress bar; advances `progress` and returns the final state."""
    parent = os.getppid()
    stream = data.stream(progress.position)
    shown: dict[str, str] = {}
    average = math.nan
    with tqdm(
        total=config.steps,
        initial=progress.step,
        desc=f"{VARIANTS[variant]:13}",
        unit="step",
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    ) as bar:
        while progress.step < config.steps:
            batch, position = next(stream, (None, progress.position))
            if batch is None:
                raise SystemExit(
                    f"--steps: the data ends after {progress.step} steps of {config.batch_size} "
                    f"examples; take --steps {progress.step} or fewer"
                )
            begin = time.perf_counter()
            state, loss = jax.block_until_ready(learner.step(state, batch))
            seconds = time.perf_counter() - begin
            progress.advance(position, 1e3 * seconds)
            if not math.isfinite(float(loss)):
                raise SystemExit(
                    f"the loss is {loss} at step {progress.step}; lower --learning-rate"
                )
            average = float(loss) if math.isnan(average) else 0.95 * average + 0.05 * float(loss)
            at_end = progress.step == config.steps
            if config.eval_examples and progress.step % config.eval_every == 0 and not at_end:
                scores = evaluate(learner, state, data, progress.position)
                progress.curve.append((progress.step, scores.auc))
                shown["AUC"] = f"{scores.auc:.4f}"
            bar.set_postfix(
                {"loss": f"{average:.4f}", **shown, "ms": f"{1e3 * seconds:.1f}"}, refresh=False
            )
            bar.update()
            if checkpoints and (progress.step % config.checkpoint_every == 0 or at_end):
                progress.peak_bytes = max(progress.peak_bytes, peak_memory())
                checkpoints.save(progress, state)
            if os.getppid() != parent:
                raise SystemExit("the process that started this one has ended; stopping")
    return state


def evaluate(learner: Learner, state: nnx.State, data: ClickData, position: Position) -> Scores:
    """AUC and log loss on the held-out examples, and the best possible AUC on the same ones."""
    batches = list(data.evaluation(position))
    if not batches:
        raise SystemExit(
            "--eval-examples: the data ends before the first batch to evaluate on; "
            "take fewer --steps"
        )
    labels = np.concatenate([batch.label for batch in batches])
    logits = np.concatenate([np.asarray(learner.predict(state, batch)) for batch in batches])
    best = [scores for batch in batches if (scores := data.best_scores(batch)) is not None]
    return Scores(
        auc=metrics.auc(logits, labels),
        log_loss=float(np.mean(np.logaddexp(0.0, logits) - labels * logits)),
        best_auc=metrics.auc(np.concatenate(best), labels) if best else None,
    )


def digest(state: nnx.State) -> str:
    """A checksum of every bit of the state; equal runs have equal checksums."""
    checksum = hashlib.sha256()
    for path, leaf in sorted(
        jax.tree.leaves_with_path(state), key=lambda item: jax.tree_util.keystr(item[0])
    ):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        checksum.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        checksum.update(np.ascontiguousarray(leaf).tobytes())
    return checksum.hexdigest()


def _start(
    config: Config, variant: str, data: ClickData, checkpoints: Checkpoints | None
) -> tuple[nnx.GraphDef, nnx.State, Progress]:
    """Structure and values of (model, optimizer), new or from the last checkpoint."""

    def build() -> tuple[DLRM, nnx.Optimizer]:
        return create(config, variant, data.table_sizes)

    if checkpoints is None or checkpoints.latest is None:
        graphdef, state = nnx.split(build())
        return graphdef, state, Progress(data.start)
    graphdef, abstract = nnx.split(nnx.eval_shape(build))
    progress, state = checkpoints.restore(abstract)
    return graphdef, state, progress


def _tables(state: nnx.State) -> list[jax.Array]:
    """The embedding tables, dense or cores with their caches, without the slots of their optimizers."""
    return [
        variable[...]
        for path, variable in nnx.to_flat_state(state)
        if "tables" in path
        and path[0] == 0
        and str(path[-1]).startswith(("embedding", "core_", "cache_"))
        if "slot" not in str(path[-1])
    ]
