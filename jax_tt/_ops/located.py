"""`with_slots`: the ids of a batch with the slots that their insertion found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_tt._ids.bags import Bags
from jax_tt._ids.keys import LocatedKeys, key_digits
from jax_tt._ops.inserting import Inserted


def with_slots(ids: Any, inserted: Any) -> Any:
    """The ids of a batch with the slots that their insertion found, for lookups that need not search them again.

    A lookup takes a slot if it still holds the key, and searches the key otherwise: after a growth, a removal or a
    later insertion, no key reads the row of another one. A key that the insertion gave no slot is missing in the
    lookup, which does not report it again.

    Args:
        ids: what `dynamic.insert` or `dynamic.insert` was called with.
        inserted: what it returned: `Inserted`, or a dict of them by table.

    Returns:
        The same ids as a kind of `SplitIds` with three words, the two of the key and the slot; in `Bags`, if they were
        in `Bags`. Of the batch of a collection a dict by feature; features of tables that are sharded or have no keys
        are unchanged.

    Raises:
        TypeError, ValueError: ``inserted`` does not belong to such ids.

    >>> import jax, jax_tt, numpy as np
    >>> table, keys = jax_tt.hash_table(1024, 8), np.array([7, -1])
    >>> inserted, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), keys)
    >>> located = jax_tt.dynamic.with_slots(keys, inserted)
    >>> rows, _ = jax_tt.lookup(table, state, located)
    >>> located.digits.shape, rows.shape
    ((2, 3), (2, 8))
    """
    if isinstance(inserted, Inserted):
        if inserted.found is None:
            raise ValueError(
                "inserted: got the result of a sharded table, the owners of whose keys know the slots; expected "
                "that of a table on one device. Look up the ids themselves."
            )
        return _located("ids", ids, inserted.found)
    if not isinstance(inserted, Mapping) or isinstance(ids, Bags):
        raise TypeError(
            f"inserted: got a {type(inserted).__name__} for a {type(ids).__name__}; expected Inserted, or "
            "the dict that dynamic.insert returned beside its batch."
        )
    batch = {name: ids[name] for name in ids}
    for one in inserted.values():
        for name, slots in (one.found or {}).items():
            batch[name] = _located(f"ids[{name!r}]", batch[name], slots)
    return batch


def _located(name: str, ids: Any, found: Any) -> Any:
    if isinstance(ids, Bags):
        return dataclasses.replace(ids, ids=_with(name, ids.ids, ids.padded, found))
    return _with(name, ids, False, found)


def _with(name: str, ids: Any, padded: bool, found: Any) -> LocatedKeys:
    digits = jnp.asarray(key_digits(name, ids, padded).digits)
    shape = digits.shape[:-1]
    if getattr(found, "shape", None) != (math.prod(shape),):
        raise ValueError(
            f"{name}: got ids of shape {shape} for the insertion of another batch; expected the ids that were inserted."
        )
    return LocatedKeys(jnp.concatenate([digits[..., 1:3], found.reshape(*shape, 1)], axis=-1))
