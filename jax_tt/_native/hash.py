"""The calls of the operations of hash tables, one value each, and these operations on the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from jax_tt._directories.batch_clock import KEPT, LAST
from jax_tt._directories.hash_directory import (
    COUNTERS,
    SILENT,
    Check,
    Eviction,
    Insertion,
    KeyDirectory,
)
from jax_tt._directories.initial import InitialRows
from jax_tt._native.call import (
    ROWS,
    Named,
    flatten_tables,
    has_parts,
    native,
    native_call,
    numbered,
    once_each,
    owners_of,
    part_of,
    types_of,
    unflatten_tables,
)
from jax_tt._native.partition import Split, is_partitioned, num_blocks, over_blocks
from jax_tt._table.parts_of_arrays import Part, attached, detached


class Search(NamedTuple):
    """The search of keys in one table.

    Attributes:
        directory, keys, present: as in `jax_tt._directories.hash_reference.find`.
        guess: None, or int32 ``[n]``, the slot where each key was, which is taken if it still holds the key; -1 for a
            key that had none, which is not searched, and of which nothing is said.
        absent: static, the slot of keys that are not there.
        check: static, what is said of these keys.
    """

    directory: KeyDirectory
    keys: Any
    present: Any
    guess: Any = None
    absent: int = -1
    check: Check = SILENT


class Entry(NamedTuple):
    """An insertion into one table.

    Attributes:
        directory, keys, present, given, now, epoch: as in `jax_tt._directories.hash_reference.insert`.
        eviction: static.
        return_old: static, whether `Insertion` has what was there before; else these arrays are empty.
        check: static, what is said of keys that are refused.
    """

    directory: KeyDirectory
    keys: Any
    present: Any
    given: Any
    now: Any
    epoch: Any
    eviction: Eviction
    return_old: bool = True
    check: Check = SILENT


class Clock(NamedTuple):
    """The clock of one table and the arrays that hold numbers of batches.

    Attributes:
        clock, arrays, words, last: as in `jax_tt._directories.batch_clock.set_back`; the last two are static.
    """

    clock: Any
    arrays: Sequence[Any]
    words: tuple[int, ...]
    last: int = LAST


class Fresh(NamedTuple):
    """Initial rows of one table.

    Attributes:
        seed, keys: as in `jax_tt._directories.initial.initial_rows`.
        wanted: bool ``[n]``.
        distribution, features: static, as there.
        dtype: static; float32 rows are rounded to nearest even.
    """

    seed: Any
    keys: Any
    wanted: Any
    distribution: InitialRows
    features: int
    dtype: Any


class Reset(NamedTuple):
    """Initial rows in ``slots`` of ``rows[capacity, features]``; the other fields are as in `Fresh`."""

    rows: Any
    seed: Any
    keys: Any
    slots: Any
    distribution: InitialRows


class ExchangeCall(NamedTuple):
    """An exchange of entries in the arrays of one table, as `jax_tt._directories.hash_reference.exchange` makes it.

    ``new`` has the types of the arrays. ``return_old``, which is static, says whether the old entries are returned.
    """

    arrays: Sequence[Any]
    new: Sequence[Any]
    slots: Any
    return_old: bool


def _model_by_model(given: list[Any]) -> Callable[..., Callable[[list[Any]], Any]]:
    """Decorates what is called with ``given``: one model after another under ``vmap``.

    The function must close over no arrays, since programs keep it.
    """
    if not has_parts(given):
        return sequential_vmap

    def decorated(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        @sequential_vmap
        def run(given: Any, shared: Any) -> Any:
            return detached(call(attached(given, shared)))

        return lambda given: attached(*run(*detached(given)))

    return decorated


def _workspace(platform: str, op: str, n: int, directory: KeyDirectory) -> int | None:
    """Bytes of working memory for one table."""
    if platform == "cpu":
        return None
    return native(platform).hash_workspace_size(op, n, directory.sets, directory.ways)


def hash_find(searches: Sequence[Search], *, platform: str) -> list[jax.Array]:
    attributes = [_check_attributes(one.check, absent=np.int64(one.absent)) for one in searches]

    def operands(one: Search) -> tuple[Named, Named]:
        blocks = num_blocks(one.present.shape[0])
        guess = jnp.zeros((blocks, 0), jnp.int32) if one.guess is None else one.guess
        blocked = {
            "asked": one.keys.reshape(blocks, -1, 2),
            "present": one.present.reshape(blocks, -1),
            "guess": guess.reshape(blocks, -1),
        }
        return blocked, {"keys": one.directory.keys, "touched": one.directory.touched}

    def slots(args: Named) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(args["present"].shape, jnp.int32)

    of_each = _over_blocks(
        platform,
        "find",
        [operands(one) for one in searches],
        ("keys", "touched", "asked", "present", "guess"),
        [slots] * len(searches),
        attributes,
    )
    return [x.reshape(one.present.shape) for x, one in zip(of_each, searches, strict=True)]


def hash_insert(entries: Sequence[Entry], *, platform: str) -> list[tuple[KeyDirectory, Insertion]]:
    static = [entry[6:] for entry in entries]
    of_tables = [one[:6] for one in entries]

    # Every device inserts the whole batch: replicas of the directory must stay identical.
    @_model_by_model(of_tables)
    def call(given: list[Any]) -> Any:
        operands, results, attributes, workspace = [], [], [], []
        for of, rest in zip(given, static, strict=True):
            one = Entry._make((*of, *rest))
            n = one.keys.shape[0]
            done = _insertion_types(n, n if one.return_old else 0)
            of_batch = {"asked": one.keys, "present": one.present, "given": one.given}
            now = {"now": one.now, "epoch": one.epoch}
            operands.append({**of_batch, **now, **one.directory._asdict()})
            # The names of the directory's arrays say that these are changed in place.
            named = {f"new_{name}": kind for name, kind in done._asdict().items()}
            results.append(named | types_of(one.directory._asdict()))
            policy = one.eviction.policy
            min_age = np.int64(one.eviction.min_age)
            attributes.append(_check_attributes(one.check, policy=policy, min_age=min_age))
            workspace.append(_workspace(platform, "insert", n, one.directory))
        most = None if platform == "cpu" else max(workspace)
        changed = _of_tables(platform, "insert", operands, results, attributes, most)
        return [
            (
                KeyDirectory(*(one[name] for name in KeyDirectory._fields)),
                Insertion(*(one[f"new_{name}"] for name in Insertion._fields)),
            )
            for one in changed
        ]

    return call(of_tables)


def _insertion_types(n: int, old: int) -> Insertion:
    def words(n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n, 2), jnp.uint32)

    def whole(n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n,), jnp.int32)

    counts = whole(len(COUNTERS))
    return Insertion(whole(n), words(n), words(old), words(old), whole(old), counts, whole(n))


def hash_set_back(clocks: Sequence[Clock], *, platform: str) -> list[list[jax.Array]]:
    static = [one[2:] for one in clocks]
    of_tables = [one[:2] for one in clocks]

    @_model_by_model(of_tables)
    def call(given: list[Any]) -> Any:
        arrays = [numbered("array", arrays) for _, arrays in given]
        operands = [{"clock": clock, **one} for (clock, _), one in zip(given, arrays, strict=True)]
        attributes = [
            {"arrays": np.int64(len(words)), "last": np.int64(last), "kept": np.int64(KEPT)}
            | {f"word_{k}": np.int64(word) for k, word in enumerate(words)}
            for words, last in static
        ]
        results = [types_of(one) for one in arrays]
        changed = _of_tables(platform, "set_back", operands, results, attributes)
        return [list(one.values()) for one in changed]

    return call(of_tables)


def hash_initial(asked: Sequence[Fresh], *, platform: str) -> list[jax.Array]:
    def operands(one: Fresh) -> tuple[Named, Named]:
        blocks = num_blocks(one.wanted.shape[0])
        blocked = {
            "keys": one.keys.reshape(blocks, -1, 2),
            "wanted": one.wanted.reshape(blocks, -1),
        }
        return blocked, _initial_operands(one.seed, one.distribution)

    def rows_of(features: int, dtype: Any) -> Callable[[Named], jax.ShapeDtypeStruct]:
        return lambda args: jax.ShapeDtypeStruct((*args["wanted"].shape, features), dtype)

    rows = _over_blocks(
        platform,
        "initial",
        [operands(one) for one in asked],
        ("seed", "quantiles", "scale", "keys", "wanted"),
        [rows_of(one.features, one.dtype) for one in asked],
        [{"signed": one.distribution.signed} for one in asked],
    )
    return [x.reshape(-1, one.features) for x, one in zip(rows, asked, strict=True)]


def _over_blocks(
    platform: str,
    op: str,
    operands: Sequence[tuple[Named, Named]],
    order: Sequence[str],
    results: Sequence[Callable[[Named], jax.ShapeDtypeStruct]],
    attributes: Sequence[dict[str, Any]],
) -> list[jax.Array]:
    """An operation with one result per table, which is blocked, as every device looks at its keys.

    ``operands`` are blocked and whole arrays of each table, ``order`` lists their names, and ``results`` are
    functions of the operands of a table that return the type of its result.
    """
    # Tables whose batches are partitioned over the devices in another number of blocks need another call.
    parts: dict[int, list[int]] = {}
    for k, (blocked, _) in enumerate(operands):
        blocks = next(iter(blocked.values())).shape[0]
        parts.setdefault(blocks if is_partitioned(blocks) else 1, []).append(k)
    found: dict[int, jax.Array] = {}
    for members in parts.values():
        owners = owners_of([operands[k][1].values() for k in members])
        of_each = [attributes[k] | part_of(owners, operands[k][1].values(), ROWS) for k in members]

        def local(
            args: Named, split: Split, members: list[int] = members, of_each: Any = of_each
        ) -> Named:
            del split
            each = unflatten_tables(args, len(members))
            types = [{"result": results[k](one)} for k, one in zip(members, each, strict=True)]
            given = [{name: one[name] for name in order if name in one} for one in each]
            return flatten_tables(_of_tables(platform, op, given, types, of_each))

        blocked, whole = (flatten_tables(operands[k][side] for k in members) for side in (0, 1))
        whole = once_each(owners, whole)
        names = [f"{i}/result" for i in range(len(members))]
        result = over_blocks(local, blocked, whole, names, describe=_described)
        found.update((k, result[name]) for k, name in zip(members, names, strict=True))
    return [found[k] for k in range(len(operands))]


def _described(name: str) -> str:
    """What warnings call an operand of a table, such as its number and ``keys``."""
    return f"hash_{name.partition('/')[2]}"


def _of_tables(
    platform: str,
    op: str,
    operands: Sequence[Named],
    results: Sequence[Any],
    attributes: Sequence[dict[str, Any]],
    workspace: int | None = None,
) -> list[dict[str, jax.Array]]:
    """Results of an operation on many tables that has no arrays of all tables together.

    Of operands that are rows of stacks, the stack has the result of the same name.
    """
    owners = owners_of([one.values() for one in operands])
    given = once_each(owners, flatten_tables(operands))
    types = {}
    for k, (own, one) in enumerate(zip(results, operands, strict=True)):
        for name, kind in own.items():
            # One table has the rows of all.
            if not isinstance(rows := one.get(name), Part):
                types[f"{k}/{name}"] = kind
            elif owners[rows.key] == k:
                types[f"{k}/{name}"] = jax.ShapeDtypeStruct(rows.array.shape, rows.dtype)
    if owners:
        places = [part_of(owners, one.values(), ROWS) for one in operands]
        attributes = [own | place for own, place in zip(attributes, places, strict=True)]
    found = native_call(
        platform,
        f"hash_tables_{op}",
        given,
        types,
        workspace,
        {str(k): of_table for k, of_table in enumerate(attributes)},
    )
    each: list[dict[str, Any]] = []
    for k, (own, one) in enumerate(zip(results, operands, strict=True)):
        rows = {name: x for name in own if isinstance(x := one.get(name), Part)}
        each.append(
            {
                name: rows[name].of(found[f"{owners[rows[name].key]}/{name}"])
                if name in rows
                else found[f"{k}/{name}"]
                for name in own
            }
        )
    return each


def _check_attributes(check: Check, **others: Any) -> dict[str, Any]:
    return {"safe_check": check.mode, "message": check.message, **others}


def _initial_operands(seed: jax.Array, values: InitialRows) -> dict[str, jax.Array]:
    quantiles, factor = jnp.asarray(values.quantiles), jnp.asarray(values.factor)
    return {"seed": seed, "quantiles": quantiles, "scale": factor}


def hash_reset(resets: Sequence[Reset]) -> list[jax.Array]:
    """On the CPU alone."""
    distributions = [one.distribution for one in resets]
    of_tables = [one[:4] for one in resets]

    @_model_by_model(of_tables)
    def call(given: list[Any]) -> Any:
        operands = []
        for (rows, seed, keys, slots), distribution in zip(given, distributions, strict=True):
            of_batch = {"keys": keys, "slots": slots, "rows": rows}
            operands.append(_initial_operands(seed, distribution) | of_batch)
        results = [types_of({"rows": one["rows"]}) for one in operands]
        attributes = [{"signed": one.signed} for one in distributions]
        changed = _of_tables("cpu", "reset", operands, results, attributes)
        return [one["rows"] for one in changed]

    return call(of_tables)


def hash_exchange(
    exchanges: Sequence[ExchangeCall], *, platform: str
) -> list[tuple[list[jax.Array], list[jax.Array]]]:
    with_arrays = [k for k, one in enumerate(exchanges) if one.arrays]
    returns_old = [exchanges[k].return_old for k in with_arrays]
    of_tables = [exchanges[k][:3] for k in with_arrays]

    @_model_by_model(of_tables)
    def call(given: list[Any]) -> Any:
        operands, results, attributes = [], [], []
        for (arrays, new, slots), return_old in zip(given, returns_old, strict=True):
            named = numbered("array", arrays)
            of_batch = [jax.ShapeDtypeStruct((slots.size, *x.shape[1:]), x.dtype) for x in arrays]
            operands.append({"slots": slots, **named, **numbered("new", new)})
            old = {f"old_{k}": kind for k, kind in enumerate(of_batch) if return_old}
            results.append({**types_of(named), **old})
            attributes.append({"arrays": np.int64(len(arrays)), "return_old": return_old})
        changed = _of_tables(platform, "exchange", operands, results, attributes)
        return [
            (
                [x for name, x in one.items() if name.startswith("array")],
                [x for name, x in one.items() if name.startswith("old")],
            )
            for one in changed
        ]

    found: list[Any] = [([], [])] * len(exchanges)
    if with_arrays:
        for k, one in zip(with_arrays, call(of_tables), strict=True):
            found[k] = one
    return found


def hash_double(
    directory: KeyDirectory, arrays: Sequence[jax.Array], *, platform: str
) -> tuple[KeyDirectory, list[jax.Array]]:
    @sequential_vmap
    def call(directory: KeyDirectory, arrays: list[jax.Array]) -> Any:
        before = {**directory._asdict(), **numbered("array", arrays)}
        after = {
            f"new_{name}": jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)
            for name, x in before.items()
        }
        workspace = _workspace(platform, "double", 0, directory)
        results = list(native_call(platform, "hash_double", before, after, workspace, {}).values())
        return KeyDirectory(*results[:3]), results[3:]

    return call(directory, list(arrays))
