"""What rows learned in the cache, put back into the cores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt

N, D = 2000, 16


def flushed(size, count=32, **options):
    """Cores, ids, their rows before, what they learned to be, and the cores after a flush."""
    shape = jax_tt.TTShape.suggest(N, D, ranks=8)
    cores = jax_tt.init_cores(jax.random.key(0), shape, "approx-normal")
    cache = jax_tt.RowCache(count, ways=count, write_back=jax_tt.WriteBack(**options))
    table = jax_tt.init_cached_table(cores, cache, num_embeddings=N)
    ids = jnp.asarray(np.random.default_rng(0).choice(N, count, replace=False))
    _, directory = jax_tt.cached_tt_lookup(table, ids, cache, num_embeddings=N)
    table = table._replace(directory=directory)
    table = jax_tt.populate_cache(table, cache, num_embeddings=N)
    ids = table.directory.tags.reshape(-1)
    learned = table.values + size * jax.random.normal(jax.random.key(1), table.values.shape)
    after = jax_tt.flush_cache(table._replace(rows=learned), cache, num_embeddings=N)
    return cores, ids, table.values, learned, after


@pytest.mark.parametrize("size", [0.01, 1.0])
def test_writing_back_is_never_worse_than_dropping(size):
    # Fresh rows are about 0.01: the larger ones have to grow by more than a linear fit of the cores knows of.
    _, _, before, learned, after = flushed(size)
    dropped = jnp.sum((learned - before) ** 2)
    assert jnp.sum((learned - after.values) ** 2) < 0.9 * dropped


def test_more_steps_fit_rows_that_grew_a_hundredfold():
    _, _, before, learned, after = flushed(1.0, steps=8)
    assert jnp.sum((learned - after.values) ** 2) < 0.1 * jnp.sum((learned - before) ** 2)


def test_a_row_that_is_not_finite_is_dropped_alone():
    shape = jax_tt.TTShape.suggest(N, D, ranks=8)
    cores = jax_tt.init_cores(jax.random.key(0), shape)
    cache = jax_tt.RowCache(4, ways=4)
    table = jax_tt.init_cached_table(cores, cache, num_embeddings=N)
    ids = jnp.array([3, 700])
    _, directory = jax_tt.cached_tt_lookup(table, ids, cache, num_embeddings=N)
    table = jax_tt.populate_cache(table._replace(directory=directory), cache, num_embeddings=N)
    bad = jnp.where(table.directory.tags.reshape(-1, 1) == 3, jnp.nan, table.values + 0.01)
    after = jax_tt.flush_cache(table._replace(rows=bad), cache, num_embeddings=N)
    assert all(bool(jnp.isfinite(core).all()) for core in after.cores)
    here = after.directory.tags.reshape(-1) == 700
    learned, kept = bad[here], after.values[here]
    assert jnp.sum((learned - kept) ** 2) < 0.1 * 0.01**2 * D
