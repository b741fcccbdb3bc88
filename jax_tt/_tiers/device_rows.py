"""`DeviceRows`: the rows of a table on its device, or on the devices that it is sharded over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._ids.placement import stored_rows
from jax_tt._native import hash_backend
from jax_tt._ops.gathered import of_all
from jax_tt._table.wrapper import is_sharded


class DeviceRows:
    """Reads and exchanges rows by their numbers in the table, ``[n]``, which are out of range where there is none.

    Args:
        table: a table of rows, or a `ShardedTable` of one, each of whose rows one device of this process has.
    """

    def __init__(self, table: Any):
        self._sharded = table if is_sharded(table) else None
        if self._sharded is not None:
            layout = table.layout
            if layout.rows * layout.devices >= 2**31:
                raise ValueError(
                    f"tiers: got {layout.rows} rows on each of {layout.devices} devices; expected fewer than 2**31 on "
                    "all devices together, since tables with tiers number their rows in 32 bits."
                )
            places = stored_rows(layout, layout.page_table, np.arange(table.num_embeddings))
            self._places = np.append(places, layout.rows * layout.devices).astype(np.int32)

    def placed(self, arrays: Any) -> Any:
        """Arrays of the host where `exchange` takes them."""
        if self._sharded is None:
            return _on_device(arrays)
        return jax.device_put(arrays, NamedSharding(self._sharded.mesh, P()))

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
            return _exchanged(dict(arrays), dict(entries), rows)
        return _exchanged_at_owners(self._sharded, dict(arrays), dict(entries), rows)

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """What `exchange` and `read` take for rows int32 ``[n]``."""
        return rows if self._sharded is None else self._places[rows]

    def read(self, arrays: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
        """Entries ``[n, ...]`` of arrays by name."""
        if self._sharded is None:
            return gathered(dict(arrays), rows)
        return _read_at_owners(self._sharded, dict(arrays), self._places[rows])

    def with_entries(self, entries: Any, others: Any, sources: Any, targets: Any) -> Any:
        """The entries, which are donated, with some of others in some places."""
        if self._sharded is None:
            return _exchanged(entries, gathered(others, sources), targets)[0]
        return _merged(entries, others, sources, targets)


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
