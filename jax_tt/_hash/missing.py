"""Keys that are not in a hash table: what is said of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax

from jax_tt import _reports

SAFE_CHECKS = ("error", "warn", "ignore")


class MissingKeyWarning(UserWarning):
    """Keys without a row were trained on, or found no room, in a `HashTable` with ``safe_check="warn"``; each is said
    once per table.

    >>> import warnings, jax_tt
    >>> warnings.simplefilter("ignore", jax_tt.MissingKeyWarning)
    """


def check_count(safe_check: str, message: str, count: jax.Array) -> None:
    """Warns or raises on the host where a count is not 0.

    Args:
        safe_check: one of `SAFE_CHECKS`.
        message: what to say, with ``{count}`` in it.
        count: integer scalar.
    """
    if safe_check == "ignore":
        return
    tell = partial(_tell, safe_check, message)
    lax.cond(count > 0, partial(jax.debug.callback, tell), lambda _: None, count)


def _tell(safe_check: str, message: str, count: Any) -> None:
    if not count:  # under vmap, both branches of the condition run
        return
    text = message.replace("{count}", str(int(count)))
    if safe_check == "error":
        raise ValueError(text)
    _reports.warn_once(message, text, MissingKeyWarning)
