"""Digits and bounds of ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._ids.batch import Batch, present
from jax_tt._table.options import IGNORED, Lookup

if TYPE_CHECKING:
    from jax_tt._table.table import Table


class Sizes(NamedTuple):
    """The sizes of a table that determine the digits and bounds of ids."""

    num_embeddings: int
    radices: tuple[int, ...]


def digits_in_range(table: Table | Sizes, batch: Batch) -> tuple[list[jax.Array], jax.Array]:
    """Digits of every id, clamped to the table, and whether the id was in range.

    Returns:
        ``d`` arrays ``[S, cap]`` that are safe to index with, and bool ``[S, cap]``.
    """
    if batch.split:
        return _from_digits(table, batch.ids)
    return digits_of_integers(table, batch.ids)


def digits_of_integers(table: Table | Sizes, ids: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """`digits_in_range` of integers ``[...]``."""
    info = jnp.iinfo(ids.dtype)
    last = min(
        table.num_embeddings - 1, int(info.max)
    )  # all values of a narrow type may be valid ids
    low = jnp.zeros((), ids.dtype)
    high = jnp.asarray(np.asarray(last, ids.dtype))
    ok = (ids >= low) & (ids <= high)
    rest = jnp.clip(ids, low, high)
    digits: list[jax.Array] = []
    for factor in reversed(table.radices):
        if factor > int(info.max):  # no value of this type reaches the next digit
            digits.append(rest)
            rest = jnp.zeros_like(rest)
            continue
        radix = jnp.asarray(np.asarray(factor, ids.dtype))
        digits.append(rest % radix)
        rest = rest // radix
    return digits[::-1], ok


def reads_row(table: Table, batch: Batch, lookup: Lookup) -> jax.Array:
    """Positions that read a row: present, and not an id for which ``bounds`` reads zeros; bool ``[S, cap]``."""
    here = present(batch)
    if table.takes_keys:
        return here
    return here & digits_in_range(table, batch)[1] if lookup.bounds in IGNORED else here


def outside(table: Table | Sizes, batch: Batch) -> jax.Array:
    """Positions that hold an id out of range, bool ``[S, cap]``."""
    return present(batch) & ~digits_in_range(table, batch)[1]


def last_digits(table: Table | Sizes) -> list[int]:
    """Digits of the last row, ``num_embeddings - 1``, most significant first."""
    digits, rest = [], table.num_embeddings - 1
    for factor in reversed(table.radices):
        rest, digit = divmod(rest, factor)
        digits.append(digit)
    return digits[::-1]


def _from_digits(table: Table | Sizes, digits: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    columns = [digits[..., k] for k in range(len(table.radices))]
    # Lexicographic comparison with the last row, from the last digit to the first.
    valid = jnp.ones(digits.shape[:-1], bool)
    above = jnp.zeros(digits.shape[:-1], bool)
    for digit, factor, last in zip(
        columns[::-1], table.radices[::-1], last_digits(table)[::-1], strict=True
    ):
        valid &= (digit >= 0) & (digit < factor)
        above = (digit > last) | ((digit == last) & above)
    ok = valid & ~above
    negative = columns[0] < 0
    clamped = [
        jnp.where(ok, digit, jnp.where(negative, 0, last))
        for digit, last in zip(columns, last_digits(table), strict=True)
    ]
    return clamped, ok
