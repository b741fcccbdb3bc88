"""`load_tables` and `save_tables`: tensor-train tables in files."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_tt._base.arguments import as_array
from jax_tt._base.requires import require
from jax_tt._formats.arrays import open_arrays
from jax_tt._formats.orbax_directory import write_orbax
from jax_tt._formats.output import check_output, writing
from jax_tt._formats.safetensors_file import write_safetensors
from jax_tt._formats.stored import FileError, StoredArrays
from jax_tt._ids.id_order import IdOrder
from jax_tt._ids.stored_order import count_of, kept
from jax_tt._tt.approximation import TTApproximation
from jax_tt._tt.shape import TTShape

# Layers of NNX have a leaf "value" below the name in some checkpoints.
_CORE = re.compile(r"(?:(?P<table>.+)\.)?core_(?P<k>[0-4])(?P<leaf>\.value)?")
_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTable:
    """A tensor-train table in a file, read by `load_tables`.

    Attributes:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        shape: their `TTShape`.
        id_order: `IdOrder` from ids to rows, or None where ids are rows.
        relative_error: error relative to the dense table that it was made from, if the file contains it.
        row_errors: quantile -> relative error of a row, as in `TTApproximation`; may be empty.

    >>> import jax_tt, numpy as np, os, tempfile
    >>> from flax import nnx
    >>> found = jax_tt.tt_from_dense(np.ones((1000, 8), np.float32), 1)
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> jax_tt.save_tables(path, {"items": jax_tt.StoredTable.of(found)})
    >>> table = jax_tt.load_tables(path)["items"]
    >>> layer = jax_tt.TTEmbedBag(**table.arguments(), rngs=nnx.Rngs(0))
    >>> for k, core in enumerate(table.cores): getattr(layer, f"core_{k}")[...] = core
    >>> float(layer(np.array([[3, 4]]))[0, 0].round(3))
    2.0
    """

    cores: tuple[Any, ...]
    shape: TTShape
    id_order: IdOrder | None = None
    relative_error: float | None = None
    row_errors: Mapping[float, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, found: TTApproximation, id_order: IdOrder | None = None) -> StoredTable:
        """The result of `tt_from_dense` for a table whose rows were in the order ``id_order``."""
        return cls(found.cores, found.shape, id_order, found.relative_error, found.row_errors)

    def arguments(self) -> dict[str, Any]:
        """Arguments of `TTEmbed` and `TTEmbedBag` for a layer with the shape of the cores."""
        return {
            **self.shape.layer_arguments(),
            "param_dtype": self.cores[0].dtype,
            "id_order": self.id_order,
        }


def save_tables(
    path: str | os.PathLike[str], tables: Mapping[str, StoredTable], *, overwrite: bool = False
) -> None:
    """Writes tables to one ``.safetensors`` file, or to a new directory as an orbax checkpoint.

    Core k of a table is the array ``name.core_k``, and its order is ``name.id_order``; sizes and errors are stored in
    the metadata under the key ``jax_tt``. The order is stored as uint16 rows ``[N]`` up to 65,536 ids, as int64 beyond
    2^31 - 1, and in between as uint32 ``[ceil(N / 32), b]``, where b is the number of bits of N: 32 rows of b bits
    each, one after another, lowest bits first.

    The file or directory is written under a temporary name and renamed when it is complete, so that an interrupted
    program leaves either the old one or the new one.

    Args:
        path: ends with ``.safetensors``, or names a directory. Its parent folder must exist.
        tables: by name.
        overwrite: replace an existing file, or the directory of a checkpoint.

    Raises:
        FileError: the path has another suffix, cannot be written, or exists and ``overwrite`` is False (then also a
            `FileExistsError`).
        TypeError: ``tables`` contains something other than a `StoredTable`.
        ImportError: safetensors or orbax is missing.

    >>> import jax, jax_tt, os, tempfile
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.init_cores(jax.random.key(0), shape)
    >>> path = os.path.join(tempfile.mkdtemp(), "fresh.safetensors")
    >>> jax_tt.save_tables(path, {"items": jax_tt.StoredTable(cores, shape)})
    >>> jax_tt.load_tables(path)["items"].shape == shape
    True
    """
    _check_tables(tables)
    directory = check_tables_path(path)
    check_output(path, overwrite=overwrite, directory=directory)
    arrays: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    for table, stored in tables.items():
        arrays |= {
            f"{table}.core_{k}": np.asarray(as_array(f"tables[{table!r}].cores[{k}]", core))
            for k, core in enumerate(stored.cores)
        }
        if stored.id_order is not None:
            arrays[f"{table}.id_order"] = kept(np.asarray(stored.id_order.rows))
        notes[table] = {
            "num_embeddings": stored.shape.num_embeddings,
            "relative_error": stored.relative_error,
            "row_errors": [[at, error] for at, error in stored.row_errors.items()],
        }
    write = write_orbax if directory else write_safetensors
    with writing(path, overwrite=overwrite, directory=directory) as new:
        write(new, arrays, {"version": _VERSION, "tables": notes})


def _check_tables(tables: Any) -> None:
    if not isinstance(tables, Mapping):
        raise TypeError(
            f"tables: got a {type(tables).__name__}; expected a mapping from names to StoredTable, e.g. "
            "{'items': table}."
        )
    for name, table in tables.items():
        if isinstance(table, StoredTable):
            continue
        fix = "jax_tt.StoredTable(cores, shape)"
        if isinstance(table, TTApproximation):
            fix = "jax_tt.StoredTable.of(...) of it, which also takes an id_order"
        raise TypeError(
            f"tables[{name!r}]: got a {type(table).__name__}; expected a StoredTable, {fix}."
        )


def check_tables_path(path: str | os.PathLike[str]) -> bool:
    """Whether `save_tables` makes a directory of this name, with what it needs for it installed."""
    name = os.fsdecode(path)
    suffix = os.path.splitext(name.rstrip(os.sep))[1]
    if suffix not in ("", ".safetensors"):
        raise FileError(
            f"{name}: got the suffix {suffix}; expected .safetensors, or a directory without suffix for an orbax "
            "checkpoint."
        )
    if not suffix:
        require("orbax.checkpoint", f"Writing {name}", "cli")
    return not suffix


def load_tables(path: str | os.PathLike[str]) -> dict[str, StoredTable]:
    """The tensor-train tables in a file or checkpoint, by name.

    These are the tables written by `save_tables`, and the arrays ``core_0``, ``core_1``, ... in checkpoints of layers,
    which are named after the path to the layer. Such a checkpoint contains the number of rows only if there is an order
    of ids; otherwise it is taken to be the product of the row factors, which is slightly larger.

    Args:
        path: a ``.safetensors`` or ``.npz`` file, or the directory of an orbax checkpoint.

    Raises:
        FileError: there is no such file (then also a `FileNotFoundError`), it is damaged, it contains no such table, or
            the cores are inconsistent or not finite.
        ImportError: safetensors or orbax is missing.

    >>> import jax_tt, numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "cores.npz")
    >>> np.savez(path, core_0=np.ones((10, 1, 2, 3)), core_1=np.ones((10, 3, 4, 1)))
    >>> jax_tt.load_tables(path)[""].shape.num_embeddings
    100
    """
    stored = open_arrays(path)
    shapes = table_shapes(stored)
    if not shapes:
        raise FileError(
            f"{stored.path}: holds no tensor-train table (arrays core_0, core_1, ...), only {stored.listed()}."
        )
    return {name: loaded_table(stored, name, shape) for name, shape in shapes.items()}


def table_shapes(stored: StoredArrays) -> dict[str, TTShape]:
    """Shapes of the tensor-train tables among arrays; their cores are not read."""
    return {name: _shape(stored, name, keys) for name, keys in core_names(stored).items()}


def core_names(stored: StoredArrays) -> dict[str, tuple[str, ...]]:
    """The names of the cores of every table, in order."""
    found: dict[str, dict[int, str]] = {}
    for key, array in stored.arrays.items():
        match = _CORE.fullmatch(key)
        if match and len(array.shape) == 4:
            found.setdefault(match["table"] or "", {})[int(match["k"])] = key
    return {
        name: tuple(keys[k] for k in sorted(keys))
        for name, keys in found.items()
        if len(keys) >= 2 and sorted(keys) == list(range(len(keys)))
    }


def order_name(stored: StoredArrays, table: str) -> str | None:
    """The array that holds the order of a table's ids, or None."""
    start = f"{table}.id_order" if table else "id_order"
    return next((name for name in (start, f"{start}.value") if name in stored.arrays), None)


