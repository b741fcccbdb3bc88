"""Row ids as mixed-radix digits, for tables whose ids do not fit the default integer type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_tt._base.arguments import as_array, concrete, instance_of, integers, mismatch


def same_arrays(left: Any, right: Any) -> bool:
    """``==`` of a record of arrays, by value; traced arrays, which have none yet, raise."""
    if type(left) is not type(right):
        return NotImplemented
    arrays, others = jax.tree.leaves(left), jax.tree.leaves(right)
    if jax.tree.structure(left) != jax.tree.structure(right):
        return False
    # `array_equal` takes what it cannot convert, such as tracers, for unequal.
    return all(
        a is b or np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(arrays, others, strict=True)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SplitIds:
    """Ids that are already split into the digits of a table's row factors.

    Without ``jax_enable_x64`` JAX has no 64-bit integers, so ids of a table beyond 2**31 rows are split once on the
    host with :meth:`jax_tt.TTShape.split_ids` and represented by their digits.

    Attributes:
        digits: int32 ``[..., d]``, most significant digit first. All digits -1 means a negative id (in padded input:
            padding); a first digit that is at least its factor means an id that is too large.

    >>> import jax_tt, numpy as np
    >>> shape = jax_tt.TTShape(10**12, 32, 8, (252,) * 5, (2, 2, 2, 2, 2))
    >>> shape.split_ids(np.array([10**11], np.int64)).digits
    array([[ 24, 200, 207, 240, 208]], dtype=int32)
    """

    digits: Any

    __eq__ = same_arrays

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the ids, which is that of ``digits`` without its last axis."""
        return tuple(self.digits.shape[:-1])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> SplitIds:
        """The same ids in another shape."""
        return dataclasses.replace(self, digits=self.digits.reshape(*shape, self.digits.shape[-1]))


def split_on_host(ids: Any, num_embeddings: int, row_factors: Sequence[int]) -> SplitIds:
    """Splits host integers into digits; see :meth:`jax_tt.TTShape.split_ids`."""
    array = as_array("split_ids: ids", ids)
    why = "Split ids on the host before jit, or pass traced ids to the operation as they are."
    concrete("split_ids: ids", array, why)
    array = integers("split_ids: ids", np.asarray(array), None if np.size(array) == 0 else ids)
    negative = array < 0
    # Compared as Python ints would be: a uint64 id above 2**63 must not wrap to a negative one.
    large = array > np.asarray(
        num_embeddings - 1, np.uint64 if array.dtype == np.uint64 else np.int64
    )
    # Ids that the cores address, but the table does not have, are no digits; of others the first digit tells how large
    # they are, while it can.
    rows = math.prod(row_factors)
    told = ~large | ((array >= rows) & (array < rows // row_factors[0] * 2**31))
    rest = np.where(negative | ~told, 0, array).astype(np.int64)
    digits = np.empty((*array.shape, len(row_factors)), np.int32)
    for k in reversed(range(len(row_factors))):
        digit = rest
        if k:
            rest, digit = np.divmod(rest, row_factors[k])
        digits[..., k] = np.where(negative, -1, np.where(told, digit, row_factors[k]))
    return SplitIds(digits)


def join_on_host(ids: Any, num_embeddings: int, row_factors: Sequence[int]) -> np.ndarray:
    """The integers of digits on the host; see :meth:`jax_tt.TTShape.join_ids`."""
    instance_of("join_ids: ids", ids, SplitIds, "SplitIds, as split_ids returns them")
    digits = as_array("join_ids: ids.digits", ids.digits)
    concrete("join_ids: ids", digits, "Join them outside jit.")
    if digits.shape[-1:] != (len(row_factors),):
        fix = "Keys of a hash table are joined by jax_tt.dynamic.join_keys."
        expected = f"{len(row_factors)} digits, as split_ids of this shape returns them"
        raise mismatch("join_ids: ids.digits", digits, expected, fix)
    digits = np.asarray(digits)
    rows = np.zeros(digits.shape[:-1], np.int64)
    for k, factor in enumerate(row_factors):
        rows = rows * factor + np.clip(digits[..., k], 0, factor - 1)
    # What is out of range stays so, on the same side.
    large = (digits >= np.asarray(row_factors)).any(axis=-1) | (rows >= num_embeddings)
    return np.where((digits < 0).any(axis=-1), -1, np.where(large, num_embeddings, rows))
