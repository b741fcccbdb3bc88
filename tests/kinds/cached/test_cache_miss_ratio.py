"""Miss-ratio curves against a cache that is simulated request by request, and sizes suggested from ids."""

from collections import OrderedDict

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_tt
from jax_tt._directories.cache_directory import init_directory

matplotlib.use("Agg")


def simulated(ids, size):
    """Misses of an LRU cache."""
    cache, misses = OrderedDict(), 0
    for i in ids:
        if i not in cache:
            misses += 1
        cache[i] = None
        cache.move_to_end(i)
        if len(cache) > size:
            cache.popitem(last=False)
    return misses


@given(st.lists(st.integers(0, 12), max_size=80))
def test_lru_is_exact(ids):
    sizes = np.arange(1, 15)
    curve = jax_tt.cache.miss_ratio_curve(np.array(ids, np.int32), sizes)
    misses = [simulated(ids, size) for size in sizes] if ids else np.ones(14)
    np.testing.assert_allclose(curve.miss_ratios * max(len(ids), 1), misses, atol=1e-9)
    assert curve.requests == len(ids) and curve.distinct == len(set(ids))


def test_lru_on_a_longer_stream():
    ids = np.random.default_rng(0).zipf(1.2, 20_000) % 3000
    sizes = [1, 10, 100, 1000, 5000]
    curve = jax_tt.cache.miss_ratio_curve(ids, sizes)
    expected = [simulated(ids.tolist(), size) / ids.size for size in sizes]
    np.testing.assert_allclose(curve.miss_ratios, expected, atol=1e-12)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 15))
def test_ideal_is_the_best_set(ids, size):
    best = sorted((ids.count(i) for i in set(ids)), reverse=True)[:size]
    curve = jax_tt.cache.miss_ratio_curve(ids, [size], policy="ideal")
    np.testing.assert_allclose(curve.miss_ratios, [1 - sum(best) / len(ids)])


@pytest.mark.parametrize("policy", ["lru", "ideal"])
def test_sample_is_near(policy):
    ids = np.random.default_rng(0).zipf(1.3, 400_000) % 50_000
    sizes = [2000, 5000, 20_000]
    whole = jax_tt.cache.miss_ratio_curve(ids, sizes, policy)
    part = jax_tt.cache.miss_ratio_curve(ids, sizes, policy, sample=0.1)
    np.testing.assert_allclose(part.miss_ratios, whole.miss_ratios, atol=0.02)
    assert abs(part.distinct / whole.distinct - 1) < 0.1
    assert part.requests == whole.requests


def test_input():
    curve = jax_tt.cache.miss_ratio_curve([[3, -1], [3, -1]])  # padding is no request
    assert curve.requests == 2 and curve.sizes.tolist() == [1] and curve.miss_ratios[0] == 0.5
    wide = jax_tt.cache.miss_ratio_curve(np.array([2**60, 5, 2**60]), [2])
    assert wide.distinct == 2
    assert jax_tt.cache.miss_ratio_curve([]).miss_ratios.tolist() == [1.0]
    # The default sizes end where every row is cached: only first requests miss.
    ids = np.random.default_rng(0).integers(0, 500, 5000)
    curve = jax_tt.cache.miss_ratio_curve(ids)
    assert curve.sizes[-1] == curve.distinct
    np.testing.assert_allclose(curve.miss_ratios[-1], curve.distinct / 5000)
    assert (np.diff(curve.miss_ratios) <= 0).all()


def test_errors():
    for arguments, message in [
        ({"ids": [1.5]}, "ids: got float64"),
        ({"sizes": [0]}, "sizes: got"),
        ({"sizes": []}, "sizes: got"),
        ({"policy": "fifo"}, "policy: got 'fifo'"),
        ({"sample": 0}, "sample: got 0"),
        ({"sample": 1.5}, "sample: got 1.5"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            jax_tt.cache.miss_ratio_curve(**{"ids": [1, 2], **arguments})


def test_plot():
    import matplotlib.pyplot as plt

    _, axes = plt.subplots()
    curve = jax_tt.cache.miss_ratio_curve([1, 2, 1], [1, 2])
    assert curve.plot(axes, label="mine") is axes
    assert axes.lines[0].get_label() == "mine"
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), curve.miss_ratios)
    assert curve.plot() is plt.gca()
    plt.close("all")


IDS = np.random.default_rng(0).zipf(1.2, 50_000) % 20_000
ADAGRAD = jax_tt.optimizers.Adagrad(0.1)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("optimizer", [None, ADAGRAD, jax_tt.optimizers.RowWiseAdagrad(0.1)])
@pytest.mark.parametrize("budget", [20_000, 100_000, 500_000])
def test_suggestion_uses_the_budget(policy, optimizer, budget):
    """Counted from the arrays that a table of that cache would have."""
    cache = jax_tt.RowCache.suggest(
        IDS, budget, features=16, dtype="bfloat16", optimizer=optimizer, policy=policy, ways=4
    )
    sets, ways, buckets, room = cache.layout(20_000)
    directory = init_directory(sets, ways, buckets, room, np.int32)
    state = {None: 0, ADAGRAD: 4 * 16}.get(optimizer, 4)
    used = sets * ways * (16 * 2 + state)
    used += sum(part.nbytes for part in directory) - directory.totals.nbytes
    # Counters are rounded up to whole buckets of every set.
    assert used < budget + 16 * 32 * sets
    one_more_set = 4 * (16 * 2 + state + 12 + 4 * 16)
    assert used > 0.8 * budget - one_more_set or cache.capacity >= len(set(IDS.tolist())) - ways
    assert cache.policy == policy and cache.ways == 4


def test_suggestion_ends_with_the_sample():
    cache = jax_tt.RowCache.suggest([1, 2, 2, 5, -1], 10**9, features=8)
    assert cache.capacity == 3 and cache.counters == 3


def test_suggestion_grows_with_the_budget():
    sizes = [jax_tt.RowCache.suggest(IDS, b, features=64).capacity for b in (10**4, 10**5, 10**6)]
    assert sizes == sorted(set(sizes))


def test_suggestion_errors():
    with pytest.raises(ValueError, match="budget_bytes: got 10 bytes; expected at least"):
        jax_tt.RowCache.suggest(IDS, 10, features=8)
    with pytest.raises(ValueError, match="ids: got none"):
        jax_tt.RowCache.suggest([], 1000, features=8)
    with pytest.raises(ValueError, match="policy: got 'fifo'"):
        jax_tt.RowCache.suggest(IDS, 1000, features=8, policy="fifo")
