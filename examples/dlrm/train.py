"""Trains one variant in this process and measures it."""

import functools
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
from flax import nnx
from tqdm import tqdm

from examples.dlrm import devices, metrics
from examples.dlrm.batch import ClickData, Position
from examples.dlrm.checkpoint import Checkpoints, Progress
from examples.dlrm.config import VARIANTS, Config
from examples.dlrm.create import create
from examples.dlrm.data_criteo import CriteoClicks
from examples.dlrm.data_synthetic import SyntheticClicks
from examples.dlrm.embeddings import CollectedTables
from examples.dlrm.learner import Learner, start
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
            multi_hot=config.multi_hot,
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


def train(config: Config, variant: str) -> Result:
    """Trains to `config.steps` (from the last checkpoint, where asked to) and evaluates.

    Raises:
      SystemExit: the data is too short for the steps, or the loss is not finite; says what to do.
    """
    devices.use(config)
    start_bytes = peak_memory()
    data = open_data(config)
    checkpoints = None
    if config.checkpoint_dir is not None:
        directory = Path(config.checkpoint_dir) / variant
        checkpoints = Checkpoints(directory, config.fingerprint(), config.resume)
    learner, values, progress = _start(config, variant, data, checkpoints)
    jax.block_until_ready(values)
    forget_peak_memory()  # what counts is training, not how the first values were drawn
    values = _loop(config, variant, data, learner, values, progress, checkpoints)
    state = learner.state(values)
    scores, curve, hit_rate = Scores(), progress.curve, None
    if config.eval_examples:
        scores = evaluate(learner, values, data, progress.position)
        hit_rate = _hit_rate(learner, values, data, progress.position)
        curve = [*curve, (progress.step, scores.auc)]
    tables = table_arrays(state)
    rows = [
        x for name, x in tables if name.startswith(("embedding", "core_", "cache_rows", "kernel"))
    ]
    packed = [x for name, x in tables if name == "packed"]
    return Result(
        variant=variant,
        steps=progress.step,
        examples=progress.step * config.batch_size,
        auc=scores.auc,
        log_loss=scores.log_loss,
        best_auc=scores.best_auc,
        curve=curve,
        table_parameters=sum(x.size for x in rows) + sum(config.features * len(x) for x in packed),
        table_bytes=sum(x.nbytes for _, x in tables),
        state_bytes=sum(x.nbytes for x in jax.tree.leaves(state)),
        step_ms=statistics.median(progress.step_ms[WARM_UP:] or progress.step_ms),
        peak_bytes=max(progress.peak_bytes, peak_memory()),
        start_bytes=start_bytes,
        digest=digest(state) if checkpoints else None,
        hit_rate=hit_rate,
    )


def _loop(
    config: Config,
    variant: str,
    data: ClickData,
    learner: Learner,
    values: list[jax.Array],
    progress: Progress,
    checkpoints: Checkpoints | None,
) -> list[jax.Array]:
    """Trains with a progress bar; advances `progress` and returns the final values."""
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
        disable=jax.process_index() > 0,
    ) as bar:
        while progress.step < config.steps:
            batch, position = next(stream, (None, progress.position))
            if batch is None:
                raise SystemExit(
                    f"--steps: the data ends after {progress.step} steps of {config.batch_size} "
                    f"examples; take --steps {progress.step} or fewer"
                )
            begin = time.perf_counter()
            values, loss = jax.block_until_ready(learner.step(values, batch))
            seconds = time.perf_counter() - begin
            progress.advance(position, 1e3 * seconds)
            if not math.isfinite(float(loss)):
                raise SystemExit(
                    f"the loss is {loss} at step {progress.step}; lower --learning-rate"
                )
            average = float(loss) if math.isnan(average) else 0.95 * average + 0.05 * float(loss)
            at_end = progress.step == config.steps
            if config.eval_examples and progress.step % config.eval_every == 0 and not at_end:
                scores = evaluate(learner, values, data, progress.position)
                progress.curve.append((progress.step, scores.auc))
                shown["AUC"] = f"{scores.auc:.4f}"
            bar.set_postfix(
                {"loss": f"{average:.4f}", **shown, "ms": f"{1e3 * seconds:.1f}"}, refresh=False
            )
            bar.update()
            if checkpoints and (progress.step % config.checkpoint_every == 0 or at_end):
                progress.peak_bytes = max(progress.peak_bytes, peak_memory())
                checkpoints.save(progress, learner.state(values))
            if os.getppid() != parent:
                raise SystemExit("the process that started this one has ended; stopping")
    return values


def evaluate(
    learner: Learner, values: list[jax.Array], data: ClickData, position: Position
) -> Scores:
    """AUC and log loss on the held-out examples, and the best possible AUC on the same ones."""
    batches = list(data.evaluation(position))
    if not batches:
        raise SystemExit(
            "--eval-examples: the data ends before the first batch to evaluate on; "
            "take fewer --steps"
        )
    labels = np.concatenate([batch.label for batch in batches])
    logits = np.concatenate([np.asarray(learner.predict(values, batch)) for batch in batches])
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
) -> tuple[Learner, list[jax.Array], Progress]:
    """The functions and the values of (model, optimizer), new or from the last checkpoint."""
    if checkpoints is None or checkpoints.latest is None:
        return *start(config, variant, data), Progress(data.start)
    mesh = devices.mesh_of(config)
    make = functools.partial(create, config, variant, data.table_sizes)
    # The places of divided arrays are those of a model that has been made.
    graphdef, shapes = nnx.split(nnx.eval_shape(make) if mesh is None else make())
    progress, state = checkpoints.restore(shapes)
    return Learner(graphdef, state, mesh), devices.on_all(jax.tree.leaves(state), mesh), progress


def table_arrays(state: nnx.State) -> list[tuple[str, jax.Array]]:
    """All arrays of the embedding tables but the slots of their optimizers: rows, cores, caches, counts, widening."""
    return [
        (str(path[-1]), variable.get_value())
        for path, variable in nnx.to_flat_state(state)
        if path[0] == 0 and "tables" in path and "slot" not in str(path[-1])
    ]


def _hit_rate(
    learner: Learner, values: list[jax.Array], data: ClickData, position: Position
) -> float | None:
    """Share of the lookups of held-out examples in cached tables that are hits; None without a cache."""
    tables = learner.merge(values)[0].tables
    if not isinstance(tables, CollectedTables):
        return None
    return tables.hit_rate(np.concatenate([batch.ids for batch in data.evaluation(position)]))
