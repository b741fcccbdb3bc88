"""Warnings and errors about keys that are not in a hash table."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from jax_tt._base import reports
from jax_tt._base.reports import MissingKeyWarning as MissingKeyWarning

SAFE_CHECKS = ("error", "warn", "ignore")


class Check(NamedTuple):
    """What to do about keys without a row.

    Attributes:
        mode: one of `SAFE_CHECKS`.
        message: what to say, with ``{count}`` in it.
    """

    mode: str
    message: str = ""


IGNORED = Check("ignore")


def check_count(check: Check, count: jax.Array) -> None:
    """Warns or raises on the host where a count, an integer scalar, is not 0.

    A program with a host callback is dispatched more slowly, so the native ops of the CPU do it themselves.
    """
    if check.mode != "ignore":
        _tell_if_any(check, count)


# Eager calls find the program again by the check.
@partial(jax.jit, static_argnums=0)
def _tell_if_any(check: Check, count: jax.Array) -> None:
    tell = partial(_tell, check)
    lax.cond(count > 0, partial(jax.debug.callback, tell), lambda _: None, count)


def _tell(check: Check, count: Any) -> None:
    if not count:  # under vmap, both branches of the condition run
        return
    if check.mode == "error":
        raise ValueError(check.message.replace("{count}", str(int(count))))
    reports.report_missing(check.message, int(count))