def notes_of(stored: StoredArrays, table: str) -> Mapping[str, Any]:
    """What the file's metadata say of a table; unchecked but for being a mapping."""
    tables = stored.notes.get("tables")
    notes = tables.get(table) if isinstance(tables, Mapping) else None
    return notes if isinstance(notes, Mapping) else {}


def errors_of(stored: StoredArrays, table: str) -> tuple[float | None, dict[float, float]]:
    """Relative error and row errors by quantile, as the metadata say."""
    notes = notes_of(stored, table)
    error, rows = notes.get("relative_error"), notes.get("row_errors")
    try:
        pairs = rows if isinstance(rows, Sequence) else ()
        return None if error is None else float(error), {float(at): float(e) for at, e in pairs}
    except (TypeError, ValueError) as problem:
        raise FileError(f"{stored.path}: the errors of {table!r} are no numbers.") from problem


def _shape(stored: StoredArrays, name: str, keys: Sequence[str]) -> TTShape:
    p, left, q, right = zip(*(stored.arrays[key].shape for key in keys), strict=True)
    ranks = right[:-1]
    where = f"{stored.path}: the table {name!r}"
    if (left[0], right[-1]) != (1, 1) or left[1:] != ranks:
        shapes = ", ".join(str(stored.arrays[key].shape) for key in keys)
        raise FileError(f"{where}: the cores {shapes} do not fit together.")
    order = order_name(stored, name)
    rows = notes_of(stored, name).get("num_embeddings")
    if rows is None:
        rows = math.prod(p) if order is None else _number_of_ids(stored, order)
    try:
        shape = TTShape(rows, math.prod(q), ranks, p, q)
    except (ValueError, TypeError) as error:
        raise FileError(f"{where}: {error}") from error
    if shape.ranks != ranks:
        raise FileError(
            f"{where}: the ranks {ranks} are higher than the factors allow, {shape.ranks}."
        )
    return shape


