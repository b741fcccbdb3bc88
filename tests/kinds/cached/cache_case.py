"""A small table with a warm row cache, for the tests of lookups and of steps."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt import RowCache
from tests.conftest import WAYS
from tests.helpers import SHAPES, dense_table, f64, fused
from tests.kinds.cached import cache_parts

SHAPE = SHAPES["d3"]
N, D = SHAPE.num_embeddings, SHAPE.features
GRADIENTS = ("rows", "cores")
both = pytest.mark.parametrize("gradients", GRADIENTS)
# For what a row cache does in the same way with the reference, of which other tests ask the results.
on_kernels = pytest.mark.parametrize("method", WAYS[1:], indirect=True)
HOT = np.array([0, 5, 5, 7, 30, 31, 64, 100, N - 1, N - 1], np.int32)


def close(got, want, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def small_cache(gradients="rows", **options):
    return RowCache(**{"capacity": 24, "ways": 4, "counters": 64} | options, gradients=gradients)


def warm(cores, cache, method, hot=HOT, optimizer=None, n=N):
    """A table whose cache holds the hot ids."""
    table = cores if optimizer is None else fused(cores, optimizer)[1]
    return _warmed(table, jnp.asarray(hot), cache, n, optimizer, method)


# Compiled once for many tests. Nothing leaves an empty cache, so that no write-back needs compiling.
@partial(jax.jit, static_argnames=("cache", "n", "optimizer", "method"))
def _warmed(table, hot, cache, n, optimizer, method):
    options = {"num_embeddings": n, "optimizer": optimizer}
    table = cache_parts.init_parts(table, cache, **options)
    options["method"] = method
    _, directory = cache_parts.lookup(table, hot, cache, **options)
    cache = dataclasses.replace(cache, write_back=None)
    return cache_parts.populate(table._replace(directory=directory), cache, **options)


# `cache_parts.lookup` and `cache_parts.embed_bag`, compiled once for every test that asks the same of them.
OPTIONS = ("cache", "combiner", "bounds", "count", "num_embeddings", "optimizer", "method")
lookup = jax.jit(cache_parts.lookup, static_argnames=OPTIONS)
embed_bag = jax.jit(cache_parts.embed_bag, static_argnames=OPTIONS)


def trained(table, seed=3):
    """Rows that have moved away from those of the cores; empty slots hold what nothing may read."""
    rows = np.array(table.values)
    rows += np.random.default_rng(seed).normal(size=rows.shape).astype(rows.dtype)
    rows[np.asarray(table.directory.tags).reshape(-1) < 0] = np.nan
    rows = jnp.asarray(rows)
    if isinstance(table.rows, dict):
        return table._replace(rows=table.rows | {"embedding": rows})
    return table._replace(rows=rows)


def effective(table, n=N):
    """The table that lookups see, float64, and which of its rows are cached in which slot."""
    dense = dense_table(table.cores, n)
    tags = np.asarray(table.directory.tags).reshape(-1)
    slots = np.flatnonzero(tags >= 0)
    dense[tags[slots]] = f64(table.values)[slots]
    return dense, tags, slots
