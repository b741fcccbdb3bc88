"""What overwrites fused tables: their next values, or nothing where a loss did not use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt import _sentinel
from jax_tt._cache.cached import is_of_rows, outer_name

Path = tuple[Any, ...]
_USED, _SENTINEL = ((name, outer_name(name)) for name in ("used", "sentinel"))


def next_values(caller: str, old: Mapping[Path, Any], new: Mapping[Path, Any]) -> dict[Path, Any]:
    """The variables to write, by path: those of ``new`` in all tables that the loss used.

    In a traced program the choice between old and new is part of it. The compiler drops the choice where it can see
    that ``used`` is a constant, which is everywhere but behind a ``cond`` or in a program that was given the gradients:
    a reader of the old table would force a copy of it in front of the update that is done in place.

    Args:
        caller: for messages.
        old: variables of the model, of fused tables among others.
        new: their "gradients"; what belongs to no fused table is returned as it is.

    Raises:
        ValueError: outside ``jit``, the gradients of a table are not its next values.
    """
    tables = {_table_of(path): path for path in new if says_used(path)}
    known = _known({path: new[path] for path in new if path[-1] in (*_USED, *_SENTINEL)})
    unused = {table: _is_unused(known.get(path, new[path])) for table, path in tables.items()}
    for path, sentinel in known.items():
        skip = unused.get(_table_of(path), False)
        if path[-1] in _SENTINEL and not isinstance(skip, jax.Array):
            _check_sentinel(caller, path, sentinel, skip)
    result = {}
    for path, value in new.items():
        skip = unused.get(_table_of(path), False)
        if skip is True:
            continue
        result[path] = value if skip is False else _either(skip, old[path], value)
    return result


def _table_of(path: Path) -> tuple[Path, bool]:
    """The module of a variable, and whether it belongs to the cached rows of its table."""
    return path[:-1], is_of_rows(str(path[-1]))


def says_used(path: Path) -> bool:
    """Whether a variable is the scalar that says whether a loss used its table."""
    return path[-1] in _USED


def _known(values: Mapping[Path, Any]) -> dict[Path, np.ndarray]:
    """Those that can be read on the host now, in one transfer."""
    return jax.device_get(
        {
            path: value
            for path, value in values.items()
            if not isinstance(value, Tracer) and getattr(value, "is_fully_addressable", True)
        }
    )


def _is_unused(used: Any) -> Any:
    """A bool, or an array: a traced one, or one that tells the layers of a stack of tables apart."""
    unused = used == 0
    if isinstance(unused, jax.Array):
        return unused
    return bool(unused.all()) if unused.all() or not unused.any() else unused


def _either(unused: Any, old: Any, new: Any) -> Any:
    def choose(old: Any, new: Any) -> jax.Array:
        # Layers of a stack come first. One that was stacked along its last axis is kept, or not, as a whole.
        mask = jnp.asarray(unused if new.shape[: unused.ndim] == unused.shape else unused.all())
        if mask.ndim:
            mask = jnp.broadcast_to(jnp.expand_dims(mask, range(mask.ndim, new.ndim)), new.shape)
        return jax.lax.select(mask, jnp.asarray(old), new)

    return jax.tree.map(choose, old, new)


def _check_sentinel(
    caller: str, path: Path, sentinel: np.ndarray, unused: bool | np.ndarray
) -> None:
    moved = np.ravel(sentinel)[~np.ravel(_sentinel.holds(sentinel) | unused)]
    if moved.size == 0:
        return
    table = ".".join(map(str, path[:-1])) or "the model"
    raise ValueError(
        f"{caller}: grads of fused table '{table}' are not its next values: its sentinel is {moved[0]!s}, expected 1. "
        f"{_ZEROS if moved[0] == 0 else _MOVED}"
    )


_ZEROS = "An earlier step overwrote the table with zeros, as its loss did not use it: restore it from a checkpoint."
_MOVED = (
    "The table was used more than once in the loss, or the gradients were summed, scaled or clipped after nnx.grad: "
    "look all ids of a shared table up in one call, move clipping and accumulation into tx, pass a loss scale to the "
    "layer as grad_scale, or build the layer with optimizer=None and let optax step it."
)
