"""`load_quantized` and `save_quantized`: quantized tables in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._files.small_tables import checked_pairs, read_pairs, write_pairs
from jax_tt._formats.stored import StoredArrays
from jax_tt._kinds.quantized.codec import check_headers
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable, require_quantized
from jax_tt._table.rotation import ROTATION, as_rotation
from jax_tt._table.types import State

_KIND = "quantized"
_FIELDS = ("features", "bits", "levels", "rotated")


def save_quantized(
    path: str | os.PathLike[str],
    tables: Mapping[str, tuple[QuantizedTable, State]],
    *,
    overwrite: bool = False,
) -> None:
    """Writes quantized tables to one ``.safetensors`` file, or to a new directory as an orbax checkpoint.

    The rows of a table are the array ``name.packed``, and its rotation ``name.rotation``; its columns, bits and levels
    are in the metadata under the key ``jax_tt``. The output is complete or absent, as with `save_tables`.

    Args:
        path: ends with ``.safetensors``, or names a directory. Its parent folder must exist.
        tables: tables with their states by name, as `quantize` returns them.
        overwrite: replace an existing file, or the directory of a checkpoint.

    Raises:
        FileError: the path has another suffix, cannot be written, or exists and ``overwrite`` is False.
        TypeError, ValueError: ``tables`` contains something else, or a state does not belong to its table.
        ImportError: safetensors or orbax is missing.

    >>> import jax.numpy as jnp, jax_tt, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "small.safetensors")
    >>> jax_tt.save_quantized(path, {"items": jax_tt.quantize(jnp.eye(100, 16), bits=4)})
    >>> table, state = jax_tt.load_quantized(path)["items"]
    >>> table.bits, state["packed"].shape
    (4, (100, 12))
    """
    pairs = checked_pairs(
        tables, require_quantized, "jax_tt.quantize(rows, bits=4)", "table.frozen(state)"
    )
    write_pairs(path, _KIND, pairs, notes_of, overwrite)


def load_quantized(
    path: str | os.PathLike[str],
) -> dict[str, tuple[QuantizedTable, dict[str, jax.Array]]]:
    """The tables that `save_quantized` wrote to a file or checkpoint, with their states, by name.

    Raises:
        FileError: there is no such file (then also a `FileNotFoundError`), it is damaged, it contains no quantized
            table, or its rows have another size than its metadata say, or scales that are not finite.
        ImportError: safetensors or orbax is missing.

    >>> import jax.numpy as jnp, jax_tt, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "small.safetensors")
    >>> jax_tt.save_quantized(path, {"items": jax_tt.quantize(jnp.eye(100, 16), bits=2)})
    >>> table, state = jax_tt.load_quantized(path)["items"]
    >>> table.num_embeddings, table.features, table.bits
    (100, 16, 2)
    """
    return read_pairs(path, _KIND, lambda stored, name, notes: loaded(stored, f"{name}.", notes))


def notes_of(table: QuantizedTable) -> dict[str, Any]:
    """What a file says of a table beside its arrays."""
    return {field: getattr(table, field) for field in _FIELDS}


def loaded(
    stored: StoredArrays, prefix: str, notes: Any
) -> tuple[QuantizedTable, dict[str, jax.Array]]:
    """The table whose arrays have names with this prefix."""
    array = stored[f"{prefix}{PACKED}"]
    features, bits = notes["features"], notes["bits"]
    # Files of earlier versions have uniform levels and no rotation.
    levels, rotated = notes.get("levels"), notes.get("rotated", False)
    levels = None if levels is None else tuple(levels)
    table = QuantizedTable(array.shape[0], features, bits, levels=levels, rotated=rotated)
    expected = table.param_shapes[PACKED]
    if array.dtype != np.uint8 or array.shape != expected:
        raise ValueError(
            f"its rows are {array.dtype} of shape {array.shape}; expected uint8 of shape {expected}."
        )
    packed = np.asarray(array.read())
    check_headers("its rows", packed, 0)
    state = {PACKED: jnp.asarray(packed)}
    if table.rotated:
        rotation = as_rotation(np.asarray(stored[f"{prefix}{ROTATION}"].read()), table.features)
        state[ROTATION] = jnp.asarray(rotation)
    return table, state
