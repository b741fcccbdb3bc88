"""`load_mixed` and `save_mixed`: tables of rows with different numbers of bits in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._files.quantized import loaded, notes_of
from jax_tt._files.small_tables import checked_pairs, read_pairs, write_pairs
from jax_tt._formats.stored import StoredArrays
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._table.types import State

_KIND = "mixed"


def save_mixed(
    path: str | os.PathLike[str],
    tables: Mapping[str, tuple[MixedTable, State]],
    *,
    overwrite: bool = False,
) -> None:
    """Writes tables of quantized rows with different numbers of bits to a file, or to a directory as a checkpoint.

    The arrays of a table are those of its state: ``name.table_0_packed``, ``name.places_0``, and so on. Its settings
    are in the metadata under the key ``jax_tt``. The output is complete or absent, as with `save_tables`.

    Args:
        path: ends with ``.safetensors``, or names a directory. Its parent folder must exist.
        tables: tables with their states by name, as `quantize_mixed` returns them.
        overwrite: replace an existing file, or the directory of a checkpoint.

    Raises:
        FileError: the path has another suffix, cannot be written, or exists and ``overwrite`` is False.
        TypeError, ValueError: ``tables`` contains something else, or a state does not belong to its table.
        ImportError: safetensors or orbax is missing.

    >>> import jax_tt, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "small.safetensors")
    >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    >>> jax_tt.save_mixed(path, {"items": jax_tt.quantize_mixed(rows, 11_000)})
    >>> table, state = jax_tt.load_mixed(path)["items"]
    >>> [(one.bits, one.num_embeddings) for one in table.tables]
    [(4, 432), (3, 568)]
    """
    pairs = checked_pairs(
        tables,
        _require_mixed,
        "jax_tt.quantize_mixed(rows, max_bytes)",
        "table.frozen(state)",
    )
    notes = lambda table: {  # noqa: E731
        "num_embeddings": table.num_embeddings,
        "tables": [notes_of(own) for own in table.tables],
    }
    write_pairs(path, _KIND, pairs, notes, overwrite)


def load_mixed(path: str | os.PathLike[str]) -> dict[str, tuple[MixedTable, dict[str, jax.Array]]]:
    """The tables that `save_mixed` wrote to a file or checkpoint, with their states, by name.

    Raises:
        FileError: there is no such file (then also a `FileNotFoundError`), it is damaged, it contains no such table, or
            its arrays have another size than its metadata say, or hold scales that are not finite.
        ImportError: safetensors or orbax is missing.

    >>> import jax_tt, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "small.safetensors")
    >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    >>> jax_tt.save_mixed(path, {"items": jax_tt.quantize_mixed(rows, 11_000)})
    >>> jax_tt.load_mixed(path)["items"][0].num_embeddings
    1000
    """
    return read_pairs(path, _KIND, _loaded)


def _loaded(stored: StoredArrays, name: str, notes: Any) -> tuple[MixedTable, dict[str, jax.Array]]:
    pairs = [loaded(stored, f"{name}.table_{k}_", own) for k, own in enumerate(notes["tables"])]
    table = MixedTable(tuple(own for own, _ in pairs))
    if table.num_embeddings != notes["num_embeddings"]:
        raise ValueError(
            f"its tables have {table.num_embeddings} rows; expected {notes['num_embeddings']}."
        )
    places = [f"places_{k}" for k in range(len(pairs) - 1)]
    state = table.joined([own for _, own in pairs])
    state |= {key: jnp.asarray(stored[f"{name}.{key}"].read()) for key in places}
    table.check(state)
    try:
        same = table.with_parts(state, table.parts_of(state))
    except ValueError as error:
        raise ValueError(f"its places are damaged: {error}") from error
    if any((same[key] != state[key]).any() for key in places):
        raise ValueError("its places are damaged: they do not tell the rows of the tables.")
    return table, state


def _require_mixed(table: Any) -> MixedTable:
    if isinstance(table, MixedTable) and all(
        isinstance(own, QuantizedTable) for own in table.tables
    ):
        return table
    raise TypeError(
        f"table: got a {type(table).__name__}; expected a MixedTable of QuantizedTables, as "
        "jax_tt.quantize_mixed(rows, max_bytes) returns it with its state. Other states go to "
        "jax_tt.save_arrays."
    )
