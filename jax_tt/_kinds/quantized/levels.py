"""Levels of numbers that are not uniform."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from jax_tt._base.arguments import as_array, mismatch

# Levels are whole numbers of 1 / UNIT below 16. Products with a scale, which is a float16, are then exact in float32,
# and rows the same on all platforms.
UNIT = 512

# The level of every number; None if it is the number itself.
Levels = tuple[float, ...] | None


def check_levels(label: str, levels: Any, bits: int) -> None:
    """Raises for what cannot be `QuantizedTable.levels`."""
    if levels is None:
        return
    _check_bits(label, bits)
    count = 1 << bits
    if not isinstance(levels, tuple) or not all(type(level) in (int, float) for level in levels):
        expected = f"a tuple of {count} Python numbers, or None for uniform ones"
        raise mismatch(f"{label}levels", repr(levels), expected, error=TypeError)
    if len(levels) != count:
        raise mismatch(f"{label}levels", f"{len(levels)} numbers", f"{count} at {bits} bits")
    rising = all(low < high for low, high in itertools.pairwise(levels))
    if not rising or levels[0] != 0 or levels[-1] != count - 1:
        fix = f"jax_tt.quantize(rows, {bits}, levels=...) scales any increasing numbers."
        raise mismatch(f"{label}levels", levels, f"increasing numbers from 0 to {count - 1}", fix)
    if any(level * UNIT != round(level * UNIT) for level in levels):
        expected = f"whole multiples of 1 / {UNIT}, whose products with scales are exact"
        raise mismatch(f"{label}levels", levels, expected, f"Take round({UNIT} * x) / {UNIT}.")


def as_levels(value: Any, bits: int) -> Levels:
    """Increasing numbers as levels of a table, in its range and rounded to its unit."""
    _check_bits("", bits)
    given, count = np.asarray(as_array("levels", value)), 1 << bits
    if given.shape != (count,) or given.dtype.kind not in "iuf":
        expected = f"'uniform', 'fit', or {count} increasing numbers at {bits} bits"
        raise mismatch("levels", given, expected)
    given = given.astype(np.float64)
    if not np.isfinite(given).all() or not (np.diff(given) > 0).all():
        raise ValueError(f"levels: got {given.tolist()}; expected finite numbers that increase.")
    units = _in_units(given, bits)
    if not (np.diff(units) > 0).all():
        got = f"{given.tolist()}, of which two are equal when the range is divided into {UNIT * (count - 1)} steps"
        raise mismatch("levels", got, "larger distances")
    levels = tuple((units / UNIT).tolist())
    return None if levels == tuple(range(count)) else levels


def uniform_levels(bits: int) -> tuple[float, ...]:
    """Those that other levels are fitted from."""
    _check_bits("", bits)
    return tuple(map(float, range(1 << bits)))


def separated(levels: np.ndarray, bits: int) -> Levels:
    """Ascending levels in the units of a table; equal ones are moved apart."""
    units, places = _in_units(levels.astype(np.float64), bits), np.arange(1 << bits)
    units = np.maximum.accumulate(units - places) + places
    top = UNIT * places[-1]
    units = np.minimum(units, top - places[::-1])
    return tuple((units / UNIT).tolist())


def largest_step(levels: tuple[float, ...]) -> float:
    """The largest distance of two adjacent levels."""
    return max(high - low for low, high in itertools.pairwise(levels))


def as_attribute(levels: tuple[float, ...]) -> str:
    """Levels as the attribute of native operations."""
    return " ".join(str(round(level * UNIT)) for level in levels)


def _in_units(levels: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers from 0 to the highest level."""
    spread = levels[-1] - levels[0]
    share = (levels - levels[0]) / (spread if spread > 0 and math.isfinite(spread) else 1.0)
    return np.rint(share * ((1 << bits) - 1) * UNIT)


def _check_bits(label: str, bits: int) -> None:
    if bits == 8:
        fix = "256 uniform levels are so close that others gain nothing."
        raise mismatch(f"{label}levels", "some for 8 bits", "None, or 4, 3 or 2 bits", fix)
