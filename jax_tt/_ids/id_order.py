"""`IdOrder`: which row of a table belongs to which id."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import (
    as_array,
    as_positive,
    concrete,
    expect,
    expect_ids,
    integers,
    mismatch,
    narrow,
)
from jax_tt._base.dtypes import x64_enabled
from jax_tt._formats.numpy_file import read_npz, write_npz
from jax_tt._formats.stored import whole_file
from jax_tt._ids.bags import as_ids, id_array
from jax_tt._ids.explicit import over_explicit_axes, spec_of
from jax_tt._ids.split_ids import SplitIds
from jax_tt._ids.stored_order import LAST_PACKED, LAST_SHORT, StoredRows, kept_bytes, on_host


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class IdOrder:
    """A bijection from ids to the rows of a table, both ``[0, N)``.

    Rows whose numbers share digits share parameters of a tensor-train table, so the order of its ids is part of the
    model. Pass the order to a layer, ``TTEmbedBag(..., id_order=order)``, and continue to use the original ids.

    An order is a pytree with one leaf.

    Args:
        rows: integers ``[N]``, the row of id 0, of id 1, and so on, which contain each of ``0 ... N - 1`` once. They
            are stored in the smallest of uint16, int32 and int64 that is sufficient; layers and files pack them, see
            `nbytes`. The array of a layer, ``IdOrder(layer.id_order[...])``, is accepted as well.

    Raises:
        ValueError: ``rows`` is not a permutation of ``[0, N)``; the message names a missing or repeated row.
        TypeError: ``rows`` does not hold integers.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> order = jax_tt.order.IdOrder([2, 0, 1, 3])
        >>> order.apply([0, 1, -1, 7])
        array([ 2,  0, -1,  7])
        >>> order.inverse.apply(order.apply([0, 1, 2, 3]))
        array([0, 1, 2, 3])
        >>> layer = jax_tt.TTEmbed(4, 8, id_order=order, rngs=nnx.Rngs(0))
        >>> rows = jax_tt.tt.to_dense(layer.cores, 4)
        >>> bool(jnp.allclose(layer(jnp.array(0)), rows[2], atol=1e-6))
        True
    """

    rows: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _permutation(self.rows))

    @classmethod
    def identity(cls, num_embeddings: int) -> IdOrder:
        """The identity, e.g. to build a layer before its order is restored from a checkpoint.

        >>> import jax_tt
        >>> jax_tt.order.IdOrder.identity(3).rows
        array([0, 1, 2], dtype=uint16)
        """
        return cls(np.arange(as_positive("num_embeddings", num_embeddings)))

    @property
    def num_embeddings(self) -> int:
        """Number of ids, N."""
        return self.rows.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the order in a layer: 2 per id up to 65,536 ids, above that as many bits as their number requires.

        Smaller orders are not packed: that would save at most 4 kB, and a packed row takes two or three times as long
        to look up (0.6 to 0.8 ms instead of 0.2 to 0.3 ms for 100,000 ids on a CPU).

        >>> import jax_tt
        >>> [jax_tt.order.IdOrder.identity(n).nbytes / n for n in (1_000, 65_536, 100_000, 1_000_000)]
        [2.0, 2.0, 2.125, 2.5]
        """
        return kept_bytes(self.num_embeddings)

    @property
    def inverse(self) -> IdOrder:
        """The bijection from rows to ids."""
        rows = self.rows
        if isinstance(rows, Tracer):
            ids = rows.at[rows].set(jax.numpy.arange(len(rows), dtype=rows.dtype))
            return self.tree_unflatten(None, (ids,))
        rows = np.asarray(rows)
        ids = np.empty_like(rows)
        ids[rows] = np.arange(len(rows), dtype=rows.dtype)
        return IdOrder(ids)

    def grow(self, num_embeddings: int) -> IdOrder:
        """The order of a larger number of ids: existing ids keep their rows, new ids get the new rows in sequence.

        >>> import jax_tt
        >>> jax_tt.order.IdOrder([1, 0]).grow(4).rows
        array([1, 0, 2, 3], dtype=uint16)
        """
        old, new = self.num_embeddings, as_positive("num_embeddings", num_embeddings)
        if new < old:
            got = f"{new} for an order of {old} ids"
            raise mismatch("num_embeddings", got, "at least as many: an order only grows")
        return IdOrder(np.concatenate([np.asarray(self.rows), np.arange(old, new)]))

    def apply(self, ids: Any) -> Any:
        """Rows of ids.

        Args:
            ids: integers of any shape: numpy arrays or lists, mapped on the host, or JAX arrays, traced or not.

        Returns:
            The rows, in the type of the ids unless it is too small. An id outside ``[0, N)`` is returned unchanged,
            so that padding stays padding and an id out of range stays out of range.

        Raises:
            ValueError: ``ids`` are not integers.
            TypeError: ``ids`` are `SplitIds`.
        """
        traced = isinstance(ids, jax.Array) or isinstance(self.rows, Tracer)
        if traced or hasattr(ids, "digits"):
            rows = StoredRows(jax.numpy.asarray(self.rows), self.num_embeddings)
            return mapped_ids(rows, ids)
        array = integers("ids", np.asarray(as_array("ids", ids)), ids)
        rows = np.asarray(self.rows)
        if np.iinfo(array.dtype).max < len(rows) - 1:
            array = array.astype(type_of_ids(len(rows)))
        inside = (array >= 0) & (array < len(rows))
        result = array.copy()
        result[inside] = rows[array[inside]]
        return result

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes an ``.npz`` file with one array, ``rows``. The file is either complete or not written.

        Raises:
            FileError: the file exists and ``overwrite`` is False (then also a `FileExistsError`), or cannot be written.

        >>> import jax_tt, os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "order.npz")
        >>> order = jax_tt.order.from_counts([5, 0, 9])
        >>> order.save(path)
        >>> jax_tt.order.IdOrder.load(path) == order
        True
        """
        write_npz(path, {"rows": np.asarray(self.rows)}, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> IdOrder:
        """Reads a file written by `save`.

        Raises:
            FileError: the file is missing (then also a `FileNotFoundError`), damaged, or has no array ``rows``.
            ValueError: ``rows`` is not a permutation.
        """
        return cls(read_npz(whole_file(path))["rows"].read())

    # Flax compares and hashes the attributes of a module.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdOrder) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        digest = self.__dict__.get("_digest")
        if digest is None:
            data = np.ascontiguousarray(self.rows)
            digest = int.from_bytes(hashlib.blake2b(data.data, digest_size=8).digest(), "little")
            object.__setattr__(self, "_digest", digest)
        return digest

    def __repr__(self) -> str:
        return f"IdOrder(num_embeddings={self.num_embeddings})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        return ((jax.tree_util.GetAttrKey("rows"), self.rows),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> IdOrder:
        order = object.__new__(cls)  # leaves may be anything while a tree is transformed
        object.__setattr__(order, "rows", children[0])
        return order


def order_of_rows(ids: np.ndarray) -> IdOrder:
    """The order that assigns row k to the id ``ids[k]``."""
    rows = np.empty(len(ids), np.int64)
    rows[ids] = np.arange(len(ids))
    return IdOrder(rows)


def _permutation(rows: Any) -> np.ndarray:
    array = as_array("rows", rows)
    concrete("rows", array, "It is checked on the host. Pass an IdOrder through jit as a pytree.")
    array = on_host(array)
    expect(array.dtype.kind in "iu", "rows", array, "integers", error=TypeError)
    expect(array.ndim == 1 and array.size, "rows", array, "[N] with N >= 1")
    count = len(array)
    expect_ids("rows", array, count, f"each once, as there are {count} ids", "row")
    seen = np.zeros(count, bool)
    seen[array] = True
    if not seen.all():
        raise ValueError(
            f"rows: the row {int(np.argmin(seen))} is missing, so that another is there twice; expected each of "
            f"0 ... {count - 1} once."
        )
    kept = array.astype(np.uint16 if count <= LAST_SHORT else type_of_ids(count))
    kept.setflags(write=False)
    return kept


ID_ORDER = "id_order"


class OrderedRows:
    """A table ``[N, D]`` with its rows in another order, read by slices and never copied as a whole."""

    def __init__(self, table: Any, order: IdOrder):
        if table.shape[0] != order.num_embeddings:
            expected = f"{table.shape[0]}, the rows of the table"
            raise mismatch("order", f"an order of {order.num_embeddings} ids", expected)
        self._table = np.asarray(table) if isinstance(table, jax.Array) else table
        self._ids = order.inverse.rows
        self.shape, self.dtype = self._table.shape, self._table.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        ids = self._ids[rows]
        found = self._table[ids]
        finite = np.isfinite(found.astype(np.float32)).all(axis=1)
        if not finite.all():
            row = f"table: the row of id {ids[np.argmin(finite)]}"
            raise mismatch(row, "NaN or infinity", "finite numbers")
        return found


def type_of_ids(num_embeddings: int) -> Any:
    """An integer type for all ids of an order and for padding, which is negative."""
    return np.int32 if num_embeddings <= LAST_PACKED else np.int64


def mapped_ids(rows: StoredRows, ids: Any, name: str = "ids") -> jax.Array:
    """Row of every id; padding and ids out of range are returned unchanged."""
    if isinstance(ids, SplitIds):
        raise TypeError(
            f"{name}: got SplitIds for a table with an id_order, which maps integers. Map them on the host first, "
            "shape.split_ids(order.apply(ids)), and build the layer with id_order=None."
        )
    array = id_array(ids, name)
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and not x64_enabled():
        # This changes only ids out of range, and they stay so: without x64 the table has fewer than 2**31 - 1 rows.
        ids = narrow(array) if array.itemsize == 8 and array.size else ids
    array = jnp.asarray(as_ids(ids, name))
    last = rows.num_embeddings - 1
    if last > int(jnp.iinfo(array.dtype).max):
        if array.dtype == jnp.uint32:
            got = f"uint32 ids for an order of {rows.num_embeddings} ids"
            raise mismatch(name, got, "int64 ids, e.g. ids.astype(jnp.int64)", error=TypeError)
        array = array.astype(type_of_ids(rows.num_embeddings))

    def look_up(operands: tuple[StoredRows, jax.Array]) -> jax.Array:
        rows, ids = operands
        inside = jnp.clip(ids, 0, last)
        return jnp.where(inside == ids, rows.at(inside).astype(ids.dtype), ids)

    return over_explicit_axes(look_up, (rows, array), lambda: spec_of(array))


def columns_by_id(rows: StoredRows, scores: jax.Array) -> jax.Array:
    """Scores ``[..., N]`` of rows in the order of ids."""

    def pick(operands: tuple[StoredRows, jax.Array]) -> jax.Array:
        rows, scores = operands
        return scores.at[..., rows.whole()].get(mode="promise_in_bounds", unique_indices=True)

    return over_explicit_axes(pick, (rows, scores), lambda: spec_of(scores))
