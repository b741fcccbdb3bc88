"""Checkpoints of training states: rows of tables in their order, whatever holds them, sharded over the devices.

Orbax lets every process write and read its shards.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_tt._collection.by_table import cut_arrays, cut_shapes, whole
from jax_tt._collection.paths import Path, by_path, named, nested
from jax_tt._collection.training_state import Groups, divided
from jax_tt._directories.hash_directory import CLOCK, KEYS, WAITING
from jax_tt._directories.relocate import Move, by_device, move_of
from jax_tt._jax.on_host import like_on_device, on_all, on_host
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._kinds.sharded.sharding import PAGES
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._table.checkpoint import in_pieces, of_pieces, pieces
from jax_tt._table.table import Table

# In a checkpoint: rows, as two words, and columns of a table; of a hash table also its devices, ways and waiting sets,
# which determine the slots of keys. Orbax cuts arrays of another size without a word.
_SIZES = "sizes"


def save_args(model: Any, state: Any) -> dict[str, Any]:
    """Returns the arrays to save: logical ones, which do not depend on the placement, sharded over the devices.

    Rows, their optimizer state, and everything else that follows the rows of a table, such as moments of optax and
    averages, are in the order of the rows, sharded evenly over the devices of each table, with zeros after the last row
    if need be. They are never gathered. Keys of a hash table stay in their slots. Other arrays are saved as they are.

    What tables in stacks share is saved by table, under the paths that it has with ``stack=False``: either model reads
    what the other has written.

    What follows the rows of a table is known by its path, which ends as that of an array of the table: an optax state
    has trees like that of the parameters.

    Args:
        model: what describes the tables: a `Collection`, an NNX module, or a `jax_tt.linen.EmbedCollection`.
        state: the whole training state, a tree in which all arrays of the tables occur under their names: what
            `Collection.init` returns, beside optax state or alone; ``nnx.state((model, opt))``; or linen's variables
            with optax state.

    Returns:
        Arrays in nested dicts by name, e.g. for ``orbax.checkpoint.args.StandardSave``.

    Raises:
        TypeError, ValueError: ``state`` lacks an array of a table, or has an array of as many rows as a sharded table
            stores which cannot be placed, or one under the name of an array of a stack which has no rows of the tables;
            the message has its path.

    >>> import jax, jax_tt, optax
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> tables = jax_tt.shard_tables({"ad": jax_tt.dense_table(50, 8)}, mesh, "model")
    >>> collection = jax_tt.Collection(tables, {"ad": jax_tt.Feature("ad")})
    >>> arrays = collection.init(jax.random.key(0))
    >>> state = {"tables": arrays, "opt": optax.adam(0.1).init(collection.trained(arrays))}
    >>> saved = jax_tt.checkpoint.save_args(collection, state)
    >>> sorted(saved["tables"]["ad"]), sorted(saved["opt"]["0"]["mu"]["ad"])
    (['embedding', 'sizes'], ['embedding', 'sizes'])
    """
    groups, others, _ = divided(model, state, cut_arrays)
    everywhere = _everywhere(groups)
    saved = {path: _of_all(leaf, everywhere) for path, leaf in others.items()}
    for place, (table, arrays) in groups.items():
        _check_pages(table, place, arrays)
        kept = in_pieces(table, arrays)
        if kept:
            kept[_SIZES] = on_all(_sizes(table), everywhere)
        saved |= {(*place, name): array for name, array in kept.items()}
    return nested(saved)


def target(model: Any, state: Any) -> dict[str, Any]:
    """Describes what to restore: the shapes, types and shardings of `save_args` of this model and state.

    A checkpoint that other devices have written has other numbers of zeros after the rows, so that orbax has to be told
    to fit arrays to these shapes: ``StandardRestore(target, strict=False)``. `restore` checks that it has not
    cut off anything else. Orbax rounds numbers to the types of the target, e.g. float32 rows to those of a bfloat16
    table.

    Args:
        model: as in `save_args`, with the placement and mesh that the tables are to have.
        state: a training state of this model, e.g. the initial one; its values are not read, so that
            `jax.ShapeDtypeStruct` will do. Arrays without a sharding of their own are to be on all devices of the mesh.

    Returns:
        `jax.ShapeDtypeStruct` in nested dicts by name.

    Raises:
        TypeError, ValueError: as `save_args`.

    >>> import jax, jax_tt
    >>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
    >>> state = jax.eval_shape(collection.init, jax.random.key(0))
    >>> jax_tt.checkpoint.target(collection, state)["ad"]["embedding"].shape
    (50, 8)
    """
    groups, others, _ = divided(model, state, cut_shapes)
    return nested(_targets(groups, others))


def restore(model: Any, state: Any, arrays: Mapping[str, Any]) -> Any:
    """Makes a training state of the arrays of a checkpoint, whatever placement and mesh wrote it.

    Args:
        model, state: as in `target`.
        arrays: restored with `target`.

    Returns:
        A tree like ``state``. Rows move to the devices of their pages a block at a time. Those of a hash table that
        another number of devices has written pass through the host, as in `HashTable.of_rows`: keys that find no room
        are evicted, with a warning. ``nnx.update`` writes a state of NNX to its model and optimizer.

    Raises:
        TypeError, ValueError: as `save_args`; or ``arrays`` lack an array or have another one, or a table has another
            size in the checkpoint, or a hash table with the policy ``"none"`` has no room for all keys.

    >>> import jax, jax_tt
    >>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
    >>> state = collection.init(jax.random.key(0))
    >>> arrays = jax_tt.checkpoint.save_args(collection, state)
    >>> restored = jax_tt.checkpoint.restore(collection, state, arrays)
    >>> bool((restored["ad"]["embedding"] == state["ad"]["embedding"]).all())
    True
    """
    groups, others, places = divided(model, state, cut_shapes)
    found = by_path(arrays)
    _check_arrays(found, _targets(groups, others))
    # A step can donate buffers of JAX alone, which arrays that were read need not be.
    restored = {path: jnp.copy(found[path]) for path in others}
    for place, (table, _) in groups.items():
        if (*place, _SIZES) in found:
            _check_sizes(table, place, found[*place, _SIZES])
    moves = _moves(groups, found)
    for place, (table, own) in groups.items():
        given = {name: found[*place, name] for name in own if (*place, name) in found}
        if (move := _move_at(place, groups, moves)) is not None:
            given = _moved(table, move, given)
        after = _of_pieces(table, given)
        restored |= {(*place, name): after[name] for name in own}
    leaves = whole(restored, places)
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))


# Several processes can only make arrays of all of them in a program.
@functools.partial(jax.jit, static_argnums=0)
def _of_pieces(table: Table, arrays: Mapping[str, Any]) -> dict[str, Any]:
    after = of_pieces(table, arrays)
    return {name: jnp.copy(x) if x is arrays.get(name) else x for name, x in after.items()}


def _moves(groups: Groups, found: Mapping[Path, Any]) -> dict[Path, Move]:
    """How the keys of hash tables move that another number of devices has saved, by the place of their arrays."""
    moves = {}
    for place, (table, own) in groups.items():
        if KEYS[0] not in own:
            continue
        devices, ours = (int(sizes[3]) for sizes in (on_host(found[*place, _SIZES]), _sizes(table)))
        if devices != ours:
            keys = {name: on_host(found[*place, name]) for name in (*KEYS, *WAITING) if name in own}
            state = {**by_device(keys, devices), CLOCK: on_host(found[*place, CLOCK])}
            moves[place] = move_of(unsharded_hash_table(table), state, ours)
    return moves


def _move_at(place: Path, groups: Groups, moves: Mapping[Path, Move]) -> Move | None:
    """The move of the keys whose rows are at a place: of the same table, at the place whose end is the most alike."""

    def alike(other: Path) -> int:
        pairs = zip(reversed(place), reversed(other), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    of_table = [other for other in moves if groups[other][0] is groups[place][0]]
    return moves[max(of_table, key=alike)] if of_table else None


def _moved(table: Table, move: Move, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a hash table, or what follows its rows, after a move."""
    rows = unsharded_hash_table(table).table.spec.row_arrays
    after = {name: move.rows(on_host(given[name])) for name in rows if name in given}
    after |= {name: array for name, array in move.arrays.items() if name in given}
    return {**given, **{name: like_on_device(given[name], x) for name, x in after.items()}}


