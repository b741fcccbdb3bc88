"""`DeviceRows`: the rows of a table on its device, or on the devices that it is sharded over."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import expect, mismatch
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._ids.placement import stored_rows
from jax_tt._jax.on_host import processes_of_rows
from jax_tt._jax.vma import of_all
from jax_tt._kinds.sharded.programs import Local
from jax_tt._native import hash_backend
from jax_tt._table.wrapper import is_sharded
from jax_tt._tiers.places import rounded_up


class DeviceRows:
    """Reads and exchanges rows by their numbers in the table, ``[n]``, which are out of range where there is none.

    Args:
        table: a table of rows, or a `ShardedTable` of one, each of whose rows one device of this process has.
    """

    def __init__(self, table: Any):
        self._sharded = table if is_sharded(table) else None
        if self._sharded is not None:
            layout = table.layout
            got = f"{layout.rows} rows on each of {layout.devices} devices"
            expected = "fewer than 2**31 on all devices, as tiers number rows in 32 bits"
            expect(layout.rows * layout.devices < 2**31, "tiers", got, expected)
            places = stored_rows(layout, layout.page_table, np.arange(table.num_embeddings))
            self._places = np.append(places, layout.rows * layout.devices).astype(np.int32)

    def placed(
        self, rows: np.ndarray, entries: dict[str, np.ndarray]
    ) -> tuple[Any, dict[str, Any]]:
        """Arrays of the host where `exchange` takes them."""
        if self._sharded is None:
            return _on_device((rows, entries))
        return jax.device_put((rows, entries), NamedSharding(self._sharded.mesh, P()))

    def exchange(
        self, arrays: Mapping[str, Any], entries: Mapping[str, Any], rows: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Writes entries into rows, in ascending order, of arrays, which are donated; returns these and what was there.

        Args:
            arrays: ``[rows, ...]`` by name.
            entries: ``[n, ...]`` by name, of `placed`.
            rows: as `numbers` returns them, of `placed`.
        """
        if self._sharded is None:
            self._require_whole(arrays)
            return _exchanged(dict(arrays), dict(entries), rows)
        return _exchanged_at_owners(self._sharded, dict(arrays), dict(entries), rows)

    def _require_whole(self, arrays: Mapping[str, Any]) -> None:
        """Raises for arrays that a user has sharded, which an exchange would copy to every device."""
        sharding = next(iter(arrays.values())).sharding
        if len(sharding.device_set) > 1 and not sharding.is_fully_replicated:
            expected = "them on one device, or the table of shard_tables, which exchanges its rows"
            raise mismatch("state", f"rows of a table with tiers in {sharding}", expected)

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """What `exchange` and `read` take for rows int32 ``[n]``."""
        return rows if self._sharded is None else self._places[rows]

    def read(self, arrays: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
        """Entries ``[n, ...]`` of arrays by name."""
        if self._sharded is None:
            return gathered(dict(arrays), rows)
        return _read_at_owners(self._sharded, dict(arrays), self._places[rows])

    def read_here(self, arrays: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
        """Entries of rows that are on devices of this process, which reads them alone."""
        return self.read(arrays, rows)

    def processes(self, array: Any, rows: np.ndarray) -> np.ndarray:
        """The process whose `read_here` reads each row of an array."""
        del array
        return np.full(len(rows), jax.process_index())

    def with_entries(self, entries: Any, others: Any, sources: Any, targets: Any) -> Any:
        """The entries, which are donated, with some of others in some places."""
        if self._sharded is None:
            return _exchanged(entries, gathered(others, sources), targets)[0]
        return _merged(entries, others, sources, targets)


def on_device(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Programs run on one device, also where the caller has set a mesh of devices of several processes."""
    return jax.set_mesh(Mesh(np.array([device]), ("device",)))


class RowsOfProcesses(DeviceRows):
    """The rows of a table that is sharded over devices of several processes.

    Each process has some of the entries that come, and zeros in place of the others. Until they are exchanged, they are
    on one of its devices, so that it needs no other process to change them.
    """

    def __init__(self, table: Any):
        super().__init__(table)
        mesh, here = table.mesh, jax.process_index()
        self._here = [device for device in mesh.devices.flat if device.process_index == here]
        self._spread = NamedSharding(mesh, P(mesh.axis_names))
        self._everywhere = NamedSharding(mesh, P())

    def placed(
        self, rows: np.ndarray, entries: dict[str, np.ndarray]
    ) -> tuple[Any, dict[str, Any]]:
        # jax.device_put would compare the values with those of other processes.
        everywhere = jax.make_array_from_callback(rows.shape, self._everywhere, lambda _: rows)
        return everywhere, jax.device_put(entries, self._here[0])

    def exchange(
        self, arrays: Mapping[str, Any], entries: Mapping[str, Any], rows: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = {name: self._part(x) for name, x in entries.items()}
        return _exchanged_of_processes(self._sharded, dict(arrays), parts, rows)

    def with_entries(self, entries: Any, others: Any, sources: Any, targets: Any) -> Any:
        here = {
            name: next(x.data for x in array.addressable_shards if x.device == self._here[0])
            for name, array in others.items()
        }
        with on_device(self._here[0]):
            return super().with_entries(entries, here, sources, targets)

    def read_here(self, arrays: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
        entries = {k: np.zeros((len(rows), *x.shape[1:]), x.dtype) for k, x in arrays.items()}
        places = self._places[rows]
        shards = {k: x.addressable_shards for k, x in arrays.items()}
        for k, shard in enumerate(next(iter(shards.values()))):
            first, held = shard.index[0].start or 0, len(shard.data)
            wanted = np.flatnonzero((places >= first) & (places < first + held))
            padded = np.zeros(rounded_up(len(wanted), 64), np.int32)
            padded[: len(wanted)] = places[wanted] - first
            with on_device(shard.device):
                of_shard = gathered({name: array[k].data for name, array in shards.items()}, padded)
            for name, array in of_shard.items():
                entries[name][wanted] = np.asarray(array)[: len(wanted)]
        return entries

    def processes(self, array: Any, rows: np.ndarray) -> np.ndarray:
        return processes_of_rows(array, self._places[rows])

    def _part(self, entries: jax.Array) -> jax.Array:
        """The entries of this process, with zeros on its other devices, in an array of all devices."""
        blank = []
        for device in self._here[1:]:
            with on_device(device):
                blank.append(jnp.zeros(entries.shape, entries.dtype, device=device))
        shape = self._spread.mesh.size * len(entries), *entries.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, self._spread, [entries, *blank])


@partial(jax.jit, donate_argnums=0)
def _exchanged(arrays: dict[str, Any], entries: dict[str, Any], rows: Any) -> Any:
    pairs = [*arrays.values()], [entries[name] for name in arrays]
    new, old = hash_backend.exchange(*pairs, rows, "auto", return_old=True)
    return dict(zip(arrays, new, strict=True)), dict(zip(arrays, old, strict=True))


@jax.jit
def _on_device(arrays: Any) -> Any:
    # Takes a quarter of the time of jax.device_put, which the thread that prepares batches would take from the step.
    return arrays


@jax.jit
def gathered(arrays: Any, rows: Any) -> Any:
    """Entries of arrays on one device."""
    return {name: array[rows] for name, array in arrays.items()}


@partial(jax.jit, donate_argnums=0)
def _merged(entries: Any, others: Any, sources: Any, targets: Any) -> Any:
    return {
        name: array.at[targets].set(others[name][sources], mode="drop")
        for name, array in entries.items()
    }


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _exchanged_at_owners(table: Any, arrays: Any, entries: Any, rows: Any) -> Any:
    return table.at_owners(_exchange_here, (table.axes,), arrays, (entries, rows))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _exchanged_of_processes(table: Any, arrays: Any, parts: Any, rows: Any) -> Any:
    names = table.mesh.axis_names
    add = table.group.on_devices(Local(_added, (names,)), (P(names),), P())
    given = over_explicit_axes(add, parts, P()), rows
    return table.at_owners(_exchange_here, (table.axes,), arrays, given)


def _added(axes: tuple[str, ...], parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: of_all(x, jnp.arange(len(x)), len(x), axes) for name, x in parts.items()}


@partial(jax.jit, static_argnums=0)
def _read_at_owners(table: Any, arrays: Any, rows: Any) -> Any:
    return table.at_owners(_read_here, (table.axes,), arrays, rows)[1]


def _exchange_here(axes: tuple[str, ...], arrays: Any, given: Any) -> tuple[Any, Any]:
    entries, rows = given
    _, old = _read_here(axes, arrays, rows)
    places, _ = _here(axes, arrays, rows)
    new = {name: x.at[places].set(entries[name], mode="drop") for name, x in arrays.items()}
    return new, old


def _read_here(axes: tuple[str, ...], arrays: Any, rows: Any) -> tuple[Any, Any]:
    places, positions = _here(axes, arrays, rows)
    return (), {
        name: of_all(x.at[places].get(mode="fill", fill_value=0), positions, rows.size, axes)
        for name, x in arrays.items()
    }


def _here(axes: tuple[str, ...], arrays: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
    """The places of rows in the shards of this device, and their positions; out of range for rows of others."""
    held = next(iter(arrays.values())).shape[0]
    places = rows - jax.lax.axis_index(axes).astype(jnp.int32) * held
    here = (places >= 0) & (places < held)
    positions = jnp.arange(rows.size, dtype=jnp.int32)
    return jnp.where(here, places, held), jnp.where(here, positions, rows.size)
