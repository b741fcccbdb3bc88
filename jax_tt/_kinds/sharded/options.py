"""`Exchange`: how rows and gradients travel between devices."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax.numpy as jnp

from jax_tt._base.arguments import as_dtype, one_of

_TYPES = ("bfloat16", "float16", "float32")
_POOLED = ("auto", "rows", "sums")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the rows and gradients of a `ShardedTable` travel between devices.

    Attributes:
        dtype: type in which rows and gradients travel, bfloat16 or float16; None for that of the table, and float32 for
            the gradients of 16-bit tables. Rows are rounded to nearest when their owner sends them. Gradients are
            summed by row on each device, rounded to nearest, and summed over devices in float32.
        expected_unique: the share of different rows among the ids that a device looks up, from 0 (exclusive) to 1, by
            which messages are sized. A batch with more of them takes another exchange, with messages for all ids; the
            results are the same.
        pooled: what comes back for bags. ``"rows"``: their different rows, which are summed where the bag is.
            ``"sums"``: from each device, sums of the rows that it has, where tables and lookups allow it. ``"auto"``:
            what takes fewer bytes.
        expected_skew: how many times an even spread of the different rows, or of the ids if sums travel, a device asks
            of one other, 1 or more. It makes messages larger, with the same other exchange for batches that do not
            fit. `plan_exchange` counts both.

    >>> import jax_tt
    >>> jax_tt.planning.Exchange(dtype="bfloat16", expected_unique=0.3).dtype
    'bfloat16'
    """

    dtype: Any = None
    expected_unique: float = 1.0
    pooled: str = "auto"
    expected_skew: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype is not None:
            # A name, since np.dtype("float64") == None.
            name = as_dtype("dtype", self.dtype, None).name
            if name not in _TYPES:
                raise ValueError(
                    f"dtype: got {name}; expected None, {', '.join(_TYPES[:-1])} or {_TYPES[-1]}."
                )
            object.__setattr__(self, "dtype", name)
        one_of("pooled", self.pooled, _POOLED)
        share = self.expected_unique
        if not _is_number(share) or not 0 < share <= 1:
            raise ValueError(
                f"expected_unique: got {share!r}; expected a share above 0 and at most 1, e.g. the number of different "
                "ids in a batch over the number of its ids."
            )
        skew = self.expected_skew
        if not _is_number(skew) or not 1 <= skew < math.inf:
            raise ValueError(
                f"expected_skew: got {skew!r}; expected a number of at least 1, e.g. 2 if one device has twice its "
                "share of the ids."
            )

    @property
    def expects_nothing(self) -> bool:
        """Whether messages are sized for any batch."""
        return self.expected_unique == 1 and self.expected_skew == 1

    def type_of_rows(self, storage: Any, accum: Any) -> Any:
        """The type in which rows of type ``storage`` travel."""
        if self.dtype is not None:
            return jnp.dtype(self.dtype)
        # The rows of a 16-bit table are the same in 16 bits.
        return storage if jnp.dtype(storage).itemsize == 2 else accum

    def type_of_sums(self, accum: Any) -> Any:
        """The type of sums of rows, and of gradients: not 16 bits even for a 16-bit table, unless asked for."""
        return accum if self.dtype is None else jnp.dtype(self.dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


DEFAULT = Exchange()
