"""Refuses a loss that looks up a fused table twice, where the trace shows it.

The next values of two lookups would be added. The update refuses the sum, but in a compiled step only when it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from jax_tt._lookup._groups import Call
from jax_tt._lookup._shared import Shared, is_shared
from jax_tt._tables.options import Wanted

# Sentinels, by id, of the tables that the backward pass of a loss has stepped so far; kept, so that ids stay theirs.
_stepped: ContextVar[dict[int, Any] | None] = ContextVar("stepped", default=None)


@contextlib.contextmanager
def one_loss() -> Iterator[None]:
    """A context in which one loss is differentiated."""
    token = _stepped.set({})
    try:
        yield
    finally:
        _stepped.reset(token)


def check_first_use(
    calls: Sequence[Call], shared: Shared | None, wanted: Sequence[Wanted], gs: Any
) -> None:
    """Raises if the backward pass of this loss has stepped one of the tables before.

    Args:
        calls, shared: of the lookup.
        wanted: the cotangents of every call.
        gs: gradients of the sums, one of all or one per call; None for sums that the loss does not use.
    """
    before = _stepped.get()
    if before is None:
        return
    own: dict[int, Any] = {}
    for k, call in enumerate(calls):
        table, g = call.use.table, gs[k] if isinstance(gs, tuple | list) else gs
        if g is None or not wanted[k].names or table.update is None:
            continue
        sentinel = shared.sentinel if shared and is_shared(table) else call.state["sentinel"]
        if id(sentinel) in before:
            raise ValueError(
                f"{table.label}the loss looks up this fused table more than once, and next values cannot be added. "
                "Look up all ids in one call, as one batch or as features of one collection, or drop optimizer= to "
                "train the table with optax."
            )
        own[id(sentinel)] = sentinel
    before.update(own)