# Shapes and checks


def _targets(groups: Groups, others: Mapping[Path, Any]) -> dict[Path, jax.ShapeDtypeStruct]:
    everywhere = _everywhere(groups)
    targets = {
        path: _like(leaf, np.shape(leaf), _sharding_of(leaf, everywhere))
        for path, leaf in others.items()
    }
    for place, (table, arrays) in groups.items():
        whole = pieces(table)
        kept = {name: leaf for name, leaf in arrays.items() if name in whole}
        for name, leaf in kept.items():
            shape, own = np.shape(leaf), whole[name]
            # An entry for every row, of an array that has more.
            by_row = shape != table.spec.shapes.get(name, shape)
            sharding = own.sharding or _sharding_of(leaf, everywhere)
            targets[*place, name] = _like(leaf, own.shape[:1] if by_row else own.shape, sharding)
        if kept:
            sizes = _sizes(table)
            targets[*place, _SIZES] = _like(sizes, sizes.shape, everywhere)
    return targets


def _like(leaf: Any, shape: tuple[int, ...], sharding: Sharding) -> jax.ShapeDtypeStruct:
    dtype = getattr(leaf, "dtype", None)
    dtype = jnp.result_type(leaf) if dtype is None else dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _sharding_of(leaf: Any, everywhere: Sharding) -> Sharding:
    own = getattr(leaf, "sharding", None)
    if own is None or isinstance(getattr(own, "mesh", None), AbstractMesh):
        return everywhere
    return everywhere if isinstance(leaf, jax.Array) and not leaf.committed else own


