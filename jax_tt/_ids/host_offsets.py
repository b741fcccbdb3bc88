"""Offsets and lengths of bags on the host, checked in the type in which they were given, before any is cast."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jax_tt._base.arguments import mismatch


def check_starts(
    label: str, offsets: np.ndarray, bag: Callable[[int], str] = "bag {}".format
) -> None:
    """Raises unless offsets start at 0 and never fall; ``bag`` says what errors call the bag of a number."""
    if not offsets.size:
        return
    if offsets[0] != 0:
        raise ValueError(f"{label}: start at {offsets[0]}; expected the first bag to start at 0.")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            f"{label}: decrease from {offsets[at]} to {offsets[at + 1]} at position {at + 1}, the end of {bag(at)}; "
            "expected non-decreasing starts of bags."
        )


def check_lengths(lengths: np.ndarray, bag: Callable[[int], str] = "bag {}".format) -> None:
    """Raises for lengths below 0; ``bag`` as in `check_starts`."""
    below = np.flatnonzero(lengths < 0)
    if below.size:
        got = f"{lengths[below[0]]} for {bag(int(below[0]))}"
        raise mismatch("lengths", got, "non-negative integers")


def check_end(what: str, count: int, end: int, capacity: int | None, hint: str = "") -> None:
    """Raises if bags end beyond the ids, or before the last of ``count`` that were not padded to the capacity.

    Errors begin with ``what``, which says where they end; ``hint`` is a sentence about what may be the cause.
    """
    if end > count:
        raise ValueError(f"{what}, but there are only {count} ids; expected at most {count}.{hint}")
    if end < count != capacity:
        raise ValueError(
            f"{what}, but there are {count} ids, and those left over would be in no bag.{hint} If they are padding, "
            f"pass capacity={count}."
        )


def exact_sum(lengths: np.ndarray) -> int:
    """The sum of integers, which 64 bits may not hold."""
    if not lengths.size or (lengths.min() >= -(2**31) and lengths.max() < 2**31):
        return int(lengths.sum(dtype=np.int64))
    return sum(lengths.tolist())
