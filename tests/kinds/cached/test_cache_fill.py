"""A row cache that is filled from a sample of ids: which rows it holds, what stays, and how counting goes on."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import RowCache
from jax_tt._base.words import set_of
from tests.helpers import assert_close, dense_table, make_case
from tests.kinds.cached import cache_parts
from tests.kinds.cached.cache_case import SHAPE, D, N, same, trained, warm

CORES = make_case(SHAPE, "float32", False).cores
RULE = jax_tt.optimizers.Adam(0.1)


def most_frequent(sets, ways, ids, weights=None):
    """Rows of every set, by dict and sort."""
    counts = {}
    for row, weight in zip(ids, [1] * len(ids) if weights is None else weights, strict=True):
        counts[row] = counts.get(row, 0) + weight
    homes = np.asarray(set_of(jnp.asarray(list(counts), jnp.int32), sets)).tolist()
    found = [[] for _ in range(sets)]
    for row, home in zip(counts, homes, strict=True):
        found[home].append(row)
    ranked = [sorted(rows, key=lambda row: (-counts[row], row))[:ways] for rows in found]
    return [set(rows) for rows in ranked]


def held(directory):
    return [set(row[row >= 0].tolist()) for row in np.asarray(directory.tags)]


@pytest.mark.parametrize(
    ("capacity", "ways", "policy", "weighted"),
    [(24, 4, "lfu", True), (7, 7, "lru", False)],
)
def test_sets_hold_their_most_frequent_rows(capacity, ways, policy, weighted):
    rng = np.random.default_rng(0)
    ids = (N ** rng.random(500)).astype(int) - 1
    weights = rng.integers(1, 5, ids.shape) if weighted else None
    cache = RowCache(capacity, ways=ways, policy=policy, counters=1, write_back=None)
    empty = cache_parts.init_parts(CORES, cache, num_embeddings=N)
    table = cache_parts.fill(empty, cache, ids, weights=weights, num_embeddings=N)
    sets = -(-capacity // ways)
    assert held(table.directory) == most_frequent(sets, ways, ids.tolist(), weights)
    tags = np.asarray(table.directory.tags).reshape(-1)
    rows = dense_table(table.cores, N)
    assert_close(np.asarray(table.values)[tags >= 0], rows[tags[tags >= 0]], 1e-5)
    assert table.directory.ghost_tags.shape == empty.directory.ghost_tags.shape
    assert not np.any(np.asarray(table.directory.ghost_tags) >= 0)
    # Any shape and integer type, with padding, is the same sample.
    padded = np.concatenate([ids, np.full(12, -1)]).astype(np.int16).reshape(2, -1)
    whole = None if weights is None else np.append(weights, np.ones(12)).reshape(2, -1)
    same(cache_parts.fill(empty, cache, padded, weights=whole, num_embeddings=N), table)


@pytest.mark.parametrize("gradients", [pytest.param("rows", marks=pytest.mark.slow), "cores"])
def test_rows_of_the_sample_stay_and_others_are_written_back(gradients):
    cache = RowCache(8, ways=8, counters=64, gradients=gradients)
    table = warm(CORES, cache, "auto", np.arange(8), optimizer=RULE)
    if gradients == "rows":
        table = trained(table)
        noise = np.random.default_rng(0).normal(size=table.values.shape).astype(np.float32)
        slots = [name for name in table.rows if name.startswith("slot_")]
        noisy = dict(zip(slots, (noise, noise + 1), strict=True))
        table = table._replace(rows={**table.rows, **noisy})
    sample = [2, 2, 5, 5, 20, 20, 21, 21]
    fill = partial(cache_parts.fill, num_embeddings=N, optimizer=RULE)
    after = fill(table, cache, sample)
    assert held(after.directory)[0] > {2, 5, 20, 21} and len(held(after.directory)[0]) == 8
    assert len(held(after.directory)[0] & set(range(8))) == 6
    figures = after.directory.statistics()
    assert figures["evicted"] == 2
    before, now = (np.asarray(t.directory.tags)[0] for t in (table, after))
    np.testing.assert_array_equal(now[before == now], before[before == now])
    kept = np.flatnonzero(before == now)
    assert len(kept) == 6
    if gradients == "cores":
        return
    same(after.values[kept], table.values[kept])
    for old, new in zip(table.slots, after.slots, strict=True):
        same(new[kept], old[kept])
        assert not np.any(np.delete(np.asarray(new), kept, axis=0))
    assert figures["written_back"] == 2
    gone = np.delete(np.arange(8), kept)
    error = [
        np.sum((np.asarray(table.values)[gone] - dense_table(t.cores, N)[before[gone]]) ** 2)
        for t in (table, after)
    ]
    assert error[1] < 0.9 * error[0]
    same(fill(after, dataclasses.replace(cache, write_back=None), sample).values, after.values)


@pytest.mark.parametrize(
    "options", [{"policy": "lru"}, {"half_life": None}, {}], ids=["lru", "lfu", "ageing"]
)
def test_counting_goes_on_from_the_sample(options):
    cache = RowCache(2, ways=2, counters=16, write_back=None, **options)
    table = cache_parts.init_parts(CORES, cache, num_embeddings=N)
    table = cache_parts.fill(table, cache, [1, 1, 1, 2, 2, 2, 2], num_embeddings=N)
    # Two requests for 3 are fewer than the sample has for 1, but later.
    for ids, wanted in (([3, 3], {"lru": {2, 3}}), ([3, 3, 3], {"lru": {2, 3}, "lfu": {2, 3}})):
        _, directory = cache_parts.lookup(table, jnp.array(ids), cache, num_embeddings=N)
        table = table._replace(directory=directory)
        table = cache_parts.populate(table, cache, num_embeddings=N)
        assert held(table.directory)[0] == wanted.get(cache.policy, {1, 2})


def test_samples_that_do_not_fit():
    for error, match, ids, weights in [
        (ValueError, "ids: got none", [], None),
        (ValueError, "ids: got none", [-1, -5], None),
        (ValueError, f"ids: got the id {N}; expected 0 to {N - 1}", [3, N], None),
        (TypeError, "ids: got float64 .*; expected integers", [0.5], None),
        (ValueError, r"weights: got .*shape \(2,\) for ids of shape \(3,\)", [1, 2, 3], [1, 2]),
        (ValueError, "weights: .* expected positive numbers", [1, 2], [1, 0]),
        (ValueError, "weights: .* expected positive numbers", [1, 2], [1, np.nan]),
    ]:
        cache = RowCache(4, ways=2)
        table = cache_parts.init_parts(CORES, cache, num_embeddings=N)
        with pytest.raises(error, match=match):
            cache_parts.fill(table, cache, ids, weights=weights, num_embeddings=N)


def test_it_is_refused_under_jit():
    cache = RowCache(4, ways=2)
    table = cache_parts.init_parts(CORES, cache, num_embeddings=N)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda t: cache_parts.fill(t, cache, [1], num_embeddings=N))(table)


def test_huge_counts_do_not_overflow():
    cache = RowCache(4, ways=4, write_back=None)
    table = cache_parts.init_parts(CORES, cache, num_embeddings=N)
    table = cache_parts.fill(table, cache, [1, 2, 2], weights=1e30, num_embeddings=N)
    assert held(table.directory) == [{1, 2}]
    assert np.asarray(table.directory.scores).max() == 2**31 - 1


@pytest.mark.slow
def test_a_layer_with_an_order_of_ids():
    """Ids are those of the layer; other layers of a model do not change."""
    order = jax_tt.order.IdOrder(np.arange(1000)[::-1])
    cache = RowCache(50, ways=5, write_back=None)
    layer = jax_tt.TTEmbed(1000, D, tt_ranks=4, cache=cache, id_order=order, rngs=nnx.Rngs(0))
    ids = jnp.array([7, 990, 3])
    before = layer(ids)
    layer.fill_cache(ids)
    assert set(np.ravel(layer.cache_tags[...])) - {-1} == {992, 9, 996}
    layer.eval()
    assert_close(layer(ids), before, 1e-6)
    with pytest.raises(ValueError, match="has no row cache"):
        jax_tt.TTEmbed(1000, D, rngs=nnx.Rngs(0)).fill_cache([1])


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = jax_tt.tt_table(1000, D, cache=RowCache(50, ways=5, write_back=None))
        items = jax_tt.linen.TableEmbed(table, name="items")(ids)
        return items + jax_tt.linen.TableEmbed(table, name="others")(ids)


def test_linen_caches_by_path():
    ids = jnp.array([1, 2])
    variables = Model().init(jax.random.key(0), ids)
    layer = jax_tt.linen.find_layers(Model(), variables, ids)["items"]
    fill = partial(jax_tt.cache.fill, ids=[[5, 6], [6, 7]])
    _, filled = jax_tt.linen.update_table(layer, variables, fill, path="items")
    tags = {path: np.ravel(own["cache_tags"]) for path, own in filled["row_cache"].items()}
    assert set(tags["items"]) == {-1, 5, 6, 7} and set(tags["others"]) == {-1}
    assert jax.tree.structure(filled) == jax.tree.structure(variables)
