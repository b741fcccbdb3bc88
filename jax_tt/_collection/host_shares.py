"""One batch of what several processes have: the same in each of them, or a share of it in each."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import expect, mismatch
from jax_tt._collection.host_forms import GivenIds
from jax_tt._formats.team import Team, stopped
from jax_tt._ids.split_ids import SplitIds

# Every so many calls, from the first one on, processes that give whole batches compare them.
COMPARED_EVERY = 100
_calls: collections.Counter[Hashable] = collections.Counter()


def of_processes(
    read: Callable[[], dict[str, GivenIds]],
    assemble: Callable[[Mapping[str, GivenIds]], Any],
    labels: Sequence[str],
    about: Any,
    sharding: Any,
    local: bool,
) -> Any:
    """``assemble(read())``, of the shares of all processes if ``local``.

    Processes that wait for each other make the same calls in the same order. An error in one is an error in all.

    Args:
        read: the ids of this process by feature, in the types that their tables take; or it raises an error.
        assemble: makes the batch of them; with equal ids, it does the same in all processes.
        labels: of the features, in order, for errors.
        about: what else is the same in all processes, of which only the ``repr`` is compared.
        sharding: where the batch goes.
        local: as in `host_batch`.
    """
    team = _team(sharding, local)
    if team.alone:
        return assemble(read())
    if local:
        return assemble(_joined(team, _in_order(sharding), read, labels, about))
    call = sharding.mesh, tuple(labels)
    _calls[call] += 1
    # Another thread must not start programs of several processes, whose order has to be the same in all.
    here = threading.current_thread() is threading.main_thread()
    if not here or _calls[call] % COMPARED_EVERY != 1:
        return assemble(read())

    def made() -> tuple[Any, list[int]]:
        batch = assemble(read())
        leaves, structure = jax.tree.flatten(batch)
        return batch, [_digest(structure, *map(_form, leaves), *leaves)]

    batch, digests = _told(team, 1, made)
    if (other := (digests != digests[0]).any(axis=1)).any():
        raise ValueError(
            f"host_batch: {team.named(other)} was given another batch than {team.named(~other)}, and each would take "
            "its own for the whole one. Where every process has a share of the batch, e.g. from a loader that is "
            "sharded by process, pass local=True; else give all of them the same."
        )
    return batch


def lengths_of(given: GivenIds) -> np.ndarray:
    """The numbers of ids of ragged bags, int32 ``[B]``."""
    assert given.offsets is not None
    return np.diff(given.offsets)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """The offsets int32 ``[B + 1]`` of bags of these numbers of ids."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def rows_over(sharding: NamedSharding) -> tuple[NamedSharding, int]:
    """The sharding of the first axis of arrays alone, and the number of parts that it makes of it."""
    spec = P(*sharding.spec[:1])
    axes = spec[0] if spec else ()
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return NamedSharding(sharding.mesh, spec), int(np.prod([sharding.mesh.shape[k] for k in names]))


def _team(sharding: Any, local: bool) -> Team:
    """The processes that have parts of the batch."""
    if isinstance(sharding, NamedSharding):
        return Team() if sharding.is_fully_addressable else _team_of(sharding.mesh)
    if local and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(
            f"sharding: got {sharding!r} with local=True; expected where the batch of all processes goes, e.g. "
            'NamedSharding(mesh, P("data")) over devices of all processes, or tables that are sharded over them.'
        )
    return Team()


@functools.lru_cache(maxsize=16)
def _team_of(mesh: Mesh) -> Team:
    return Team(mesh.devices.flat)


def _in_order(sharding: NamedSharding) -> list[int]:
    """The numbers of the processes in the order in which they have the rows of a batch."""
    rows, parts = rows_over(sharding)
    places: dict[int, set[int]] = {}
    for device, index in rows.devices_indices_map((parts,)).items():
        places.setdefault(device.process_index, set()).add(index[0].start or 0)
    numbers = {process: k for k, process in enumerate(sorted(places))}
    order = sorted(places, key=lambda process: min(places[process]))
    if [part for process in order for part in sorted(places[process])] != list(range(parts)):
        raise ValueError(
            f"sharding: got {rows.spec} over a mesh of {dict(rows.mesh.shape)} with local=True; expected a first axis "
            "that is sharded such that every process has neighbouring rows of its own, e.g. over all axes of "
            "jax.make_mesh. Give processes with the same rows the whole batch, without local=True."
        )
    return [numbers[process] for process in order]


