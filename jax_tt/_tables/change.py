"""What becomes of a table that is reordered or grows between steps, and of the state that an optimizer keeps for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax_tt._tables.table import Table
    from jax_tt.order._id_order import IdOrder

# (optimizer state of one array before, fresh state of that array after) -> its state after
Carry = Callable[[Any, Any], Any]


class Change(NamedTuple):
    """A table after a change.

    Attributes:
        table: its description.
        state: all of its arrays by name.
        carry: by name of an array, what becomes of the state that optax has for it; that of the others stays.
        found: `TTApproximation` of a table that was fitted anew.
    """

    table: Table
    state: dict[str, Any]
    carry: Mapping[str, Carry]
    found: Any = None


class Growth(NamedTuple):
    """How a table grows.

    Attributes:
        num_embeddings: number of ids to come.
        key, init: of what is appended.
        like: ids that the new ones start near, one or as many as there are new ones, or None.
        method: how native ops run.
    """

    num_embeddings: int
    key: jax.Array
    init: Any
    like: Any
    method: str


class Orders(NamedTuple):
    """How a table is reordered.

    Attributes:
        new: the order of ids to come.
        options: of `jax_tt.tt_reorder`.
        old: the order of its ids so far, None where ids are rows.
        own: numbers of rows, -1 for none, and values ``[n, D]`` that these rows have in place of their own.
    """

    new: IdOrder
    options: Mapping[str, Any]
    old: IdOrder | None = None
    own: tuple[Any, Any] | None = None


def restarted(old: Any, fresh: Any) -> Any:
    """State of a core that was fitted anew: everywhere the mean of what it was.

    Entries of the new core have nothing to do with those of the old one, so that first moments, whose mean is nearly 0,
    are forgotten. The size of the gradients is about what it was. It keeps second moments from starting at 0 at a late
    step, which would make the first steps several times too long. State that starts at the parameters, as `z` of
    `optax.contrib.schedule_free` does, is made of the new ones.
    """
    mean = jnp.mean(jnp.asarray(old), dtype=jnp.float32)
    of_parameters = jnp.any(fresh != fresh.reshape(-1)[0])
    return jnp.where(of_parameters, fresh, mean.astype(fresh.dtype))


def extended(old: Any, fresh: Any) -> Any:
    """State of a core with slices appended: theirs is fresh, that of the others is the same bit for bit."""
    if old.shape[1:] != fresh.shape[1:] or not old.ndim:
        return fresh
    return jnp.concatenate([jnp.asarray(old), fresh[old.shape[0] :]])
