"""`load_quantized` and `save_quantized`: quantized tables in files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._files.arrays import open_arrays
from jax_tt._files.orbax_directory import write_orbax
from jax_tt._files.output import check_output, writing
from jax_tt._files.safetensors_file import write_safetensors
from jax_tt._files.stored import FileError, StoredArrays
from jax_tt._files.tables import check_tables_path
from jax_tt._quantized.quantize import check_headers
from jax_tt._quantized.table import PACKED, QuantizedTable, require_quantized
from jax_tt._tables.table import State

_VERSION = 1
_NOTES = "quantized"


def save_quantized(
    path: str | os.PathLike[str],
    tables: Mapping[str, tuple[QuantizedTable, State]],
    *,
    overwrite: bool = False,
) -> None:
    """Writes quantized tables to one ``.safetensors`` file, or to a new directory as an orbax checkpoint.

    The rows of a table are the array ``name.packed``; its columns and bits are in the metadata under the key
    ``jax_tt``. The output is complete or absent, as with `save_tables`.

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
    arrays, notes = {}, {}
    for name, (table, state) in _checked(tables).items():
        arrays[f"{name}.{PACKED}"] = np.asarray(state[PACKED])
        notes[name] = {"features": table.features, "bits": table.bits}
    directory = check_tables_path(path)
    check_output(path, overwrite=overwrite, directory=directory)
    write = write_orbax if directory else write_safetensors
    with writing(path, overwrite=overwrite, directory=directory) as new:
        write(new, arrays, {"version": _VERSION, _NOTES: notes})


def _checked(tables: Any) -> Mapping[str, tuple[QuantizedTable, State]]:
    if not isinstance(tables, Mapping):
        raise TypeError(
            f"tables: got a {type(tables).__name__}; expected a mapping from names to tables with their states, e.g. "
            "{'items': jax_tt.quantize(rows, bits=4)}."
        )
    for name, pair in tables.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"tables[{name!r}]: got a {type(pair).__name__}; expected a table with its state, as jax_tt.quantize "
                "returns them."
            )
        if require_quantized(pair[0]).update is not None:
            raise ValueError(
                f"tables[{name!r}]: got a table with an optimizer, whose state such a file does not hold; expected a "
                "read-only one, table.frozen(state). Save the whole state in a checkpoint to train on."
            )
        pair[0].check(pair[1])
    return tables


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
    >>> jax_tt.load_quantized(path)["items"][0]
    QuantizedTable(num_embeddings=100, features=16, bits=2, update=None, name=None)
    """
    stored = open_arrays(path)
    found = stored.notes.get(_NOTES)
    if not isinstance(found, Mapping) or not found:
        raise FileError(
            f"{stored.path}: holds no quantized table of jax_tt.save_quantized, only {stored.listed()}."
        )
    return {name: _loaded(stored, name, notes) for name, notes in found.items()}


def _loaded(
    stored: StoredArrays, name: str, notes: Any
) -> tuple[QuantizedTable, dict[str, jax.Array]]:
    array = stored[f"{name}.{PACKED}"]
    where = f"{stored.path}: the table {name!r}"
    try:
        table = QuantizedTable(array.shape[0], notes["features"], notes["bits"])
        expected = table.param_shapes[PACKED]
        if array.dtype != np.uint8 or array.shape != expected:
            raise ValueError(
                f"its rows are {array.dtype} of shape {array.shape}; expected uint8 of shape {expected}."
            )
        packed = np.asarray(array.read())
        check_headers("its rows", packed, 0)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise FileError(f"{where}: {error}") from error
    return table, {PACKED: jnp.asarray(packed)}