def _joined(
    team: Team,
    order: Sequence[int],
    read: Callable[[], dict[str, GivenIds]],
    labels: Sequence[str],
    about: Any,
) -> dict[str, GivenIds]:
    """The ids of all processes, those of one after those of the other."""

    def told() -> tuple[dict[str, GivenIds], list[int]]:
        given = read()
        reports = map(_report, labels, given.values())
        return given, [_digest(about), *itertools.chain.from_iterable(reports)]

    given, words = _told(team, 1 + 4 * len(labels), told)
    reports = words[:, 1:].reshape(team.count, len(labels), 4).astype(np.int64)
    if (other := words[:, 0] != words[team.number, 0]).any():
        what = "another capacity, or KeyedBags with features in another order"
        raise mismatch("host_batch", f"{what}, in {team.named(other)}", "the same in all processes")
    for label, one, form in zip(labels, given.values(), reports[..., 0].T, strict=True):
        if (other := form != form[team.number]).any():
            raise ValueError(
                f"{label}ids: got a share of another form in {team.named(other)} than in this process, which has "
                f"{_words(one)}; expected arrays of one type and of one shape but for the first axis, or ragged bags, "
                "in all. A process without samples gives, e.g., np.zeros((0, 5), int), or {'ids': [], 'lengths': []}."
            )
    arrays = [array for one in given.values() for array in _arrays(one)]
    rows = reports[:, :, [1, 2, 1]].reshape(team.count, -1)  # of ids, lengths and weights
    sizes = rows * [0 if array is None else _row_bytes(array) for array in arrays]
    ends = sizes.cumsum(axis=1)
    # A power of two, so that few programs are compiled.
    mine = np.zeros(1 << max(int(ends[:, -1].max()) - 1, 3).bit_length(), np.uint8)
    for array, end, size in zip(arrays, ends[team.number], sizes[team.number], strict=True):
        if array is not None:
            mine[end - size : end] = _as_bytes(array)
    every = np.ascontiguousarray(team.of_each(mine.view(np.uint32))).view(np.uint8)

    def whole(k: int) -> Any:
        array = arrays[k]
        if array is None:
            return None
        parts = [every[p, ends[p, k] - sizes[p, k] : ends[p, k]] for p in order]
        shape = int(rows[:, k].sum()), *array.shape[1:]
        return np.concatenate(parts).view(array.dtype).reshape(shape)

    found = {}
    for k, (name, one) in enumerate(given.items()):
        ids, lengths, weights = (whole(3 * k + which) for which in range(3))
        capacities = reports[:, k, 3]
        found[name] = GivenIds(
            SplitIds(ids) if isinstance(one.ids, SplitIds) else ids,
            None if lengths is None else offsets_of(lengths),
            weights,
            one.padding,  # only whether there may be any is still asked
            int(capacities.sum()) if capacities.all() else None,
        )
    return found


def _told(
    team: Team, size: int, make: Callable[[], tuple[Any, Sequence[int]]]
) -> tuple[Any, np.ndarray]:
    """What ``make`` returns for this process, and the words uint32 ``[processes, size]`` that it has for each."""
    words, made, error = np.zeros(1 + size, np.uint32), None, None
    try:
        made, words[1:] = make()
    except BaseException as raised:  # others must not wait
        words[0], error = 1, raised
    every = team.of_each(words)
    if error is not None:
        raise error
    if (failed := every[:, 0] > 0).any():
        raise RuntimeError(stopped("host_batch", team.named(failed)))
    return made, every[:, 1:]


def _arrays(given: GivenIds) -> list[Any]:
    """The arrays of a share that have a row for each id or bag: ids, lengths and weights, or None."""
    ids = given.ids.digits if isinstance(given.ids, SplitIds) else given.ids
    return [ids, None if given.offsets is None else lengths_of(given), given.weights]


def _report(label: str, given: GivenIds) -> list[int]:
    """The digest of the form of a share, and the numbers of its rows, bags and positions."""
    ids, lengths, _ = _arrays(given)
    expect(ids.ndim, f"{label}ids", "a single id with local=True", "an axis of samples")
    bags = 0 if lengths is None else len(lengths)
    return [_digest(_words(given)), len(ids), bags, given.capacity or 0]


def _words(given: GivenIds) -> str:
    ids, lengths, weights = _arrays(given)
    kind = "an array" if lengths is None else "ragged bags"
    more = "" if weights is None else f" with weights {weights.dtype}"
    more += "" if given.padding is None else " with padding"
    return f"{kind} of {ids.dtype}[{', '.join(['*', *map(str, ids.shape[1:])])}]{more}"


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _row_bytes(array: np.ndarray) -> int:
    return array.dtype.itemsize * int(np.prod(array.shape[1:]))


def _form(array: Any) -> str:
    return f"{array.dtype}{array.shape}"


def _digest(*parts: Any) -> int:
    value = 0
    for part in parts:
        data: Any = _as_bytes(part) if isinstance(part, np.ndarray) else repr(part).encode()
        value = zlib.crc32(data, value)
    return value
