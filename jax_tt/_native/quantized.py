"""Pooled sums of quantized rows on the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_tt._native._call import Named
from jax_tt._native._table_call import TableCall, Types


class QuantizedForward(TableCall):
    """The sums of a `QuantizedTable`, which only the CPU has; with ``sentinel`` before the rows."""

    kind = "quantized_"
    op = "forward"
    together_on = ()
    in_columns = False
    across_devices = True
    most_arrays = 600
    blocked_results = ("out",)

    @classmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int | None:
        del calls, given, columns  # the op allocates its own
        return None

    def results(self, args: Named) -> Types:
        return {"out": self.operands.sums_type(args["ids"], self.table.features)}

    def attributes(self, axes: Any) -> dict[str, Any]:
        own = {"bits": np.int64(self.table.bits), "features": np.int64(self.table.features)}
        return super().attributes(axes) | own

    def finished(self, found: Named) -> jax.Array:
        operands = self.operands
        return found["out"].reshape(operands.groups, operands.bags, self.table.features)
