"""How codebooks whose rows are added are fitted, and their codes found."""

import numpy as np
import pytest

import jax_tt
from jax_tt._kinds.coded import codebooks
from tests.helpers import to_dense

RNG = np.random.default_rng(0)
N, D, M, SIZE = 400, 6, 3, 16
POINTS = RNG.normal(size=(N, D)).astype(np.float32)
WEIGHTS = RNG.uniform(0.1, 1.0, N)
BOOKS = (0.5 * RNG.normal(size=(M, SIZE, D))).astype(np.float32)
CODES = RNG.integers(0, SIZE, (N, M))


def error(books, codes, weights=WEIGHTS):
    sums = sum(own[codes[:, k]] for k, own in enumerate(books))
    return float(weights @ np.sum((POINTS - sums) ** 2, axis=1))


def test_codebooks_are_the_least_squares_solution():
    found = codebooks._solved(POINTS, WEIGHTS, CODES, BOOKS)
    design = np.zeros((N, M * SIZE))
    for k in range(M):
        design[np.arange(N), SIZE * k + CODES[:, k]] = 1
    root = np.sqrt(WEIGHTS)[:, None]
    best, *_ = np.linalg.lstsq(root * design, root * POINTS, rcond=None)
    least = error(best.reshape(M, SIZE, D), CODES)
    # The solution is drawn a little towards the old codebooks.
    assert least - 1e-3 < error(found, CODES) < 1.01 * least
    averaged = codebooks._averaged(POINTS, WEIGHTS, CODES, BOOKS)
    assert least < error(averaged, CODES) < error(BOOKS, CODES)


def test_codes_without_points_keep_their_rows():
    codes = np.zeros_like(CODES)
    found = codebooks._solved(POINTS, WEIGHTS, codes, BOOKS)
    np.testing.assert_array_equal(found[:, 1:], BOOKS[:, 1:])


def test_codes_are_nearly_the_nearest():
    codes = codebooks.choose_sums(POINTS, BOOKS)
    every = np.stack(np.meshgrid(*[np.arange(SIZE)] * M, indexing="ij"), axis=-1).reshape(-1, M)
    sums = sum(BOOKS[k][every[:, k]] for k in range(M))
    nearest = every[np.argmin(((POINTS[:, None] - sums) ** 2).sum(2), axis=1)]
    greedy, left = np.empty_like(codes), POINTS.copy()
    for k, own in enumerate(BOOKS):
        greedy[:, k] = np.argmin(((left[:, None] - own) ** 2).sum(2), axis=1)
        left -= own[greedy[:, k]]
    least, most = error(BOOKS, nearest), error(BOOKS, greedy)
    assert least <= error(BOOKS, codes) < least + 0.3 * (most - least)


def encoding_error(rows, *arguments, **options):
    table, state = jax_tt.encode(rows, *arguments, **options, progress=False)
    return table.nbytes, float(np.sum((np.asarray(to_dense(table, state)) - rows) ** 2))


@pytest.mark.slow
def test_sums_in_parts_lie_between_products_and_sums():
    rows = RNG.normal(size=(1000, 16)).astype(np.float32)
    product = encoding_error(rows, 8, 4)
    parts = encoding_error(rows, 8, 4, terms=2)
    whole = encoding_error(rows, 8, 4, kind="additive")
    assert product[0] < parts[0] < whole[0]
    assert product[1] > parts[1] > whole[1]
    assert encoding_error(rows, 8, 4, terms=8) == whole


def test_codebooks_too_large_to_solve_for():
    rows = RNG.normal(size=(600, 4)).astype(np.float32)
    assert codebooks._MOST_SOLVED < (2 << 12)
    _, left = encoding_error(rows, 2, 12, kind="additive", iterations=4)
    assert left < 1e-3 * np.sum(rows**2)


def test_bad_terms():
    for options, message in [
        ({"terms": 3}, "terms: got 3; expected a divisor of num_codes=4"),
        ({"terms": 0}, "terms"),
        ({"terms": 2, "kind": "additive"}, "terms: got 2 with kind='additive'"),
        ({"terms": 2, "features": 9}, "num_codes: got 4; expected 2 times a divisor of features=9"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax_tt.coded_table(**{"num_embeddings": 9, "features": 8, "num_codes": 4, **options})