def _everywhere(groups: Groups) -> Sharding:
    """The sharding of arrays that every device has."""
    for table, _ in groups.values():
        if isinstance(table, ShardedTable):
            return NamedSharding(table.mesh, P())
    return SingleDeviceSharding(jax.devices()[0])


def _of_all(leaf: Any, everywhere: Sharding) -> Any:
    """The array; one of this process alone, as the others have it too, on the devices of all of them."""
    if everywhere.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = on_all(np.asarray(jax.random.key_data(leaf)), everywhere)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return on_all(np.asarray(leaf), everywhere)


def _check_pages(table: Table, place: Path, arrays: Mapping[str, Any]) -> None:
    pages = arrays.get(PAGES)
    if not isinstance(table, ShardedTable) or pages is None or isinstance(pages, Tracer):
        return
    if not np.array_equal(on_host(pages), table.layout.page_table):
        raise ValueError(
            f"{named('state', (*place, PAGES))}: has the pages of another placement than the table {table.name!r}; "
            f"expected those of {table.placement}."
        )


def _check_arrays(found: Mapping[Path, Any], wanted: Mapping[Path, Any]) -> None:
    for path, like in wanted.items():
        if path not in found:
            raise ValueError(
                f"{named('arrays', path[:-1])}: has no {path[-1]!r}; expected what checkpoint.save_args returns for "
                "this model and state, with its optimizer."
            )
        got = np.shape(found[path])
        if got != like.shape:
            raise ValueError(
                f"{named('arrays', path)}: got shape {got}; expected {like.shape}, as checkpoint.target describes it: "
                "restore the checkpoint with that target and strict=False."
            )
    for path in found.keys() - wanted.keys():
        raise ValueError(
            f"{named('arrays', path)}: got an array that state does not have; expected those of checkpoint.target."
        )


def _check_sizes(table: Table, place: Path, got: Any) -> None:
    got, expected, label = on_host(got), _sizes(table), named("arrays", place)
    same = got == expected
    if not same[:3].all():
        (rows, columns), (own_rows, own_columns) = _read(got), _read(expected)
        raise ValueError(
            f"{label}: the checkpoint holds a table of {rows:,} x {columns:,}; expected {own_rows:,} x "
            f"{own_columns:,}. Describe the table with the sizes of the checkpoint; it can be grown after that."
        )
    if not same[4:].all():
        raise ValueError(
            f"{label}: the checkpoint holds a hash table with {_divisions(got)}; expected {_divisions(expected)}, "
            "since these say in which slots keys are. Restore it with a description as it was saved, and give "
            "Collection.separated(state) to Collection.joined of the new one; or use files.dump and load_dump."
        )


def _sizes(table: Table) -> np.ndarray[Any, Any]:
    rows = table.num_embeddings
    sizes = [rows >> 32, rows & 0xFFFFFFFF, table.features]
    if table.ids.takes_keys:
        whole = unsharded_hash_table(table)
        devices = table.layout.devices if isinstance(table, ShardedTable) else 1
        sizes += [devices, whole.ways, whole.waiting_sets]
    return np.array(sizes, np.uint32)


def _divisions(sizes: np.ndarray[Any, Any]) -> str:
    ways, waiting = (int(number) for number in sizes[4:])
    return f"ways={ways} and {waiting * ways} slots for admission"


def _read(sizes: np.ndarray[Any, Any]) -> tuple[int, int]:
    high, low, columns = (int(word) for word in sizes[:3])
    return (high << 32) | low, columns
