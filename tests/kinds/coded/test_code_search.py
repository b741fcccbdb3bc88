"""The native search for codes against its reference in numpy."""

import numpy as np
import pytest

from jax_tt._base import ffi
from jax_tt._kinds.coded import search

native = pytest.mark.skipif(ffi.load("cpu") is None, reason="needs the native module")

# Rows, columns, codebooks and their rows: none, single, odd ones, and more than are compared at a time.
SIZES = [
    (0, 3, 2, 4),
    (5, 0, 2, 4),
    (1, 1, 1, 1),
    (7, 3, 1, 2),
    (9, 2, 3, 2),
    (65, 2, 2, 64),
    (103, 5, 4, 16),
    (33, 3, 5, 3),
    (40, 8, 2, 700),
]


def whole_numbers(*shape: int) -> np.ndarray:
    """Floats whose sums of products are exact, with many equal scores."""
    return np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)


@native
def test_native_codes_are_those_of_the_reference():
    for n, width, terms, size in SIZES:
        rows, codebooks = whole_numbers(n, width), whole_numbers(terms, size, width)
        codes = search.search_sums(rows, codebooks)
        np.testing.assert_array_equal(codes, search.reference_sums(rows, codebooks))


@native
def test_threads_choose_the_same_codes(monkeypatch):
    # Many sums are almost equal, so that rounding chooses among them.
    rng = np.random.default_rng(4)
    rows, codebooks = (
        (rng.integers(-30, 31, shape) * 0.1).astype(np.float32)
        for shape in ((20_001, 2), (4, 4, 2))
    )
    once = search.search_sums(rows, codebooks)
    monkeypatch.setattr(search, "_OF_A_THREAD", 1)
    monkeypatch.setattr(search.os, "sched_getaffinity", lambda _: range(7))
    np.testing.assert_array_equal(search.search_sums(rows, codebooks), once)


@native
def test_codes_are_in_range_whatever_the_rows():
    for bad in [np.nan, np.inf, 3e38]:
        rows, codebooks = whole_numbers(6, 2), whole_numbers(3, 5, 2)
        rows[2] = codebooks[1, 3] = bad
        codes = search.search_sums(rows, codebooks)
        assert codes.min() >= 0
        assert codes.max() < 5


@native
def test_arrays_that_do_not_fit_are_refused():
    for rows, codebooks, codes, beam, message in [
        ((4, 2), (1, 3, 3), (4, 1), 4, "do not fit"),
        ((4, 2), (2, 3, 2), (4, 1), 4, "do not fit"),
        ((4, 2), (2, 3, 2), (3, 2), 4, "do not fit"),
        ((4, 2), (0, 3, 2), (4, 0), 4, "must have rows"),
        ((4, 2), (1, 0, 2), (4, 1), 4, "must have rows"),
        ((4, 2), (1, 3, 2), (4, 1), 5, "1 to 4 sums"),
    ]:
        module = ffi.load("cpu")
        assert module is not None
        with pytest.raises(ValueError, match=message):
            module.choose_sums(
                np.zeros(rows, np.float32),
                np.zeros(codebooks, np.float32),
                beam,
                3,
                np.zeros(codes, np.int32),
            )
