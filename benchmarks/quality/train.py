"""Trains a pair of tables of any kind with the loop of the example."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from benchmarks.quality.orders import make_order
from benchmarks.quality.settings import VARIANTS, Config
from benchmarks.quality.sizes import split_ratio
from benchmarks.quality.starts import make_start
from benchmarks.quality.tables import make_table
from examples.retrieval.data import Interactions
from examples.retrieval.model import MatrixFactorization, learning_rate
from examples.retrieval.train import train as train_example


def make_model(
    config: Config, data: Interactions, trained: Mapping[str, np.ndarray] | None = None
) -> MatrixFactorization:
    """The model of a run.

    Args:
        trained: rows of "users" and of "items" to start from, as `starts.make_start` takes them.
    """
    variant = VARIANTS[config.variant]
    sizes = {"users": data.num_users, "items": data.num_items}
    ratios = split_ratio(variant.table, sizes.values(), config.features, config.ratio)
    start = make_start(config.start, data, config.features, config.init_std, trained)
    rngs = nnx.Rngs(config.seed)

    def table(ids: str, ratio: float | None) -> Any:
        return make_table(
            variant.table,
            sizes[ids],
            config.features,
            std=config.init_std,
            optimizer=jax_tt.optimizers.Adam(learning_rate(config, data))
            if variant.fused
            else None,
            ratio=ratio,
            tt_rank=config.tt_rank,
            order=lambda shape: make_order(config.order, data, ids, shape, start[ids]),
            start=start[ids],
            dtype=config.dtype,
            rngs=rngs,
        )

    users, items = (table(ids, ratio) for ids, ratio in zip(sizes, ratios, strict=True))
    return MatrixFactorization(users, items)


def train(
    config: Config,
    data: Interactions,
    workdir: Path,
    *,
    trained: Mapping[str, np.ndarray] | None = None,
    save_rows: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains `config.variant` in `workdir`, from its last checkpoint if there is one, and returns its figures.

    Args:
        trained: see `make_model`.
        save_rows: write the trained rows to this file, an .npz of "users" and "items".
        **options: of the evaluation, see the example.
    """
    model = make_model(config, data, trained)
    result = train_example(config, data, model, workdir, **options)
    if save_rows is not None:
        _save_rows(save_rows, model, data)
    return result


def _save_rows(path: Path, model: MatrixFactorization, data: Interactions) -> None:
    """Writes a file that is either complete or absent, even if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished.npz")
    users = model.users(jnp.arange(data.num_users, dtype=jnp.int32))
    items = model.items(jnp.arange(data.num_items, dtype=jnp.int32))
    np.savez(unfinished, users=np.asarray(users), items=np.asarray(items))
    unfinished.replace(path)
