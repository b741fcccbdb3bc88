"""Transfers: arrays of devices on the host, where some may belong to other processes, and eager constants."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def on_host(array: Any) -> np.ndarray:
    """The array; where other processes have shards of it, all of them call this, and every device gets it."""
    if getattr(array, "is_fully_addressable", True) or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(jax.device_put(array, NamedSharding(array.sharding.mesh, P())))


def like_on_device(array: jax.Array, value: Any) -> jax.Array:
    """A value that all processes have, with the type and the sharding of an array."""
    value = np.asarray(value, array.dtype)
    return on_all(value, array.sharding) if array.committed else jnp.array(value)


def on_all(value: np.ndarray, sharding: Any) -> jax.Array:
    """A value that all processes have, on the devices of a sharding."""
    # A copy for every device: on the CPU, an array may share its memory with numpy.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))


def processes_of_rows(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """The lowest process that has each row, int ``[n]``."""
    indices = array.sharding.devices_indices_map(array.shape)
    pairs = np.array(
        [(_first_of(index), device.process_index) for device, index in indices.items()]
    )
    first = np.unique(pairs[:, 0])
    lowest = np.array([pairs[pairs[:, 0] == k, 1].min() for k in first])
    return lowest[np.searchsorted(first, rows, side="right") - 1]


class HostRows:
    """The rows of an array, sharded along its first axis at most, that are on devices of this process."""

    def __init__(self, array: jax.Array, *, copied: bool = False) -> None:
        self._array = array
        given = {_first_of(shard.index): shard.data for shard in array.addressable_shards}
        self._shards = {
            first: np.array(shard) if copied else np.asarray(shard)
            for first, shard in sorted(given.items())
        }

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Entries ``[n, ...]`` of rows; 0 for those that are not here."""
        entries = np.zeros((len(rows), *self._array.shape[1:]), self._array.dtype)
        for first, shard in self._shards.items():
            here = _here(rows, first, shard)
            entries[here] = shard[rows[here] - first]
        return entries

    def write(self, rows: np.ndarray, entries: Any) -> None:
        """Overwrites rows with entries ``[n, ...]`` or a scalar, of a copy; rows that are not here are skipped."""
        entries = np.asarray(entries)
        for first, shard in self._shards.items():
            here = _here(rows, first, shard)
            shard[rows[here] - first] = (entries[here] if entries.ndim else entries).astype(
                shard.dtype
            )

    def array(self) -> jax.Array:
        """The rows where they were."""
        like = self._array
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: self._shards[_first_of(index)]
        )


def _first_of(index: Any) -> int:
    return (index[0].start or 0) if index else 0


def _here(rows: np.ndarray, first: int, shard: np.ndarray) -> np.ndarray:
    return (rows >= first) & (rows < first + len(shard))


# A context in which the constants of an operation are no transfers that `jax.transfer_guard` would refuse. Compiled
# programs hold theirs; outside of them, JAX brings the `1` of `x + 1` to one device, and from there to those of `x`.
own_constants = partial(jax.transfer_guard, "allow")
