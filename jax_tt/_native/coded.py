"""The op of coded tables on the native kernels of the CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._native.call import Named
from jax_tt._native.partition import Arrays
from jax_tt._native.table_call import ForwardPass, Types
from jax_tt._table.groups import Call


class CodedForward(ForwardPass):
    """The pooled sums of a coded table before the rotation, from its codes and its codebooks in float32."""

    kind = "coded_"
    blocked_results = ("out",)

    def __init__(self, platform: str, call: Call):
        super().__init__(platform, call)
        codes = self.table.code_operands(call.state)
        books = {name: param.astype(jnp.float32) for name, param in self.params.items()}
        self.whole = {"sentinel": self.whole["sentinel"], **codes, **books}

    def results(self, args: Named) -> Types:
        return {"out": self.operands.sums_type(args["ids"].shape[0], self.table.features)}

    def finished(self, found: Named) -> tuple[jax.Array, Arrays]:
        sums, residuals = super().finished(found)
        return sums, residuals and self.table.order(sums)
