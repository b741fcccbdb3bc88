"""Rows that leave the cache: how much of what they learned the cores keep, and what that does to the other rows."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from benchmarks import write_back as recommender
from jax_tt._kinds.cached.write_back import table_metric, write_back
from jax_tt._kinds.tensor_train.table import TTTable
from tests.helpers import SHAPES, dense_table, f64, make_case
from tests.kinds.cached import cache_parts
from tests.kinds.cached.cache_case import warm
from tests.kinds.cached.test_cache_training import VIDEO, stream

KEY = jax.random.key(0)
OPTIONS = jax_tt.cache.WriteBack()
PADDED = 32
SHAPE = jax_tt.TTShape(4000, 16, 8, (16, 16, 16), (2, 2, 4))


@partial(jax.jit, static_argnums=(0, 4, 5))
def _written(table, cores, ids, rows, options, method):
    return write_back(table, cores, ids, rows, options, KEY, method)


def written(cores, num_embeddings, ids, rows, options=OPTIONS, method="auto"):
    """Cores after the rows have been written back; padded, so that few programs are needed."""
    table, cores = TTTable.of(cores, num_embeddings)
    more = max(PADDED - len(ids), 0)
    ids, rows = np.pad(ids, (0, more), constant_values=-1), np.pad(rows, ((0, more), (0, 0)))
    return _written(table, cores, jnp.asarray(ids), jnp.asarray(rows), options, method)


def figures(before, after, ids, rows):
    """What is left of the error of the written rows, and the squared change of the others for what was learned."""
    error = ((rows - before[ids]) ** 2).sum()
    others = np.ones(len(before), bool)
    others[ids] = False
    left = ((rows - after[ids]) ** 2).sum() / error
    return left, ((after - before)[others] ** 2).sum() / error


def check_few_rows(name, dtype, method, most_left):
    """Two rows lose most of their error, and where there is nothing to write the cores stay as they are."""
    shape = SHAPES[name]
    n, cores = shape.num_embeddings, make_case(shape, dtype, False).cores
    before = dense_table(cores, n)
    ids = np.array([3, -1, n - 1], np.int32)
    rng = np.random.default_rng(0)
    rows = before[ids] + 0.3 * before.std() * rng.normal(size=(3, shape.features))
    rows = rows.astype("float64" if dtype == "float64" else "float32")
    after = written(cores, n, ids, rows, method=method)
    assert [core.dtype for core in after] == [core.dtype for core in cores]
    left, _ = figures(before, dense_table(after, n), ids[ids >= 0], rows[ids >= 0])
    assert left < most_left
    for some, values in ((-np.ones_like(ids), rows), (ids, np.full_like(rows, np.nan))):
        for new, old in zip(written(cores, n, some, values, method=method), cores, strict=True):
            np.testing.assert_array_equal(f64(new), f64(old))


# The smallest tables have few numbers to spare.
@pytest.mark.slow(but="[d2-")
@pytest.mark.parametrize(
    ("name", "dtype", "most_left"),
    [
        ("d2", "float32", 0.3),
        ("d3-one-column", "float32", 0.3),
        ("d3", "float64", 0.15),
        ("d5", "float32", 0.3),
    ],
)
def test_shapes(name, dtype, most_left):
    with jax.enable_x64(dtype == "float64"):
        check_few_rows(name, dtype, "auto", most_left)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_storage_types(dtype, method):
    check_few_rows("d3", dtype, method, 0.3 if dtype == "bfloat16" else 0.15)


def random_rows(count, scale=1.0):
    """A table of 4,000 rows, and rows that learned something without structure."""
    cores = fresh_cores()
    before = dense_table(cores, 4000)
    rng = np.random.default_rng(0)
    ids = rng.choice(4000, count, replace=False).astype(np.int32)
    learned = scale * before.std() * rng.normal(size=(count, 16))
    return cores, before, ids, (before[ids] + learned).astype(np.float32)


@cache
def fresh_cores():
    return jax_tt.tt.init(jax.random.key(0), SHAPE)


@pytest.mark.parametrize(("count", "most_left"), [(8, 0.06), (32, 0.12)])
def test_damage_is_what_the_compression_costs(count, most_left):
    """Storing one entry in a table compressed c times moves the others by about c times its square: no free lunch,
    and no more than that."""
    cores, before, ids, rows = random_rows(count, 0.5)
    after = dense_table(written(cores, 4000, ids, rows), 4000)
    left, damage = figures(before, after, ids, rows)
    compression = 4000 * 16 / SHAPE.num_params
    assert left < most_left
    assert damage < 1.5 * compression


@pytest.mark.slow
def test_ridge_trades_the_rows_for_the_others():
    cores, before, ids, rows = random_rows(8)
    results = []
    for ridge in (OPTIONS.ridge, 10.0):
        options = jax_tt.cache.WriteBack(ridge=ridge)
        after = dense_table(written(cores, 4000, ids, rows, options), 4000)
        results.append(figures(before, after, ids, rows))
    left, damage = np.transpose(results)
    assert left[1] > left[0] and damage[1] < damage[0], results


def test_never_worse_than_dropping():
    """More rows, changed much more than the cores can follow: the sum that is minimised never grows."""
    cores, before, ids, rows = random_rows(200, 30.0)
    options = jax_tt.cache.WriteBack(ridge=0.0, steps=4, iterations=30)
    after = dense_table(written(cores, 4000, ids, rows, options), 4000)
    left, _ = figures(before, after, ids, rows)
    assert left < 1 and np.isfinite(after).all()


def test_scale_of_the_cores_does_not_matter():
    """The same table from cores of other scales gives the same table."""
    cores, _, ids, rows = random_rows(8)
    skewed = (cores[0] * 64, cores[1] / 16, cores[2] / 4)
    expected = dense_table(written(cores, 4000, ids, rows), 4000)
    np.testing.assert_allclose(
        dense_table(written(skewed, 4000, ids, rows), 4000), expected, atol=2e-4 * expected.max()
    )


@pytest.mark.slow
def test_chunks():
    """Chunks one behind the other, of which each is fitted."""
    cores, before, ids, rows = random_rows(24)
    options = jax_tt.cache.WriteBack(chunk=5)
    after = dense_table(written(cores, 4000, ids, rows, options), 4000)
    assert figures(before, after, ids, rows)[0] < 0.25


def test_rows_that_are_not_finite_do_not_spread():
    cores, _, ids, rows = random_rows(8)
    broken = rows.copy()
    broken[2, 0], broken[5, 1] = np.inf, np.nan
    good = np.isfinite(broken).all(1)
    expected = dense_table(written(cores, 4000, np.where(good, ids, -1), rows), 4000)
    got = dense_table(written(cores, 4000, ids, broken), 4000)
    np.testing.assert_allclose(got, expected, atol=1e-5 * expected.max())


def test_cores_of_zeros():
    """One core of zeros is how some start; more of them have no derivative, and stay."""
    fresh, before, ids, rows = random_rows(8)
    for dead in ((0,), (2,), (0, 1), (0, 1, 2)):
        cores = tuple(jnp.zeros_like(core) if k in dead else core for k, core in enumerate(fresh))
        after = dense_table(written(cores, 4000, ids, rows), 4000)
        assert np.isfinite(after).all()
        left, _ = figures(np.zeros_like(before), after, ids, rows)
        assert left < 0.9 if len(dead) == 1 else left == 1, dead


def test_metric_is_the_size_of_the_change():
    """Of one core at a time, exactly."""
    shape = SHAPES["d4"]
    rows, draw = math.prod(shape.row_factors), np.random.default_rng(0)
    cores = make_case(shape, "float32", False).cores
    whole = dense_table(cores, rows)
    change = jax.jit(lambda step: table_metric(cores).from_whitened(step))
    for k, core in enumerate(cores):
        step = [np.zeros(other.shape, np.float32) for other in cores]
        step[k] = draw.normal(size=core.shape).astype(np.float32)
        moved = [a + b for a, b in zip(cores, change(tuple(step)), strict=True)]
        size = ((dense_table(moved, rows) - whole) ** 2).sum()
        np.testing.assert_allclose(size, np.sum(step[k] ** 2), rtol=2e-2)


def test_options_are_checked():
    for field, value in [
        ("ridge", -1.0),
        ("ridge", math.nan),
        ("ridge", "1"),
        ("steps", 0),
        ("iterations", 0),
        ("chunk", 0),
    ]:
        with pytest.raises(ValueError, match=f"WriteBack.{field}: got"):
            jax_tt.cache.WriteBack(**{field: value})


def test_more_steps_fit_rows_that_grew_a_hundredfold():
    """A flush is never worse than dropping the rows; rows have to grow by more than a linear fit of the cores knows."""
    cores, before, ids, rows = random_rows(32, 100.0)
    after = dense_table(written(cores, 4000, ids, rows), 4000)
    assert figures(before, after, ids, rows)[0] < 0.9
    own = jax_tt.RowCache(32, ways=32, write_back=jax_tt.cache.WriteBack(steps=8))
    table = warm(cores, own, "auto", ids, n=4000)
    tags = np.asarray(table.directory.tags)[0]
    learned = rows[[ids.tolist().index(tag) for tag in tags]]
    flush = jax.jit(partial(cache_parts.flush, cache=own, num_embeddings=4000))
    after = flush(table._replace(rows=jnp.asarray(learned)))
    assert figures(before, dense_table(after.cores, 4000), tags, learned)[0] < 0.1


@pytest.mark.slow
def test_real_stream():
    """A recommender trained on the Video stream with 1 % of the rows cached: the cores keep 90 % or more of what
    evicted rows learned, and the other rows move by no more than the compression explains."""
    if not VIDEO.exists():
        pytest.skip("the Video stream does not lie beside the checkout")
    records = recommender.train(stream()[0], 16, "lfu", steps=60, every=20)
    records = [record for record in records if record.evicted]
    learned = np.array([record.learned for record in records])
    left = np.array([record.left for record in records])
    damage = np.array([record.damage for record in records])
    total = (left * learned).sum() / learned.sum()
    spread = (damage * learned).sum() / learned.sum() / records[0].compression
    assert left.max() < 0.1 and total < 0.05
    assert spread < 1
