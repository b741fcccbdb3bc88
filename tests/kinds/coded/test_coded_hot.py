"""Coded tables in which some ids have more codes than the others."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._compress.candidates import candidates, table_bytes
from jax_tt._compress.source import Source
from jax_tt._ids import places
from jax_tt._kinds.coded import codebooks
from tests.conftest import why_skipped
from tests.helpers import to_dense

RNG = np.random.default_rng(0)
N, D = 1200, 8
# Of very different lengths.
ROWS = (RNG.normal(size=(N, D)) * RNG.lognormal(sigma=1.5, size=(N, 1))).astype(np.float32)
WEIGHTS = RNG.uniform(0.5, 2.0, N)
OPTIONS = {
    "sum": {"num_codes": 2, "bits": 4, "kind": "additive", "hot": 200, "hot_terms": 3},
    "parts": {"num_codes": 4, "bits": 4, "terms": 2, "hot": 200, "hot_terms": 1},
}


@functools.cache
def encoded(way, **options):
    return jax_tt.encode(ROWS, **{**OPTIONS[way], "weights": WEIGHTS, **options}, progress=False)


def errors(table, state):
    return WEIGHTS * np.sum((np.asarray(to_dense(table, state)) - ROWS) ** 2, axis=1)


def test_places():
    @jax.jit
    def marked(member):
        array = places.mark_members(member)
        return array, *places.find_members(array, jnp.arange(len(member)))

    for n in [1, 512, 513]:
        member = np.random.default_rng(n).random(n) < 0.3
        array, found, before = marked(member)
        assert (array.shape, array.dtype) == (places.shape_of(n), jnp.uint32)
        np.testing.assert_array_equal(found, member)
        np.testing.assert_array_equal(before, np.cumsum(member) - member)


@pytest.mark.slow(but="parts")
@pytest.mark.parametrize("way", OPTIONS)
def test_hot_rows_are_those_with_the_largest_weighted_squares(way):
    table, state = encoded(way)
    hot, place = table.hot_ids(state, jnp.arange(N))
    largest = np.argsort(-WEIGHTS * np.sum(ROWS**2, axis=1))[:200]
    np.testing.assert_array_equal(np.flatnonzero(hot), np.sort(largest))
    np.testing.assert_array_equal(place[hot], np.arange(200))
    assert table.nbytes == sum(array.nbytes for array in state.values()) == table_bytes(table)
    codes = np.asarray(table.codes(state))
    np.testing.assert_array_equal((codes < 0).any(axis=1), ~np.asarray(hot))


@pytest.mark.parametrize(
    ("way", "alike"),
    [
        ("sum", {"num_codes": 3}),
        ("parts", {"num_codes": 8, "terms": 4, "bits": 3}),
    ],
)
def test_more_codes_for_some_rows_are_better_than_more_for_all(way, alike):
    mixed, alike = encoded(way), encoded(way, **alike, hot=0, hot_terms=0)
    # Codebooks would be shared by more rows.
    bytes_of = lambda table, state: table.nbytes - state["codebooks"].nbytes  # noqa: E731
    assert bytes_of(*mixed) < bytes_of(*alike)
    assert errors(*mixed).sum() < 0.8 * errors(*alike).sum()


@pytest.mark.slow(but="parts")
@pytest.mark.parametrize("way", OPTIONS)
def test_codes_of_the_same_rows(way):
    table, state = encoded(way)
    ids = np.array([5, 0, N - 1, 77, *np.flatnonzero(table.hot_ids(state, jnp.arange(N))[0])[:3]])
    for again in (
        table.assigned(state, ROWS),
        table.assigned(state, ROWS[ids], ids),
        table.with_codes(state, table.codes(state)),
    ):
        for name, array in state.items():
            np.testing.assert_array_equal(again[name], array, err_msg=name)
    np.testing.assert_array_equal(table.codes(state, ids), table.codes(state)[ids])


def test_other_rows_for_some_ids():
    table, state = encoded("sum")
    ids = np.arange(0, N, 3)
    found = table.assigned(state, -ROWS[ids], ids)
    wanted = table.assigned(state, np.where(np.isin(np.arange(N), ids)[:, None], -ROWS, ROWS))
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_ids_out_of_range_have_no_codes():
    table, state = encoded("parts")
    pooled = jax.jit(lambda ids: jax_tt.lookup_bags(table, state, ids, bounds="zero")[0])
    found = pooled(jnp.array([[1, N, 2], [-2, 3, 2**31 - 1]]))
    np.testing.assert_array_equal(found, pooled(jnp.array([[1, 2, -1], [3, -1, -1]])))


def test_codebooks_are_the_least_squares_solution():
    m, size = 3, 8
    hot = RNG.random(N) < 0.2
    codes = RNG.integers(0, size, (N, m))
    codes[~hot, 2] = -1
    old = RNG.normal(size=(m, size, D)).astype(np.float32)
    design = np.zeros((N, m * size))
    for k in range(m):
        own = codes[:, k] >= 0
        design[np.flatnonzero(own), size * k + codes[own, k]] = 1
    root = np.sqrt(WEIGHTS)[:, None]

    def error(books):
        return np.sum((root * (design @ books.reshape(m * size, D) - ROWS)) ** 2)

    least = error(np.linalg.lstsq(root * design, root * ROWS, rcond=None)[0])
    solved = error(codebooks._solved(ROWS, WEIGHTS, codes, old))
    averaged = error(codebooks._averaged(ROWS, WEIGHTS, codes, old))
    assert least * (1 - 1e-3) < solved < 1.02 * least
    assert solved < averaged < error(old)


@pytest.mark.slow
def test_compress_gives_frequent_rows_more_codes():
    rows = RNG.normal(size=(1500, 16)).astype(np.float32)
    weights = 1.0 / np.arange(1, 1501)
    options = {"kind": ["product", "additive"], "max_bytes": rows.nbytes // 20, "progress": False}
    found = jax_tt.compress(rows, weights=weights, **options)
    assert isinstance(found.table, jax_tt.tables.CodedTable)
    assert found.table.hot > 0
    assert found.chosen.nbytes <= rows.nbytes // 20
    assert f"of {found.table.hot:,} rows" in found.chosen.detail
    # Where all rows count alike, it does not try.
    assert all("more" not in one.detail for one in jax_tt.compress(rows, **options).measured)


def test_candidates_with_more_codes_use_the_bytes():
    rows = RNG.normal(size=(10_000, 32)).astype(np.float32)
    source = Source(rows, 1.0 / np.arange(1, 10_001), jnp.bfloat16, 0)

    def shares(ratio):
        """Of the rows with more codes, in all such candidates."""
        of_kinds = (
            candidates(source, kind, rows.nbytes // ratio) for kind in ("product", "additive")
        )
        found = [one for of_kind in of_kinds for one in of_kind]
        assert all(one.nbytes <= rows.nbytes // ratio for one in found)
        details = [one.detail for one in found]
        counts = (re.search("more in each sum of ([0-9,]+) rows", detail) for detail in details)
        return [int(count[1].replace(",", "")) / len(rows) for count in counts if count]

    for ratio in (15, 30, 60):
        found = shares(ratio)
        assert found
        assert all(1 / 8 < share < 1 / 2 for share in found)
    # With 4 bits a number, rows are good enough.
    assert not shares(8)


def test_bad_arguments():
    for options, message in [
        ({"hot": N + 1, "hot_terms": 1}, "hot: got 1201; expected an integer from 0 to 1200"),
        ({"hot": -1}, "hot: got -1"),
        ({"hot": 5}, "hot_terms: got 0 with hot=5; expected a positive number"),
        ({"hot_terms": 5}, "hot_terms: got 5 with hot=0"),
        (
            {"bits": 16, "hot": 1, "hot_terms": 10_000},
            "num_codes: got 4 and hot_terms=10000, which are 2621702144 codebook rows at 16 bits",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            jax_tt.coded_table(N, D, 4, **options)


def test_bad_codes():
    table, state = encoded("parts")
    codes = np.asarray(table.codes(state))
    cold = int(np.flatnonzero((codes < 0).any(axis=1))[0])
    for k, wrong, message in (
        (2, 3, "got 200 ids with all codes of hot ids; expected 200, and -1"),
        (0, -1, f"got -1 for code 0 of row {cold}; expected 0 to 15"),
    ):
        changed = codes.copy()
        changed[cold, k] = wrong
        with pytest.raises(ValueError, match=message):
            table.with_codes(state, changed)
    with pytest.raises(ValueError, match=r"hot_places: got .*expected uint32 of shape \(3, 17\)"):
        jax_tt.extension.check_state(table, {**state, "hot_places": state["hot_places"][:1]})
    with pytest.raises(ValueError, match=r"hot_codes: got .*expected uint8 of shape \(200, 1\)"):
        jax_tt.extension.check_state(table, {**state, "hot_codes": state["hot_codes"][:, :0]})


@pytest.mark.parametrize("native", [True, False])
def test_errors_name_ids_and_not_codebook_rows(native):
    # There is no native operation on codes for float64.
    dtype = "float32" if native else "float64"
    with jax.enable_x64(not native):
        table = jax_tt.coded_table(N, D, 2, 4, hot=5, hot_terms=3, param_dtype=dtype, name="words")
        state = jax.jit(table.init)(jax.random.key(0))
        lookup = jax_tt.Lookup(bounds="error", dtype=dtype)
        named = rf"id {N} at position 1 .*'words' of {N} rows" if native else "'words, codebooks'"
        with pytest.raises(jax.errors.JaxRuntimeError, match=named):
            run = jax.jit(lambda ids: jax_tt.lookup_bags(table, state, ids, lookup)[0])
            jax.block_until_ready(run(jnp.array([[1, N]])))


def test_batches_of_too_many_codes():
    """The kernels of a GPU say so before a call; without the emulated ones, nothing here can show it."""
    if reason := why_skipped("cuda_emulated"):
        pytest.skip(reason)
    table = jax_tt.coded_table(N, D, 2, 4, hot=5, hot_terms=3, name="words")
    state = jax.eval_shape(table.init, jax.random.key(0))
    lookup = jax_tt.Lookup(method="cuda_emulated")

    def pooled(state, ids):
        return jax_tt.lookup_bags(table, state, ids, lookup)

    message = "words: bags: got 419430400 ids in 1048576 bags, with 8 codes of each id"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(pooled, state, jax.ShapeDtypeStruct((2**20, 400), jnp.int32))


def test_rows_that_are_not_finite():
    table, state = encoded("parts", name="words")
    bad = np.where(np.arange(N)[:, None] == 77, np.nan, ROWS)
    with pytest.raises(ValueError, match="words: rows: row 77 holds NaN"):
        table.assigned(state, bad)
    with pytest.raises(ValueError, match="words: rows: row 77 holds NaN"):
        jax_tt.encode(bad, 2, 4, name="words", progress=False)
