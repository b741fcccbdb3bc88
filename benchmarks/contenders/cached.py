"""jax_tt: a TT table behind a row cache with a given hit rate."""

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.contenders.ours import cores_of
from benchmarks.timing import Call
from benchmarks.work import LEARNING_RATE, Work
from jax_tt import optimizers

OPTIMIZER = optimizers.SGD(LEARNING_RATE)


class Filled:
    """A cache of a fixed set of rows from the whole table.

    Args:
        work: the table and the size of its batches.
        rows: how many to cache.
    """

    def __init__(self, work: Work, rows: int) -> None:
        self._work = work
        # Half as many ids again as slots to spare, so that no set overflows.
        self._cache = jax_tt.RowCache(3 * rows // 2)
        self._options = {"num_embeddings": work.shape.num_embeddings, "optimizer": OPTIMIZER}
        table = jax_tt.init_fused_table(cores_of(work), OPTIMIZER)
        table = jax_tt.init_cached_table(table, self._cache, **self._options)
        # Cached rows are hot ones: none of the rows that are only counted will take their place.
        hot = np.random.default_rng(3).choice(work.shape.num_embeddings, rows, replace=False)
        ids = jnp.asarray(hot, jnp.int32)
        _, directory = jax_tt.cached_tt_lookup(table, ids, self._cache, **self._options)
        table = jax_tt.populate_cache(
            table._replace(directory=directory), self._cache, **self._options
        )
        self._table = table
        cached = np.asarray(table.directory.tags).reshape(-1)
        self._cached = cached[cached >= 0]

    def batches(self, hit_rate: float, count: int = 10) -> list[np.ndarray]:
        """Ids of which this share is cached, uniformly distributed otherwise."""
        rng = np.random.default_rng(0)
        n = self._work.nnz
        hits = round(hit_rate * n)

        def draw() -> np.ndarray:
            found = rng.choice(self._cached, hits)
            others = rng.integers(0, self._work.shape.num_embeddings, 2 * n)
            missed = others[~np.isin(others, self._cached)][: n - hits]
            return rng.permutation(np.concatenate([found, missed])).astype(np.int32)

        return [draw() for _ in range(count)]

    def forward(self, batches: list[jax_tt.Bags]) -> Call:
        """Pooled rows without counting, as in inference."""

        @jax.jit
        def forward(table, bags):
            return jax_tt.cached_tt_embed_bag(
                table, bags, self._cache, count=False, **self._options
            )[0]

        table = self._table
        return lambda i: forward(table, batches[i % len(batches)]).block_until_ready()

    def fused_step(self, batches: list[jax_tt.Bags]) -> Call:
        """Forward, counting, backward and update of the cached rows and the cores."""
        gradient = jnp.asarray(self._work.gradient)

        def step(table, bags):
            def loss(trained):
                own = table._replace(table=trained[0], rows=trained[1])
                out, directory = jax_tt.cached_tt_embed_bag(own, bags, self._cache, **self._options)
                return jnp.vdot(out, gradient), directory

            (value, directory), (cores, rows) = jax.value_and_grad(loss, has_aux=True)(
                (table.table, table.rows)
            )
            return value, jax_tt.CachedTable(cores, rows, directory)

        program = jax.jit(step, donate_argnums=0)
        table = jax.tree.map(jnp.copy, self._table)

        def call(i: int) -> object:
            nonlocal table
            value, table = program(table, batches[i % len(batches)])
            return jax.block_until_ready((value, table))

        return call
