"""Tables of many sizes under row-wise Adagrad: in one call, and with an op for each."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
    """Zipf ids for tables of these sizes, and the gradient of all features side by side.

    ``hot`` is the number of ids in the bags of each table. Tables of at least ``compressed`` rows are tensor trains of
    rank 32.
    """

    sizes: tuple[int, ...]
    features: int
    samples: int
    hot: tuple[int, ...]
    compressed: int | None = None

    def is_train(self, rows: int) -> bool:
        """Whether a table of so many rows is a tensor train."""
        return self.compressed is not None and rows >= self.compressed

    def table(self, rows: int) -> jax_tt.Table:
        """The table of a feature."""
        rule = optimizers.RowWiseAdagrad(LEARNING_RATE)
        if self.is_train(rows):
            return jax_tt.tt_table(rows, self.features, tt_ranks=32, optimizer=rule)
        return jax_tt.dense_table(rows, self.features, optimizer=rule)

    @functools.cached_property
    def batches(self) -> list[list[np.ndarray]]:
        """Ids ``[samples, hot]`` of every table, several times."""
        rng = np.random.default_rng(0)
        return [
            [
                zipf_ids(rng, rows, self.samples * hot).reshape(-1, hot).astype(np.int32)
                for rows, hot in zip(self.sizes, self.hot, strict=True)
            ]
            for _ in range(8)
        ]

    @functools.cached_property
    def gradient(self) -> np.ndarray:
        width = self.features * len(self.sizes)
        return 1e-3 * np.random.default_rng(2).standard_normal((self.samples, width), np.float32)


def together(work: Tables) -> tuple[Call, Call]:
    """Forward and training step of a collection."""
    return program(work).calls(work)


def one_by_one(work: Tables) -> tuple[Call, Call]:
    """The same with an op for each table, all in one program."""
    return program(work, [[k] for k in range(len(work.sizes))]).calls(work)


@dataclasses.dataclass(frozen=True)
class Program:
    """Jitted functions, and the states they start from: ``step(states, ids, gradient)`` overwrites them."""

    look_up: Any
    step: Any
    states: Any

    def calls(self, work: Tables) -> tuple[Call, Call]:
        batches = [[jnp.asarray(ids) for ids in batch] for batch in work.batches]
        gradient, states = jnp.asarray(work.gradient), self.states

        def forward(i: int) -> object:
            return self.look_up(states, batches[i % len(batches)]).block_until_ready()

        def step(i: int) -> object:
            nonlocal states
            states = self.step(states, batches[i % len(batches)], gradient)
            return jax.block_until_ready(states)

        return forward, step


def program(work: Tables, parts: Sequence[Sequence[int]] | None = None) -> Program:
    """A program with a collection for each part of the tables; by default, one for all of them."""
    parts = [range(len(work.sizes))] if parts is None else parts
    collections = [_collection({f"t{k}": work.table(work.sizes[k]) for k in own}) for own in parts]

    def each(function: Callable[..., Any], *columns: Any) -> list[Any]:
        return [function(*own) for own in zip(collections, *columns, strict=True)]

    def look_up(states: Any, batch: list[jax.Array]) -> jax.Array:
        rows = [
            jax_tt.lookup_features(
                collection, state, {f"t{k}": batch[k] for k in own}, layout="concatenated"
            )[0]
            for collection, state, own in zip(collections, states, parts, strict=True)
        ]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)

    def step(states: Any, batch: list[jax.Array], gradient: jax.Array) -> Any:
        def loss(trained: Any) -> jax.Array:
            now = each(jax_tt.Collection.replaced, states, trained)
            return jnp.vdot(look_up(now, batch), gradient)

        new = jax.grad(loss)(each(jax_tt.Collection.trained, states))
        return [state for state, _ in each(jax_tt.Collection.overwritten, states, new)]

    states = [jax.jit(own.init)(jax.random.key(0)) for own in collections]
    return Program(jax.jit(look_up), jax.jit(step, donate_argnums=0), states)


def _collection(tables: dict[str, jax_tt.Table]) -> jax_tt.Collection:
    return jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables}, stack=True)
