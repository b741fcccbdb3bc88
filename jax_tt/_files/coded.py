"""`load_coded` and `save_coded`: coded tables in files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._files.small_tables import checked_pairs, read_pairs, write_pairs
from jax_tt._formats.stored import StoredArrays
from jax_tt._ids import places
from jax_tt._kinds.coded.names import CODES, HOT_PLACES
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._table.rotation import ROTATION
from jax_tt._table.types import State
from jax_tt._tt.shape import TTShape

_KIND = "coded"
_FIELDS = ("features", "num_codes", "bits", "kind", "rotated", "terms", "hot", "hot_terms")
# Of the tensor train of the codebooks, if they are one.
_TRAIN, _TRAIN_FIELDS = "codebook_shape", ("ranks", "row_factors", "col_factors")


def save_coded(
    path: str | os.PathLike[str],
    tables: Mapping[str, tuple[CodedTable, State]],
    *,
    overwrite: bool = False,
) -> None:
    """Writes coded tables to one ``.safetensors`` file, or to a new directory as an orbax checkpoint.

    The arrays of a table are ``name.codes``, ``name.codebooks`` or the cores ``name.core_0`` and so on, and, if there
    are any, ``name.rotation``, ``name.hot_codes`` and ``name.hot_places``. Its settings are in the metadata under the
    key ``jax_tt``. The output is complete or absent, as with `save_tables`.

    Args:
        path: ends with ``.safetensors``, or names a directory. Its parent folder must exist.
        tables: tables with their states by name, as `encode` returns them, without an optimizer.
        overwrite: replace an existing file, or the directory of a checkpoint.

    Raises:
        FileError: the path has another suffix, cannot be written, or exists and ``overwrite`` is False.
        TypeError, ValueError: ``tables`` contains something else, or a state does not belong to its table.
        ImportError: safetensors or orbax is missing.

    >>> import numpy as np, jax_tt, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "small.safetensors")
    >>> rows = np.eye(100, 16, dtype=np.float32)
    >>> jax_tt.save_coded(path, {"items": jax_tt.encode(rows, 4, bits=4)})
    >>> table, state = jax_tt.load_coded(path)["items"]
    >>> table.num_codes, state["codes"].shape
    (4, (100, 2))
    """
    pairs = checked_pairs(
        tables, _require_coded, "jax_tt.encode(rows, 8)", "table.with_update(None)"
    )
    write_pairs(path, _KIND, pairs, _notes, overwrite)


def load_coded(
    path: str | os.PathLike[str],
) -> dict[str, tuple[CodedTable, dict[str, jax.Array]]]:
    """The tables that `save_coded` wrote to a file or checkpoint, with their states, by name.

    Raises:
        FileError: there is no such file (then also a `FileNotFoundError`), it is damaged, it contains no coded table,
            or its arrays have another size than its metadata say, or are not finite.
        ImportError: safetensors or orbax is missing.

    >>> import numpy as np, jax_tt, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "small.safetensors")
    >>> jax_tt.save_coded(path, {"items": jax_tt.encode(np.eye(100, 16, dtype=np.float32), 4, 4)})
    >>> jax_tt.load_coded(path)["items"][0].num_codes
    4
    """
    return read_pairs(path, _KIND, _loaded)


def _notes(table: CodedTable) -> dict[str, Any]:
    notes = {name: getattr(table, name) for name in _FIELDS}
    shape = table.codebook_shape
    if shape is not None:
        notes[_TRAIN] = {name: list(getattr(shape, name)) for name in _TRAIN_FIELDS}
    return notes


def _loaded(stored: StoredArrays, name: str, notes: Any) -> tuple[CodedTable, dict[str, jax.Array]]:
    read = lambda key: jnp.asarray(stored[f"{name}.{key}"].read())  # noqa: E731
    codes = read(CODES)
    # Files of earlier versions have no hot ids.
    table = CodedTable(
        codes.shape[0], **{field: notes[field] for field in _FIELDS if field in notes}
    )
    if _TRAIN in notes:
        factors = (tuple(notes[_TRAIN][field]) for field in _TRAIN_FIELDS)
        shape = TTShape(table.num_entries, table.width, *factors)
        table = dataclasses.replace(table, codebook_shape=shape)
    state = {key: read(key) for key in (*table.param_names, *table.constant_names) if key != CODES}
    state = {CODES: codes, **state}
    for key in (*table.param_names, *([ROTATION] if table.rotated else [])):
        if not np.isfinite(np.asarray(state[key], np.float32)).all():
            raise ValueError(f"its {key} hold NaN or infinity; expected finite numbers.")
    table = dataclasses.replace(table, param_dtype=table.storage(state))
    table.check(state)
    if table.hot:
        hot, _ = table.hot_ids(state, jnp.arange(table.num_embeddings))
        if hot.sum() != table.hot or (places.of_members(hot) != state[HOT_PLACES]).any():
            raise ValueError(f"its {HOT_PLACES} do not tell the places of {table.hot} ids.")
    return table, state


def _require_coded(table: Any) -> CodedTable:
    if isinstance(table, CodedTable):
        return table
    raise TypeError(
        f"table: got a {type(table).__name__}; expected a CodedTable, as jax_tt.encode(rows, 8) returns it with its "
        "state."
    )
