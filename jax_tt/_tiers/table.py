"""`Tier`, and the rows of one table in all its tiers."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tt._base import ffi
from jax_tt._base.arguments import as_int, as_positive, expect, mismatch, one_of, type_of
from jax_tt._directories.admission import Admission, as_admission
from jax_tt._directories.hash_directory import MAX_WAYS
from jax_tt._directories.initial import InitialRows, Normal, initial_rows
from jax_tt._directories.placing import words_of_keys
from jax_tt._kinds.sharded.sharding import PAGES
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.table import Table
from jax_tt._table.wrapper import is_sharded
from jax_tt._tiers.device_rows import DeviceRows, RowsOfProcesses
from jax_tt._tiers.disk import DiskStore, StoreError
from jax_tt._tiers.host import HostStore, full
from jax_tt._tiers.key_index import KeyIndex
from jax_tt._tiers.lives import Lives
from jax_tt._tiers.places import DevicePlaces, Exchanged, padded, rounded_up
from jax_tt._tiers.processes import Processes
from jax_tt._tiers.row_bytes import RecordLayout
from jax_tt.optimizers import ChangesAll

POLICIES = ("lru", "lfu")
# Rows that are read from the device at once, and the smallest number of keys and rows in a call.
_CHUNK, _FEWEST = 1 << 16, 64


class TierStatistics(NamedTuple):
    """Totals of a table with tiers, of the batches that have been loaded and of all processes that have its devices.

    Attributes:
        requests: ids looked up.
        device_hits: ids whose row was on the device. All following counts are of distinct rows.
        loaded: distinct rows that came to the device; the next three are its parts.
        host_hits, disk_hits: rows that came from host memory, and from disk.
        created: rows that were new.
        evicted: rows that left the device for host memory.
        to_disk: rows written to disk, for batches that were dropped too; with several processes, as of the last batch
            or save.
        record_bytes: of a row with its optimizer state, to count bytes moved.

    >>> import jax_tt
    >>> counts = jax_tt.pipeline.TierStatistics(10, 6, 4, 1, 1, 2, 0, 0, 260)
    >>> counts.loaded * counts.record_bytes
    1040
    """

    requests: int
    device_hits: int
    loaded: int
    host_hits: int
    disk_hits: int
    created: int
    evicted: int
    to_disk: int
    record_bytes: int


@dataclasses.dataclass(frozen=True)
class Tier:
    """How a table continues in host memory.

    Attributes:
        host_rows: rows in host memory, of each process if there are several. Memory is taken only when rows come. None
            for as many as there were at the last save of the directory.
        num_embeddings: ids are 0 to this number - 1; None for any 64-bit integers, or for as many as at the last save.
            A directory that was saved takes a larger number, and refuses a smaller one.
        policy: the rows that leave the device are the least recently (``"lru"``) or the least frequently used ones
            (``"lfu"``).
        ways: rows in a set, at most 64; a row can be in two sets.
        seed: of initial rows, an integer of 64 bits.
        initializer: of initial rows; default ``Normal(1 / sqrt(features))``.
        admission: which new ids get a row: None for all, `dynamic.AdmitAfter` (or its number of requests), or
            `dynamic.AdmitWithProbability`. Others read their initial row and train nothing. Unless `AdmitAfter` says
            how many ids may wait, as many may as there are ``host_rows`` in all processes.
        ages: keep the last batch, the epoch and the requests of every row on the host, for `Tiers.remove`. With an
            ``admission`` they are kept in any case. It takes 24 bytes for every row and those of an index, 32 to 64.

    >>> import jax_tt
    >>> jax_tt.Tier(host_rows=1_000_000).policy
    'lru'
    """

    host_rows: int | None = None
    num_embeddings: int | None = None
    policy: str = "lru"
    ways: int = 8
    seed: int = 0
    initializer: InitialRows | None = None
    admission: Admission | int | None = None
    ages: bool = False

    def __post_init__(self) -> None:
        as_int("Tier.ways", self.ways, 1, MAX_WAYS)
        if self.host_rows is not None:
            as_positive("Tier.host_rows", self.host_rows)
        if self.num_embeddings is not None:
            as_int("Tier.num_embeddings", self.num_embeddings, 1, 2**64 - 1)
        one_of("Tier.policy", self.policy, POLICIES)
        as_int("Tier.seed", self.seed, -(2**63), 2**64 - 1)
        if self.initializer is not None and not isinstance(self.initializer, InitialRows):
            expected = "None or one of jax_tt.dynamic, e.g. Normal(0.01)"
            raise mismatch("Tier.initializer", repr(self.initializer), expected, error=TypeError)
        object.__setattr__(self, "admission", as_admission(self.admission))
        object.__setattr__(self, "ages", bool(self.ages) or self.admission is not None)

    def check(self, name: str, table: Any) -> None:
        """Raises unless rows of this table can leave the device."""
        rows = unsharded(table)
        if not rows.spec.row_names or table.update is None:
            got = f"{type_of(rows)} {'without' if table.update is None else 'with'} an optimizer"
            expected = "a dense_table with one, whose state travels with the rows"
            raise mismatch(f"tiers[{name!r}]", got, expected, error=TypeError)
        if not table.ids.takes_slots:
            got = "a table that takes ids, which would read and train the rows of others"
            expected = (
                "one that takes the slots of prefetch alone, dense_table(..., takes_slots=True)"
            )
            raise mismatch(f"tiers[{name!r}]", got, expected, error=TypeError)
        if is_sharded(table):
            _check_sharded(name, table)
        got = f"a table of {table.num_embeddings} rows"
        divides = table.num_embeddings % self.ways == 0
        expect(divides, f"tiers[{name!r}]", got, f"a multiple of ways={self.ways}")
        if isinstance(rule := table.update.optimizer, ChangesAll):
            got = f"{type(rule).__name__}, which changes all rows between steps, also beyond the device"
            expected = "another optimizer, such as RowWiseAdagrad"
            raise mismatch(f"tiers[{name!r}]", got, expected, error=TypeError)

    def reopened(self, name: str, saved: Mapping[str, Any]) -> Tier:
        """The tier with the sizes of the last save, ``saved``, where it has none."""
        ids = int(saved.get("num_embeddings", 0)) or None
        host_rows = self.host_rows or int(saved.get("host_rows", 0))
        if not host_rows:
            expected = "a number of rows, since there is no directory that was saved with one"
            raise mismatch(f"tiers[{name!r}].host_rows", "None", expected)
        wanted = self.num_embeddings
        if wanted is not None and "num_embeddings" in saved and (ids is None or wanted < ids):
            expected = f"at least {ids}, or None" if ids else "None"
            fix = "The rows of other ids that were saved would be out of reach."
            raise mismatch(f"tiers[{name!r}].num_embeddings", wanted, expected, fix)
        return dataclasses.replace(self, host_rows=host_rows, num_embeddings=wanted or ids)

    def initial_rows(self, features: int) -> InitialRows:
        """The distribution of initial rows of so many columns."""
        return self.initializer or Normal(features**-0.5)

    def about(self, layout: RecordLayout) -> dict[str, Any]:
        """The settings that must not change while rows are on disk."""
        values = self.initial_rows(layout.shapes[0][-1])
        rows = [type(values).__name__, float(np.float32(values.scale))]
        about = {"record": layout.about(), "seed": int(self.seed), "initializer": rows}
        return about | ({"ages": True} if self.ages else {})


def _check_sharded(name: str, table: Any) -> None:
    """Raises unless one device has each row of a `ShardedTable`."""
    if table.layout.columns > 1 or table.layout.replicas > 1:
        expected = "one that shards whole rows without replicas, such as Placement.round_robin()"
        raise mismatch(f"tiers[{name!r}]", f"the placement {table.placement!r}", expected)


@dataclasses.dataclass
class _Leaving:
    """The rows that leave the device with a batch, until they are in host memory.

    Attributes:
        plan: the exchange.
        goes: bool ``[m]``, the rows of the exchange that leave for the host memory of this process.
        in_memory: keys that come from its host memory, and leave it.
        counts: rows that came from host memory, from disk, and new ones; of this process until all have told theirs.
        returned: the rows that come straight from what left with earlier batches; none once the batch is loaded.
        entries: of the arrays by name, with the padding of the exchange; None until the batch is loaded.
    """

    plan: Exchanged
    goes: np.ndarray
    in_memory: np.ndarray
    counts: tuple[int, int, int]
    returned: list[_Returned]
    entries: dict[str, Any] | None = None

    @property
    def ready(self) -> bool:
        """Whether the rows can go to host memory without a wait for the device."""
        return self.entries is not None and all(array.is_ready() for array in self.entries.values())

    @property
    def grows(self) -> int:
        """How many more rows host memory holds afterwards."""
        return int(self.goes.sum()) - len(self.in_memory)


class _Returned(NamedTuple):
    """Rows that leave with one batch and come back with another before they are in host memory.

    Attributes:
        left: the rows that they leave with.
        sources, targets: their positions in the exchanges of the two batches, padded.
    """

    left: _Leaving
    sources: np.ndarray
    targets: np.ndarray


class TieredRows:
    """The rows of one table, by 64-bit key.

    The processes that its devices belong to decide the same for the same batches. Each keeps some of the rows beyond
    the devices.
    """

    def __init__(
        self,
        name: str,
        table: Table,
        tier: Tier,
        layout: RecordLayout,
        disk: DiskStore | None,
        processes: Processes,
        waiting: int,
    ):
        self.tier, self.layout, self.processes = tier, layout, processes
        self._on_device = DeviceRows(table) if processes.alone else RowsOfProcesses(table)
        self.places = DevicePlaces(table.num_embeddings, tier.ways, tier.policy, f"table {name!r}")
        assert tier.host_rows is not None
        self._host = HostStore(tier.host_rows, layout, disk, name)
        self.name, self._has_disk = name, disk is not None
        self._initial = tier.initial_rows(table.features)
        self.features = table.features
        self._seed = words_of_keys(np.array([int(tier.seed) & 0xFFFFFFFFFFFFFFFF], np.uint64))[0]
        self.lives = Lives(as_admission(tier.admission), waiting, self._seed) if tier.ages else None
        # By slot, of loaded batches: its key, whether it has one, and whether the disk lacks its last value.
        rows = table.num_embeddings
        self._keys, self._full = np.zeros(rows, np.uint64), np.zeros(rows, bool)
        self._changed = np.zeros(rows, bool)
        # The rows that leave with a batch, until they are in host memory; and the batch that a key leaves with.
        self._leaving: dict[int, _Leaving] = {}
        self._left_with = KeyIndex()
        # `TierStatistics` but for the last two; and the rows that all processes are known to have written to disk.
        self._totals = np.zeros(len(TierStatistics._fields) - 2, np.int64)
        self._to_disk = 0

    def place(
        self, keys: np.ndarray, present: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, Exchanged]:
        """Counts the keys of a batch, and gives them slots; see `DevicePlaces.place`."""
        refused = np.zeros(0, np.uint64)
        if self.lives is not None:
            refused = self.lives.request(keys[present], epoch)
        return self.places.place(keys, present, refused)

    def fetch(self, number: int, plan: Exchanged, most: int) -> tuple[jax.Array, dict[str, Any]]:
        """Fetches the rows that come: their slots and entries, padded. `load` adds rows that are still on the device.

        Rows that left the device with the last ``most`` batches may wait; older ones go to host memory first.

        Raises:
            StoreError: there is no disk, and the rows that leave with the plan do not fit into host memory.
        """
        self._absorb(most)
        size = rounded_up(len(plan.slots), _FEWEST)
        returned, here = self._returned(plan.loaded, size)
        stored = self._host.get(plan.loaded, size)
        in_memory, on_disk = stored.in_memory | here, stored.on_disk & ~here
        entries, missing = stored.entries, ~(in_memory | on_disk)
        if not self.processes.alone:
            elsewhere = ~self.processes.owns(plan.loaded)
            missing &= ~elsewhere
            for array in entries:
                array[: len(elsewhere)][elsewhere] = 0
        new = np.flatnonzero(missing)
        if len(new):
            self._write_initial(plan.loaded, missing, entries[0])
            for array, value in zip(entries[1:], self.layout.initial[1:], strict=True):
                array[new] = value
        counts = int(in_memory.sum()), int(on_disk.sum()), len(new)
        goes = plan.full & self.processes.owns(plan.evicted)
        leaving = _Leaving(plan, goes, plan.loaded[in_memory], counts, returned)
        needed = (
            len(self._host) + leaving.grows + sum(other.grows for other in self._leaving.values())
        )
        if not self._has_disk and needed > self._host.rows:
            raise StoreError(full(self.name, self._host.rows))
        self._leaving[number] = leaving
        self._note_left(number, leaving)
        self._host.write_ahead()
        slots = self._on_device.numbers(_padded(plan.slots, size, len(self._keys)))
        return self._on_device.placed(slots, dict(zip(self.layout.names, entries, strict=True)))

    def report(self, number: int) -> np.ndarray:
        """What this process tells the others of a batch: uint32, a digest of its rows, and the counts `tell` takes."""
        leaving = self._leaving[number]
        digest = 0
        for array in (leaving.plan.requested, leaving.plan.loaded, leaving.plan.slots):
            digest = zlib.crc32(array.tobytes(), digest)
        return np.array([digest, *leaving.counts, self.written % 2**32], np.uint32)

    @property
    def written(self) -> int:
        """How many rows this process has written to disk."""
        return self._host.to_disk

    def tell(self, number: int, told: np.ndarray) -> None:
        """Takes the sums over all processes of what `report` counts of a batch."""
        self._leaving[number].counts = tuple(told[:3].tolist())
        self.tell_written(told[3])

    def tell_written(self, count: int) -> None:
        """Takes the sum over all processes of ``written``, or its last 32 bits; earlier sums may come later."""
        more = (int(count) - self._to_disk) % 2**32
        self._to_disk += more if more < 2**31 else 0

    def load(
        self, number: int, state: Mapping[str, Any], slots: jax.Array, entries: dict[str, Any]
    ) -> dict[str, Any]:
        """Puts the rows of a batch, which `fetch` returned, into the arrays of the table; returns these."""
        leaving, after = self._leaving[number], dict(state)
        plan, old = leaving.plan, {}
        if len(plan.loaded):
            for back in leaving.returned:
                entries = self._on_device.with_entries(
                    entries, back.left.entries, back.sources, back.targets
                )
            arrays = {name: after[name] for name in self.layout.names}
            arrays, old = self._on_device.exchange(arrays, entries, slots)
            after |= arrays
        self._keys[plan.slots], self._full[plan.slots] = plan.loaded, plan.kept
        if self.lives is not None:
            self.lives.load()
        self._changed[plan.requested] = True
        leaving.entries, leaving.returned = old, []
        counts = plan.counts
        self._totals += (
            counts["requests"],
            counts["hits"],
            counts["inserted"],
            *leaving.counts,
            counts["evicted"],
        )
        return after

    def forget_staged(self, loaded: int) -> None:
        """Forgets the batches from this number on, which were fetched but not loaded."""
        self._leaving = {k: leaving for k, leaving in self._leaving.items() if k < loaded}
        self._left_with = KeyIndex()
        for number, leaving in sorted(self._leaving.items()):
            self._note_left(number, leaving)
        self.places.reset(self._keys, self._full)
        if self.lives is not None:
            self.lives.forget_staged()

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Removes rows, wherever they are, while no batch is prepared; returns their keys in ascending order."""
        with self.together():
            here = np.intersect1d(keys, self._held())
        keys = np.unique(self.processes.joined(here))
        with self.together():
            self._host.remove(keys)
            slots = np.flatnonzero(self._full)
            slots = slots[np.isin(self._keys[slots], keys)]
            self._full[slots] = self._changed[slots] = False
            self.places.empty(slots)
            if self.lives is not None:
                self.lives.remove(keys)
        return keys

    def flush(self, state: Any) -> None:
        """Writes all rows to disk whose last value is not there yet."""
        with self.together():
            self._absorb(0)
            self._host.flush()
        slots = np.flatnonzero(self._changed & self._full)
        for first in range(0, len(slots), _CHUNK):
            part = slots[first : first + _CHUNK]
            entries = self._entries(self._on_device.read, state, self.layout.names, part)
            with self.together():
                mine = np.flatnonzero(self.processes.owns(self._keys[part]))
                self._host.write(self._keys[part[mine]], entries, mine)
        self._changed[:] = False

    def read(self, state: Any, keys: np.ndarray) -> np.ndarray:
        """Reads rows of keys, wherever they are."""
        distinct, inverse = np.unique(keys, return_inverse=True)
        with self.together():
            (rows,) = self.entries(state, distinct, self.layout.names[:1])
        return self.processes.merged(rows)[inverse]

    def keys(self) -> np.ndarray:
        """Returns all keys that have a row, wherever it is, in ascending order."""
        with self.together():
            held = self._held()
        return held if self.processes.alone else np.unique(self.processes.joined(held))

    def holders(self, state: Any, keys: np.ndarray) -> np.ndarray:
        """The process that reads the entries of each key in ascending order, int ``[n]``."""
        holders = self.processes.numbered(self.processes.owners(keys))
        slots, places = self._on_device_of(keys)
        holders[places] = self._on_device.processes(state[self.layout.names[0]], slots)
        return holders

    def entries(self, state: Any, keys: np.ndarray, names: tuple[str, ...]) -> list[np.ndarray]:
        """Reads entries of the first arrays for keys in ascending order; initial rows for keys without a row.

        Entries that another process reads are zeros, see `holders`.
        """
        self._absorb(0)
        here = self.holders(state, keys) == jax.process_index()
        stored = self._host.get(keys, len(keys))
        arrays, missing = stored.entries[: len(names)], stored.missing & here
        for array in arrays:
            array[~here] = 0
        self._write_initial(keys, missing, arrays[0])
        for array, value in zip(arrays[1:], self.layout.initial[1:], strict=False):
            array[missing] = value
        slots, places = self._on_device_of(keys)
        slots, places = slots[here[places]], places[here[places]]
        of_slots = self._entries(self._on_device.read_here, state, names, slots)
        for array, on_device in zip(arrays, of_slots, strict=True):
            array[places] = on_device
        return arrays

    @contextlib.contextmanager
    def replacing(self, coming: np.ndarray, leaving: np.ndarray) -> Iterator[None]:
        """Removes keys, and expects a `put` of others; nothing may be read any more if not all of it is done.

        Raises:
            StoreError: there is no disk, and the rows do not fit into host memory; nothing has changed.
        """
        if not self._has_disk:
            after = np.setdiff1d(np.union1d(self.keys(), coming), leaving)
            with self.together():  # another process may have other room
                if np.count_nonzero(self.processes.owns(after)) > self._host.rows:
                    raise StoreError(full(self.name, self._host.rows))
        with self._host.whole(repeats=False):
            self.remove(leaving)
            yield

    def put(self, keys: np.ndarray, entries: list[np.ndarray]) -> None:
        """Sets entries of distinct keys that are not on the device."""
        rows = np.flatnonzero(self.processes.owns(keys))
        self._host.erase(keys[rows])  # so that it is their room that they take
        self._host.put(keys[rows], entries, rows)

    def rest(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a state that have no entry for every row, and do not say where rows are."""
        names = {*self.layout.names, PAGES}
        return {name: array for name, array in arrays.items() if name not in names}

    def sizes(self) -> dict[str, np.ndarray]:
        """What `Tier.reopened` takes."""
        sizes = self._host.rows, self.tier.num_embeddings or 0
        return dict(zip(("host_rows", "num_embeddings"), map(np.array, sizes), strict=True))

    def statistics(self) -> TierStatistics:
        to_disk = self._host.to_disk if self.processes.alone else self._to_disk
        totals = (*self._totals.tolist(), to_disk, self.layout.size)
        return TierStatistics._make(totals)

    def grow_host(self, rows: int) -> None:
        """Makes room for this number of rows in host memory."""
        least = f"at least {self._host.rows}, the host_rows of tiers[{self.name!r}]"
        expect(as_positive("rows", rows) >= self._host.rows, "rows", rows, least)
        self._host.grow(rows)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """What every process does by itself; an error of one of them is one of all."""
        return self.processes.together(f"tiers[{self.name!r}]", StoreError)

    def _absorb(self, most: int) -> None:
        """Moves rows that left the device to host memory; does not wait for rows of the last ``most`` batches."""
        loaded = [k for k, leaving in sorted(self._leaving.items()) if leaving.entries is not None]
        for place, number in enumerate(loaded):
            leaving = self._leaving[number]
            if place >= len(loaded) - most and not leaving.ready:
                break
            self._host.erase(leaving.in_memory)
            if leaving.goes.any():
                gone, rows = leaving.plan.evicted[leaving.goes], np.flatnonzero(leaving.goes)
                entries = leaving.entries or {}
                self._host.put(gone, [np.asarray(entries[k]) for k in self.layout.names], rows)
                # Others have left once more since then.
                self._left_with.erase(gone[self._left_with.find(gone) == number])
            del self._leaving[number]

    def _note_left(self, number: int, leaving: _Leaving) -> None:
        gone = leaving.plan.evicted[leaving.goes]
        self._left_with.set(gone, np.full(len(gone), number))

    def _returned(self, keys: np.ndarray, size: int) -> tuple[list[_Returned], np.ndarray]:
        """The rows of keys that are on their way to host memory, and which keys these are."""
        numbers = self._left_with.find(keys)
        returned = []
        for number in np.unique(numbers[numbers >= 0]).tolist():
            left, targets = self._leaving[number], np.flatnonzero(numbers == number)
            rows = np.flatnonzero(left.goes)
            order = np.argsort(left.plan.evicted[rows])
            places = np.searchsorted(left.plan.evicted[rows], keys[targets], sorter=order)
            count = rounded_up(len(targets), _FEWEST)
            returned.append(
                _Returned(
                    left,
                    _padded(rows[order[places]], count, 0),
                    _padded(targets, count, size),
                )
            )
        return returned, numbers >= 0

    def _held(self) -> np.ndarray:
        """The keys in ascending order whose rows are on the device, or beyond it in this process."""
        self._absorb(0)
        return np.unique(np.concatenate([self._host.keys(), self._keys[self._full]]))

    def _on_device_of(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots of keys in ascending order that are on the device, and the positions of these keys."""
        slots = np.flatnonzero(self._full)
        places = np.searchsorted(keys, self._keys[slots])
        inside = places < len(keys)
        slots, places = slots[inside], places[inside]
        here = keys[places] == self._keys[slots]
        return slots[here], places[here]

    def _entries(
        self,
        read: Callable[[Any, np.ndarray], Any],
        state: Any,
        names: tuple[str, ...],
        slots: np.ndarray,
    ) -> list[np.ndarray]:
        """Reads the entries of these slots on the device, without a transfer of others."""
        wanted = _padded(slots, rounded_up(len(slots), _FEWEST), 0)
        found = read({name: state[name] for name in names}, wanted)
        return [np.asarray(found[name])[: len(slots)] for name in names]

    def _write_initial(self, keys: np.ndarray, wanted: np.ndarray, rows: np.ndarray) -> None:
        """Sets the first of ``rows`` to the initial rows of the keys that are wanted."""
        native = ffi.load("cpu")
        if native is None:
            words, present = padded(keys[wanted], _FEWEST)
            drawn = _initial(self._initial, self._seed, words, self.features)
            rows[: len(keys)][wanted] = np.asarray(drawn)[present].astype(rows.dtype)
            return
        initial, type_of = self._initial, rows.dtype.name
        flat = rows[: len(keys)].view(np.uint8)
        words = words_of_keys(keys)
        native.hash_initial_here(
            self._seed,
            initial.quantiles,
            initial.factor,
            initial.signed,
            words,
            wanted,
            type_of,
            flat,
        )


def _padded(numbers: np.ndarray, size: int, value: int) -> np.ndarray:
    """int32 ``[size]``: the numbers, and this value behind them."""
    longer = np.full(size, value, np.int32)
    longer[: len(numbers)] = numbers
    return longer


@partial(jax.jit, static_argnums=(0, 3))
def _initial(distribution: Any, seed: Any, words: Any, features: int) -> jax.Array:
    return initial_rows(distribution, seed, words, features)
