"""Dense tables of many sizes under row-wise Adagrad: jax_tt in one call and table by table, and FBGEMM's one call."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.ids import zipf_ids
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE
from jax_tt import optimizers

# The 26 tables of Criteo Kaggle, the largest five divided by 2 or 4 so that every contender's copy fits into memory.
CRITEO = (
    1460, 583, 10131227 // 4, 2202608 // 2, 305, 24, 12517, 633, 3, 93145, 5683, 8351593 // 4, 3194,
    27, 14992, 5461306 // 4, 10, 5652, 2173, 4, 7046547 // 4, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tables:
    """Zipf ids for tables of these sizes, ``ids`` per bag, and the gradient of all features side by side."""

    sizes: tuple[int, ...]
    features: int
    samples: int
    ids: int

    @functools.cached_property
    def batches(self) -> list[list[np.ndarray]]:
        """Ids ``[samples, ids]`` of every table, several times."""
        rng = np.random.default_rng(0)
        shape = self.samples, self.ids
        return [
            [
                zipf_ids(rng, rows, self.samples * self.ids).reshape(shape).astype(np.int32)
                for rows in self.sizes
            ]
            for _ in range(8)
        ]

    @functools.cached_property
    def gradient(self) -> np.ndarray:
        width = self.features * len(self.sizes)
        return 1e-3 * np.random.default_rng(2).standard_normal((self.samples, width), np.float32)


def together(work: Tables) -> tuple[Call, Call]:
    """Forward and training step of a collection."""
    rule = optimizers.RowWiseAdagrad(LEARNING_RATE)
    names = [f"t{k}" for k in range(len(work.sizes))]
    collection = jax_tt.Collection(
        {
            name: jax_tt.dense_table(rows, work.features, optimizer=rule)
            for name, rows in zip(names, work.sizes, strict=True)
        },
        {name: jax_tt.Feature(name) for name in names},
    )

    def look_up(state: Any, batch: list[jax.Array]) -> jax.Array:
        by_name = dict(zip(names, batch, strict=True))
        return jax_tt.embed_collection(collection, state, by_name, layout="concatenated")[0]

    def step(state: Any, batch: list[jax.Array], gradient: jax.Array) -> Any:
        def loss(trained: Any) -> jax.Array:
            return jnp.vdot(look_up(collection.replaced(state, trained), batch), gradient)

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    return _calls(work, look_up, step, jax.jit(collection.init)(jax.random.key(0)))


def one_by_one(work: Tables) -> tuple[Call, Call]:
    """The same with an op for each table, all in one program."""
    rule = optimizers.RowWiseAdagrad(LEARNING_RATE)

    def look_up(tables: Any, batch: list[jax.Array]) -> jax.Array:
        rows = [
            jax_tt.fused_embed_bag(table, ids, rule)
            for table, ids in zip(tables, batch, strict=True)
        ]
        return jnp.concatenate(rows, axis=1)

    def step(tables: Any, batch: list[jax.Array], gradient: jax.Array) -> Any:
        return jax.grad(lambda tables: jnp.vdot(look_up(tables, batch), gradient))(tables)

    tables = [
        jax_tt.init_fused_table(jnp.full((rows, work.features), 0.01, jnp.float32), rule)
        for rows in work.sizes
    ]
    return _calls(work, look_up, step, tables)


def _calls(
    work: Tables, look_up: Callable[..., Any], step: Callable[..., Any], state: Any
) -> tuple[Call, Call]:
    batches = [[jnp.asarray(ids) for ids in batch] for batch in work.batches]
    gradient = jnp.asarray(work.gradient)
    forward, donated = jax.jit(look_up), jax.jit(step, donate_argnums=0)

    def call_forward(i: int) -> object:
        return forward(state, batches[i % len(batches)]).block_until_ready()

    def call_step(i: int) -> object:
        nonlocal state
        state = donated(state, batches[i % len(batches)], gradient)
        return jax.block_until_ready(state)

    return call_forward, call_step
