"""The op of coded tables on the native kernels of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._native.call import Named
from jax_tt._native.table_call import TableCall, Types
from jax_tt._table.groups import Call


class Forward(TableCall):
    """The pooled sums of a coded table, with its codes before its codebooks, which are float32."""

    kind = "coded_"
    op = "forward"
    together_on = ()
    in_columns = False
    most_arrays = 0
    blocked_results = ("out",)

    def __init__(self, platform: str, call: Call, codes: Named):
        super().__init__(platform, call)
        self.whole = {"sentinel": self.whole["sentinel"], **codes, **self.params}

    @classmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int | None:
        del calls, given, columns
        return None

    def results(self, args: Named) -> Types:
        # Without the rotation, which follows.
        return {"out": self.operands.sums_type(args["ids"], self.table.features)}

    def finished(self, found: Named) -> jax.Array:
        operands = self.operands
        return found["out"].reshape(operands.groups, operands.bags, self.table.features)
