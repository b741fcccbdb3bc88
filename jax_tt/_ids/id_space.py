"""`IdSpace`: which ids a table has, their digits and their bounds; `Slots`, which are no ids; and ids of a shard."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.arguments import type_of
from jax_tt._ids.batch import Batch, is_padding, padding_mark, present, with_marks
from jax_tt._ids.split_ids import same_arrays
from jax_tt._jax.vma import axes_to_count, summed_like


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """Where rows are on the device, as `Tiers.prefetch` and `dynamic.insert` return it.

    A slot has one row now and another one later, so that it must not be taken for an id. Tables with tiers, which are
    described with ``takes_slots=True``, take nothing else; other tables take no slots.

    Attributes:
        numbers: int32 ``[...]``, rows of the arrays of the table; what they are where there is no row depends on the
            function that returns them.

    >>> import jax_tt, numpy as np
    >>> table = jax_tt.dense_table(64, 8, optimizer=jax_tt.optimizers.SGD(0.1), takes_slots=True)
    >>> collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    >>> tiers = jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=64)}, depth=0)
    >>> staged = next(tiers.prefetch([{"item": np.array([[10**12, 7, 10**12]])}]))
    >>> staged.batch["item"].shape, len(np.unique(staged.batch["item"].numbers))
    ((1, 3), 2)
    """

    numbers: Any

    __eq__ = same_arrays

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class IdSpace:
    """The ids of a table. Names and messages do not count in comparisons, so that equal spaces share programs.

    Attributes:
        num_embeddings: number of rows, N; ids are ``0`` to ``N - 1``.
        radices: radices of the digits of a row, the last digit fastest. Tables of several digits take `SplitIds`.
        takes_keys: whether ids are keys of 64 bits, of which any may have a row.
        takes_slots: whether the table takes `Slots` in place of ids, and nothing else.
        name: of the table, for error messages.
        integers_only: what the error for `SplitIds` says of a table that maps integers; empty for others.

    >>> import jax_tt
    >>> space = jax_tt.extension.IdSpace(10, (4, 3), name="items")
    >>> space.label
    'items: '
    """

    num_embeddings: int
    radices: tuple[int, ...]
    takes_keys: bool = False
    takes_slots: bool = False
    name: str | None = dataclasses.field(default=None, compare=False)
    integers_only: str = dataclasses.field(default="", compare=False)

    @functools.cached_property
    def label(self) -> str:
        """Prefix of error messages about the table."""
        return "" if self.name is None else f"{self.name}: "

    def without_slots(self, name: str, ids: Any) -> Any:
        """The ids, or the numbers of `Slots`; raises for those where the table takes the others."""
        if not self.takes_slots:
            if isinstance(ids, Slots):
                raise TypeError(
                    f"{name}: got Slots, places of rows of a table with tiers or of a hash table; expected ids. Tables "
                    "with tiers are described with takes_slots=True, e.g. dense_table(1000, 16, takes_slots=True)."
                )
            return ids
        if not isinstance(ids, Slots):
            raise TypeError(
                f"{name}: got {type_of(ids)} for a table with tiers, whose rows belong to other ids from batch to "
                "batch; expected the slots in the batches of Tiers.prefetch, e.g. staged.batch. Tiers.read returns the "
                "rows of any ids."
            )
        return ids.numbers

    def refuse_slots(self, name: str, advice: str) -> None:
        """Raises for a table whose rows are not those of the ids with their numbers."""
        if self.takes_slots:
            raise TypeError(
                f"{self.label}{name}: got a table with tiers, whose rows on the device belong to ids that Tiers knows; "
                f"{advice}."
            )

    def check_split(self, name: str, digits: int) -> None:
        """Raises unless `SplitIds` with ``digits`` digits are ids of the table; splitting has checked keys."""
        if self.takes_keys:
            return
        if self.integers_only:
            raise TypeError(f"{name}: got SplitIds for {self.integers_only}")
        if len(self.radices) == 1:
            raise ValueError(f"{name}: got SplitIds; a dense table takes integer ids.")
        if digits != len(self.radices):
            raise ValueError(
                f"{name}: SplitIds with {digits} digits for a table of {len(self.radices)} cores; split them with the "
                "TTShape of this table."
            )


def digits_in_range(space: IdSpace, batch: Batch) -> tuple[list[jax.Array], jax.Array]:
    """Digits of every id, clamped to the rows, ``d`` arrays ``[S, cap]``, and whether it was in range, ``[S, cap]``."""
    if batch.split:
        return _from_digits(space, batch.ids)
    return digits_of_integers(space, batch.ids)


def digits_of_integers(space: IdSpace, ids: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """`digits_in_range` of integers ``[...]``."""
    info = jnp.iinfo(ids.dtype)
    last = min(
        space.num_embeddings - 1, int(info.max)
    )  # all values of a narrow type may be valid ids
    low = jnp.zeros((), ids.dtype)
    high = jnp.asarray(np.asarray(last, ids.dtype))
    ok = (ids >= low) & (ids <= high)
    rest = jnp.clip(ids, low, high)
    digits: list[jax.Array] = []
    for factor in reversed(space.radices):
        if factor > int(info.max):  # no value of this type reaches the next digit
            digits.append(rest)
            rest = jnp.zeros_like(rest)
            continue
        radix = jnp.asarray(np.asarray(factor, ids.dtype))
        digits.append(rest % radix)
        rest = rest // radix
    return digits[::-1], ok


def outside(space: IdSpace, batch: Batch) -> jax.Array:
    """Positions that hold an id out of range, bool ``[S, cap]``."""
    return present(batch) & ~digits_in_range(space, batch)[1]


def last_digits(space: IdSpace) -> list[int]:
    """Digits of the last row, ``num_embeddings - 1``, most significant first."""
    digits, rest = [], space.num_embeddings - 1
    for factor in reversed(space.radices):
        rest, digit = divmod(rest, factor)
        digits.append(digit)
    return digits[::-1]


def _from_digits(space: IdSpace, digits: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    columns = [digits[..., k] for k in range(len(space.radices))]
    # Lexicographic comparison with the last row, from the last digit to the first.
    valid = jnp.ones(digits.shape[:-1], bool)
    above = jnp.zeros(digits.shape[:-1], bool)
    for digit, factor, last in zip(
        columns[::-1], space.radices[::-1], last_digits(space)[::-1], strict=True
    ):
        valid &= (digit >= 0) & (digit < factor)
        above = (digit > last) | ((digit == last) & above)
    ok = valid & ~above
    negative = columns[0] < 0
    clamped = [
        jnp.where(ok, digit, jnp.where(negative, 0, last))
        for digit, last in zip(columns, last_digits(space), strict=True)
    ]
    return clamped, ok


_MOST = 2**31 - 1


@partial(jax.jit, static_argnums=(2, 3), inline=True)
def add_out_of_range(total: jax.Array, batch: Batch, space: IdSpace, axis_name: Any) -> jax.Array:
    """``total`` plus the number of ids out of range, at most the largest int32; the same on all devices.

    Args:
        total: int32 scalar. Under ``vmap``, the ids of all examples are added to it unless it is mapped itself.
        batch: ids of the table.
        space: the ids that are in range.
        axis_name: mesh axes that the ids are sharded over, if JAX does not track them.
    """
    total = total.astype(jnp.int32)  # averaging models makes the count a float
    count = summed_like(total, outside(space, batch))
    axes = axes_to_count(total, count, axis_name)
    if axes:
        count = lax.psum(count, axes)
    return total + jnp.minimum(count, _MOST - total)


def plus_count(total: jax.Array, count: jax.Array) -> jax.Array:
    """``total`` plus ``count``, as `add_out_of_range` adds them on one device."""
    total = total.astype(jnp.int32)
    return total + jnp.minimum(summed_like(total, count[None]), _MOST - total)


def in_shard(space: IdSpace, batch: Batch, rows: int, axes: tuple[str, ...], bounds: str) -> Batch:
    """A batch of the whole table as one of a shard of it.

    Ids out of range stay so in all shards, which then agree to refuse a step; the first shard reports them.

    Args:
        space: ids of the whole table.
        batch: integers that are no digits.
        rows: rows of every shard, which are neighbours.
        axes: the mesh axes along which devices have the shards in order.
        bounds: as in `Lookup`.
    """
    shard = lax.axis_index(axes)
    (row,), in_range = digits_in_range(space, batch)
    marked = batch if batch.padded else with_marks(batch)
    padding = is_padding(batch) if batch.padded else jnp.zeros((), bool)
    most = int(jnp.iinfo(row.dtype).max)
    # Ids of a narrow type do not reach all shards.
    first = jnp.minimum(shard, most // rows).astype(row.dtype) * min(rows, most)
    local = row - first
    here = (row >= first) & (local <= min(rows - 1, most)) & (shard <= most // rows)
    in_range |= bounds == "clip"
    silent = in_range | padding | (bounds == "unchecked")
    if bounds == "warn":
        silent |= shard != 0
    away = jnp.where(silent, padding_mark(row.dtype), marked.ids)
    ids = jnp.where(here & in_range & ~padding, local, away)
    return dataclasses.replace(batch, ids=ids, padded=True)