def loaded_table(stored: StoredArrays, name: str, shape: TTShape) -> StoredTable:
    """One table of those that `table_shapes` found."""
    cores = []
    for key in core_names(stored)[name]:
        core = np.asarray(stored.arrays[key].read())
        if not np.isfinite(core.astype(np.float32)).all():
            raise FileError(f"{stored.path}: {key} holds NaN or infinity.")
        cores.append(core)
    order = order_name(stored, name)
    id_order = None if order is None else _id_order(stored, order)
    if id_order is not None and id_order.num_embeddings != shape.num_embeddings:
        raise FileError(
            f"{stored.path}: {order} orders {id_order.num_embeddings} ids, the table has {shape.num_embeddings}."
        )
    return StoredTable(tuple(cores), shape, id_order, *errors_of(stored, name))


def _number_of_ids(stored: StoredArrays, name: str) -> int:
    array = stored.arrays[name]
    if len(array.shape) == 1:
        return array.shape[0]
    try:
        return count_of(np.asarray(array.read()))
    except ValueError as error:
        raise FileError(f"{stored.path}: {name} is no order of ids: {error}") from error


def _id_order(stored: StoredArrays, name: str) -> IdOrder:
    try:
        return IdOrder(stored.arrays[name].read())
    except (ValueError, TypeError) as error:
        raise FileError(f"{stored.path}: {name} is no order of ids: {error}") from error
