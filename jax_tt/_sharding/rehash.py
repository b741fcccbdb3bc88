"""Hash tables on another number of devices: every key is inserted anew, with its row, scores and last batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._hash import backend
from jax_tt._hash.directory import Eviction, KeyDirectory, init_directory
from jax_tt._hash.missing import Check, check_count
from jax_tt._hash.table import WAITING, HashTable, directory_of, named_directory, waiting_of
from jax_tt._sharding.keys import owners_of, words_of
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import State

_FULL = (
    "{{count}} keys find no room in their sets of a table of {} rows on {} devices, where their sets are others. Raise "
    "the capacity, or make ways larger."
)


def rehashed(local: HashTable, state: State, devices: int) -> dict[str, jax.Array]:
    """The state of a hash table of which each of some devices has a table like ``local``, one after the other.

    Args:
        local: the table of one device; with one device, the whole table.
        state: of the same keys on any number of devices.
        devices: to divide the keys over.
    """
    eviction = Eviction("none" if local.policy == "none" else "custom")
    method = local.method(Lookup(), state)
    before, empty = directory_of(state), init_directory(local.sets, local.ways)
    whole, slots = _inserted_anew(before, empty, devices, eviction, method)
    lost = jnp.sum((before.touched.reshape(-1) > 0) & (slots < 0), dtype=jnp.int32)
    rows = whole.capacity
    check_count(Check("error", local.label + _FULL.format(rows, devices)), lost)
    at = jnp.where(slots < 0, rows, slots)
    arrays = {
        name: jnp.zeros((rows, *state[name].shape[1:]), state[name].dtype)
        .at[at]
        .set(state[name], mode="drop")
        for name in local.table.row_arrays
    }
    return {**state, **named_directory(whole), **rehashed_waiting(local, state, devices), **arrays}


def rehashed_waiting(local: HashTable, state: State, devices: int) -> dict[str, jax.Array]:
    """The arrays of the keys that wait for admission, as `rehashed` has them; none without such keys.

    Where a set has no room for all of its keys, those whose last request is longest ago are forgotten.
    """
    if not local.waiting_sets:
        return {}
    empty, method = init_directory(local.waiting_sets, local.ways), local.method(Lookup(), state)
    found, _ = _inserted_anew(waiting_of(state), empty, devices, Eviction("custom"), method)
    return named_directory(found, WAITING)


def _inserted_anew(
    before: KeyDirectory, empty: KeyDirectory, devices: int, eviction: Eviction, method: str
) -> tuple[KeyDirectory, jax.Array]:
    """The keys in a directory like ``empty`` for each device, one after the other, and their slots there, or -1."""
    keys, scores = (
        words.transpose(0, 2, 1).reshape(-1, 2) for words in (before.keys, before.scores)
    )
    touched = before.touched.reshape(-1)
    here = touched > 0
    owners = owners_of(*words_of(keys), devices)
    parts, slots = [], jnp.full(here.shape, -1, jnp.int32)
    for device in range(devices):
        own = here & (owners == device)
        directory, done = backend.insert(
            *(empty, keys, own, scores, jnp.int32(1), jnp.uint32(0)), eviction, method
        )
        parts.append(directory)
        slots = jnp.where(own & (done.found >= 0), device * empty.capacity + done.found, slots)
    whole = KeyDirectory(*(jnp.concatenate(own) for own in zip(*parts, strict=True)))
    at = jnp.where(slots < 0, whole.capacity, slots)
    last = jnp.zeros(whole.capacity, jnp.int32).at[at].set(touched, mode="drop")
    return whole._replace(touched=last.reshape(whole.touched.shape)), slots
