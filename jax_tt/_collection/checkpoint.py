"""Checkpoints of sharded collections: the arrays of the tables, with rows in their order, sharded over the devices.

Orbax lets every process write and read its shards.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_tt._collection.collection import Collection, States
from jax_tt._collection.states import check_states
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._table.checkpoint import pieces

# In a checkpoint: rows, as two words, and columns of a table; of a hash table also its devices, ways and waiting sets,
# which determine the slots of keys. Orbax cuts arrays of another size without a word.
_SIZES = "sizes"
_SCALARS = ("step", "sentinel")


def save_args(collection: Collection, state: States) -> dict[str, dict[str, Any]]:
    """Returns the arrays to save: logical ones, which do not depend on the placement, sharded over the devices.

    Rows and their optimizer state are in the order of the rows, sharded evenly over the devices of each table, with
    zeros after the last row if need be. They are never gathered. Keys of a hash table stay in their slots, and are
    restored on the same number of devices.

    Args:
        collection: the tables.
        state: their arrays, as `Collection.init` returns them.

    Returns:
        Arrays by table and name, e.g. for ``orbax.checkpoint.args.StandardSave``.

    Raises:
        TypeError, ValueError: ``state`` lacks a table or an array.

    >>> import jax, jax_tt
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> tables = jax_tt.shard_tables({"ad": jax_tt.dense_table(50, 8)}, mesh, "model")
    >>> collection = jax_tt.Collection(tables, {"ad": jax_tt.Feature("ad")})
    >>> saved = jax_tt.checkpoint.save_args(collection, collection.init(jax.random.key(0)))
    >>> sorted(saved["ad"])
    ['embedding', 'sizes']
    """
    saved = collection.separated(state, in_pieces=True)
    everywhere = _everywhere(collection)
    for name, arrays in saved.items():
        sizes = _sizes(collection, name)
        arrays[_SIZES] = jax.make_array_from_callback(sizes.shape, everywhere, sizes.__getitem__)
        arrays.pop("used", None)
    return saved


def target(collection: Collection) -> dict[str, dict[str, Any]]:
    """Describes what to restore: the shapes, types and shardings of `save_args` of this collection.

    A checkpoint that other devices have written has other numbers of zeros after the rows, so that orbax has to be told
    to fit arrays to these shapes: ``StandardRestore(target, strict=False)``. `restore` checks that it has not
    cut off anything else.

    Args:
        collection: the tables, with the placement and mesh that they are to have.

    Returns:
        `jax.ShapeDtypeStruct` by table and name.

    >>> import jax_tt
    >>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
    >>> jax_tt.checkpoint.target(collection)["ad"]["embedding"].shape
    (50, 8)
    """
    everywhere = _everywhere(collection)
    targets: dict[str, dict[str, Any]] = {}
    for name, table in collection.tables.items():
        arrays = {array: _with_sharding(like, everywhere) for array, like in pieces(table).items()}
        if name in collection.sharing:
            scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
            arrays |= dict.fromkeys(_SCALARS, scalar)
        arrays.pop("used", None)
        sizes = _sizes(collection, name)
        arrays[_SIZES] = jax.ShapeDtypeStruct(sizes.shape, sizes.dtype, sharding=everywhere)
        targets[name] = arrays
    return targets


def restore(collection: Collection, arrays: States) -> dict[str, dict[str, Any]]:
    """Makes the state of a collection of the arrays of a checkpoint, whatever placement and mesh wrote it.

    Args:
        collection: the tables, with the placement and mesh that they are to have.
        arrays: restored with `target`.

    Returns:
        The arrays as `Collection.init` returns them. Rows move to the devices of their pages a block at a time.

    Raises:
        TypeError, ValueError: ``arrays`` lack a table or an array, or a table has another size in the checkpoint.

    >>> import jax, jax_tt
    >>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
    >>> state = collection.init(jax.random.key(0))
    >>> restored = jax_tt.checkpoint.restore(collection, jax_tt.checkpoint.save_args(collection, state))
    >>> bool((restored["ad"]["embedding"] == state["ad"]["embedding"]).all())
    True
    """
    check_states("arrays", arrays, collection.tables)
    states: dict[str, dict[str, Any]] = {}
    for name, wanted in target(collection).items():
        _check_arrays(name, arrays[name], wanted)
        _check_sizes(name, arrays[name][_SIZES], _sizes(collection, name))
        states[name] = {array: arrays[name][array] for array in wanted if array != _SIZES}
    return _joined(collection, states)


# Several processes can only make arrays of all of them in a program.
@functools.partial(jax.jit, static_argnums=0)
def _joined(collection: Collection, arrays: States) -> dict[str, dict[str, Any]]:
    return collection.joined(arrays, in_pieces=True)


def _check_arrays(name: str, arrays: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for array, like in wanted.items():
        if array not in arrays:
            raise ValueError(
                f"arrays[{name!r}]: has no {array!r}; expected what checkpoint.save_args returns for this table, with "
                "its optimizer."
            )
        got = getattr(arrays[array], "shape", None)
        if got != like.shape:
            raise ValueError(
                f"arrays[{name!r}][{array!r}]: got shape {got}; expected {like.shape}, as checkpoint.target describes "
                "it: restore the checkpoint with that target and strict=False."
            )


def _check_sizes(name: str, got: Any, expected: np.ndarray[Any, Any]) -> None:
    got = np.asarray(got)
    if np.array_equal(got[:3], expected[:3]) and not np.array_equal(got, expected):
        raise ValueError(
            f"arrays[{name!r}]: the checkpoint holds the hash table of {_divided(got)}; expected {_divided(expected)}, "
            "since these say in which slots keys are. Restore it with a description as it was saved, and give "
            "Collection.separated(state) to Collection.joined of the new one; or use files.dump and load_dump."
        )
    if not np.array_equal(got, expected):
        (rows, columns), (own_rows, own_columns) = _read(got), _read(expected)
        raise ValueError(
            f"arrays[{name!r}]: the checkpoint holds a table of {rows:,} x {columns:,}; expected {own_rows:,} x "
            f"{own_columns:,}. Describe the table with the sizes of the checkpoint; it can be grown after that."
        )


def _sizes(collection: Collection, name: str) -> np.ndarray[Any, Any]:
    table = collection.tables[name]
    rows = table.num_embeddings
    sizes = [rows >> 32, rows & 0xFFFFFFFF, table.features]
    if table.ids.takes_keys:
        whole = unsharded_hash_table(table)
        devices = table.layout.devices if isinstance(table, ShardedTable) else 1
        sizes += [devices, whole.ways, whole.waiting_sets]
    return np.array(sizes, np.uint32)


def _divided(sizes: np.ndarray[Any, Any]) -> str:
    devices, ways, waiting = (int(number) for number in sizes[3:])
    return f"{devices} devices with ways={ways} and {waiting * ways} slots for admission"


def _read(sizes: np.ndarray[Any, Any]) -> tuple[int, int]:
    high, low, columns = (int(word) for word in sizes[:3])
    return (high << 32) | low, columns


def _everywhere(collection: Collection) -> Sharding:
    """The sharding of arrays that every device has."""
    for table in collection.tables.values():
        if isinstance(table, ShardedTable):
            return NamedSharding(table.mesh, P())
    return SingleDeviceSharding(jax.devices()[0])


def _with_sharding(like: Any, everywhere: Sharding) -> jax.ShapeDtypeStruct:
    if like.sharding is not None:
        return like
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=everywhere)
