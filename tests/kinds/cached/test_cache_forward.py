"""The native op behind cached lookups: sums of hits and misses, and the misses packed for the backward pass."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._ids.batch import Batch
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._table.options import Lookup, NeededCotangents, Update
from tests.conftest import native_available
from tests.helpers import SHAPES, TOLERANCE, assert_close, dense_table, make_case
from tests.kinds.cached import cache_parts

pytestmark = pytest.mark.skipif(not native_available(), reason="the native module is not built")

WIDE = jax_tt.TTShape(8 * 10**9, 8, 2, (2000, 2000, 2000), (2, 2, 2))


ANY = NeededCotangents(frozenset({"core_0"}))


class Result(NamedTuple):
    sums: jax.Array
    misses: Batch
    place: Any


@dataclasses.dataclass
class Call:
    """The arguments of `RowCachedTable.divided_forward`."""

    cached: jax_tt.tables.RowCachedTable
    hits: Batch
    misses: Batch
    rows: jax.Array
    cores: tuple[jax.Array, ...]
    bounds: str = "error"

    def run(
        self, method: str = "native", save: bool = True, rows_sentinel: float = 1.0, **replaced: Any
    ):
        own = dataclasses.replace(self, **replaced)
        table = own.cached.table
        lookup = Lookup(
            bounds=own.bounds,
            method=method,
            precision="highest",
            wanted=ANY if save else NeededCotangents(),
        )

        @jax.jit
        def op(rows, cores, hits, misses):
            of_rows = {"embedding": rows, "sentinel": jnp.float32(rows_sentinel)}
            of_table = table.spec.named(cores) | {"sentinel": jnp.float32(1)}
            sums, (packed, place, _) = own.cached.divided_forward(
                (of_table, of_rows), (hits, misses), lookup
            )
            return Result(sums, packed, place)

        return op(own.rows, own.cores, own.hits, own.misses)


def make_call(
    share=0.5,
    groups=1,
    capacity=40,
    bags=5,
    shape=SHAPES["d3"],
    ids="int32",
    dtype="float32",
    rows="float32",
    weighted=True,
    padding=0.1,
    distinct=None,
):
    rng = np.random.default_rng(7)
    n = shape.num_embeddings
    cores = make_case(shape, dtype, False).cores
    wide = "float64" if "float64" in (dtype, rows) else "float32"
    pool = rng.integers(0, n, distinct) if distinct else None
    size = (groups, capacity)
    given = rng.choice(pool, size) if pool is not None else rng.integers(0, n, size)
    hit = rng.random(size) < share
    slots = np.where(hit, rng.integers(0, 30, size), -1).astype(np.int32)
    off = hit | (rng.random(size) < padding)
    if ids == "split":
        array = np.stack(np.unravel_index(given, shape.row_factors), -1).astype(np.int32)
        array[off] = -1
    else:
        array = given.astype(ids)
        array[off] = np.array(-1).astype(ids)
    offsets = np.sort(rng.integers(0, capacity + 1, (groups, bags + 1)), -1).astype(np.int32)
    offsets[:, 0] = 0
    weights = jnp.asarray(rng.integers(1, 9, size) / 4, wide) if weighted else None
    batch = Batch(jnp.asarray(array), jnp.asarray(offsets), weights, padded=True)
    table = dataclasses.replace(TTTable.of_shape(shape), name="table")
    table = dataclasses.replace(table, update=Update(jax_tt.optimizers.SGD(0.1)))
    return Call(
        jax_tt.tables.RowCachedTable(table, jax_tt.RowCache(30, ways=30)),
        dataclasses.replace(batch, ids=jnp.asarray(slots)),
        batch,
        jnp.asarray(rng.normal(size=(30, shape.features))).astype(rows),
        cores,
    )


def missed_positions(call):
    """Positions of the misses, segment by segment."""
    batch = call.misses
    ids, offsets = np.asarray(batch.ids), np.asarray(batch.offsets)
    marks = ids == np.array(-1).astype(ids.dtype)
    gone = marks.all(-1) if batch.split else marks
    inside = np.arange(ids.shape[1]) < offsets[:, -1:]
    return [np.flatnonzero(row) for row in ~gone & inside]


def check(call, tolerance=1e-5):
    got, want = call.run(), call.run("reference")
    assert got.sums.dtype == want.sums.dtype
    assert_close(got.sums, want.sums, tolerance)
    ids, offsets = (np.asarray(a) for a in (call.misses.ids, call.misses.offsets))
    for s, positions in enumerate(missed_positions(call)):
        packed = np.asarray(got.misses.ids)[s]
        np.testing.assert_array_equal(packed[: len(positions)], ids[s][positions])
        assert np.all(packed[len(positions) :] == np.array(-1).astype(ids.dtype))
        np.testing.assert_array_equal(got.misses.offsets[s], np.searchsorted(positions, offsets[s]))
        if got.place is not None:
            weights, places = np.asarray(call.misses.weights)[s], np.asarray(got.place)[s]
            np.testing.assert_array_equal(places[positions], np.arange(len(positions)))
            packed = np.asarray(got.misses.weights)[s]
            np.testing.assert_array_equal(packed[: len(positions)], weights[positions])
    return got


CASES = {
    "plain": {},
    "no weights": {"weighted": False},
    "one id a bag": {"groups": 37, "capacity": 1, "bags": 1},
    "all hits": {"share": 1.0},
    "all misses": {"share": 0.0, "padding": 0.0},
    "no ids": {"capacity": 0},
    "no bags": {"bags": 0},
    "few distinct ids": {"distinct": 3, "capacity": 500},
    "uint32": {"ids": "uint32"},
    "odd sizes": {"shape": SHAPES["d3-odd"], "capacity": 33, "bags": 7},
    "five cores": {"shape": SHAPES["d5"], "ids": "split"},
    "bfloat16": {"dtype": "bfloat16", "rows": "float16"},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    check(make_call(**CASES[name]))


@pytest.mark.parametrize("rows", ["float64", "float32"])
def test_wide_ids_and_types(rows, x64):
    """Ids beyond 31 bits; float64 rows take the one op, float32 rows beside float64 cores two."""
    call = make_call(shape=WIDE, ids="int64", dtype="float64", rows=rows)
    assert np.asarray(call.misses.ids).max() > 2**31
    got, want = call.run(save=False), call.run("reference", save=False)
    assert_close(got.sums, want.sums, TOLERANCE[rows])
    places = np.asarray(got.place)
    for s, positions in enumerate(missed_positions(call)):
        wanted = np.arange(len(positions)) if rows == "float64" else positions
        np.testing.assert_array_equal(places[s][positions], wanted)


def test_order_of_a_bag():
    """Hits in the order of their positions, then misses one by one: what a sum of rounded steps loses tells."""
    call = make_call(bags=1, capacity=64, padding=0.0, weighted=False)
    batch, slots = call.misses, np.asarray(call.hits.ids)[0]
    inside = np.arange(64) < int(batch.offsets[0, -1])
    table = dense_table(call.cores, SHAPES["d3"].num_embeddings).astype(np.float32)
    missed = table[np.asarray(batch.ids)[0][inside & (slots < 0)]]
    # The first hit is 2^24, beside which float32 loses steps of 1 that would count if they were summed before.
    slots = np.where(slots >= 0, 1, -1).astype(np.int32)
    slots[np.flatnonzero(slots >= 0)[0]] = 0
    rows = jnp.ones_like(call.rows).at[0].set(2.0**24)
    hits = dataclasses.replace(call.hits, ids=jnp.asarray(slots)[None])
    got = np.asarray(call.run(rows=rows, hits=hits).sums)[0, 0]
    want = np.full(8, 2.0**24, np.float32)
    for row in missed:
        want = want + row
    np.testing.assert_array_equal(got, want)
    assert np.any(want != np.float32(2.0**24) + missed.sum(0))


def test_ids_out_of_range():
    call = make_call(padding=0.0)
    position, rows = int(missed_positions(call)[0][3]), call.cached.num_embeddings
    ids = call.misses.ids.at[0, position].set(rows)
    misses = dataclasses.replace(call.misses, ids=ids)
    for bounds in ("clip", "zero"):
        check(dataclasses.replace(call, misses=misses, bounds=bounds))
    with pytest.raises(Exception, match=f"id {rows} at position {position} is out"):
        jax.block_until_ready(call.run(misses=misses))


def test_refusals():
    call = make_call()
    hits, batch = call.hits, call.misses
    beyond = dataclasses.replace(hits, ids=hits.ids.at[0, 1].set(30))
    falling = dataclasses.replace(batch, offsets=batch.offsets[:, ::-1])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows_sentinel": 0.5}, "fused table 'table' was changed"),
        ({"hits": beyond}, "a slot is beyond the last cached row"),
        ({"misses": falling}, r"Bags.offsets\[0\]"),
        ({"misses": dataclasses.replace(batch, padded=False)}, "marked as padding"),
        ({"rows": call.rows[:, :-1]}, "as long as a row of the table"),
    ]
    for replaced, message in cases:
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call.run(**replaced))


def test_nan_stays_with_its_readers():
    call = make_call(weighted=False)
    asked = np.unique(np.asarray(call.hits.ids))
    unread = np.setdiff1d(np.arange(30), asked)
    rows = call.rows.at[jnp.asarray(unread)].set(jnp.nan)
    np.testing.assert_array_equal(call.run(rows=rows).sums, call.run().sums)


@pytest.mark.parametrize(("of_cores", "of_rows"), [("float64", "float32"), ("float32", "float64")])
def test_gradients_beside_rows_of_another_type(of_cores, of_rows, x64):
    """All gradients of one program, in the types of what they are of."""
    shape = SHAPES["d3"]
    cores = make_case(shape, of_cores, False).cores
    cache = jax_tt.RowCache(8, ways=4)
    table = cache_parts.init_parts(cores, cache, num_embeddings=shape.num_embeddings)
    tags = table.directory.tags.at[:, 0].set(2)  # in the set that it belongs to, and in the other
    table = table._replace(
        rows=jnp.ones_like(table.rows, of_rows), directory=table.directory._replace(tags=tags)
    )

    def loss(cores, rows, weights, method):
        bags = jax_tt.Bags(jnp.arange(4), jnp.array([0, 3, 4]), weights)
        own = table._replace(table=cores, rows=rows)
        sums, _ = cache_parts.embed_bag(own, bags, cache, method=method)
        return sums.astype(of_cores).sum()

    arguments = (cores, table.rows, jnp.arange(1, 5, dtype=of_cores))
    got, want = (
        jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(*arguments, method)
        for method in ("auto", "reference")
    )
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, arguments)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), got, want)
    assert np.any(got[1])
