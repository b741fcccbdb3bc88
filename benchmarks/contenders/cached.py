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
        cache = jax_tt.RowCache(3 * rows // 2)
        train, cores = jax_tt.tables.TTTable.of(
            cores_of(work), work.shape.num_embeddings, jax_tt.Update(OPTIMIZER)
        )
        self._table = table = jax_tt.tables.RowCachedTable(train, cache)
        params = dict(zip(train.spec.param_names, cores, strict=True))
        state = params | table.init_rest(params)
        # Cached rows are hot ones: none of the rows that are only counted will take their place.
        hot = np.random.default_rng(3).choice(work.shape.num_embeddings, rows, replace=False)
        ids = jnp.asarray(hot, jnp.int32)
        _, state = jax_tt.lookup(table, state, ids)
        self._state = jax_tt.cache.populate(table, state)
        cached = np.asarray(self._state["cache_tags"]).reshape(-1)
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
        def forward(state, bags):
            return jax_tt.lookup_bags(self._table, state, bags, train=False)[0]

        state = self._state
        return lambda i: forward(state, batches[i % len(batches)]).block_until_ready()

    def fused_step(self, batches: list[jax_tt.Bags]) -> Call:
        """Forward, counting, backward and update of the cached rows and the cores."""
        gradient = jnp.asarray(self._work.gradient)

        def step(state, bags):
            def loss(trained):
                state_now = {**state, **trained}
                out, after = jax_tt.lookup_bags(self._table, state_now, bags)
                return jnp.vdot(out, gradient), after

            trained = {name: state[name] for name in self._table.spec.trained_names}
            (value, after), trained = jax.value_and_grad(loss, has_aux=True)(trained)
            return value, {**after, **trained}

        program = jax.jit(step, donate_argnums=0)
        state = jax.tree.map(jnp.copy, self._state)

        def call(i: int) -> object:
            nonlocal state
            value, state = program(state, batches[i % len(batches)])
            return jax.block_until_ready((value, state))

        return call
