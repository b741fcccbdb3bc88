"""`Tiers`: tables of a collection that are larger than the device."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_condition, as_int, mismatch
from jax_tt._base.keywords import UnknownName
from jax_tt._collection.collection import Collection, States
from jax_tt._collection.states import bounds_by_table
from jax_tt._jax.on_host import like_on_device, on_host
from jax_tt._ops.dump_content import Target
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.options import DEFAULT_BOUNDS
from jax_tt._table.parts_of_arrays import taken
from jax_tt._table.wrapper import is_sharded
from jax_tt._tiers.agreement import Agreement
from jax_tt._tiers.arguments import check_same, checked
from jax_tt._tiers.disk import DiskStore, StoreError
from jax_tt._tiers.inputs import entered, features_of, keys_of, with_slots
from jax_tt._tiers.lives import TierView
from jax_tt._tiers.pipeline import Pipeline
from jax_tt._tiers.processes import Processes
from jax_tt._tiers.row_bytes import RecordLayout
from jax_tt._tiers.saved import (
    check_like,
    dump_tier,
    grown_as_saved,
    lives_arrays,
    load_tier,
    put_lives,
    rows_from_host,
    rows_on_host,
)
from jax_tt._tiers.table import Tier, TieredRows, TierStatistics


class Staged(NamedTuple):
    """A batch whose rows are ready for the device, as `Tiers.prefetch` yields it.

    Attributes:
        batch: of the collection, with `pipeline.Slots` in place of the ids of tables with tiers.
        other: the other entries of a dict, such as labels, unchanged.
        number: of the batch, from 0. Numbers of dropped batches are not used again.
        exchanges: slots and new entries by table.

    >>> import jax_tt, numpy as np
    >>> table = jax_tt.dense_table(64, 8, optimizer=jax_tt.optimizers.SGD(0.1), takes_slots=True)
    >>> collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    >>> tiers = jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=64)}, depth=0)
    >>> batches = tiers.prefetch([{"item": np.array([[10**12, 10**12]]), "label": 1}])
    >>> staged = next(batches)
    >>> len(set(staged.batch["item"].numbers[0].tolist())), staged.other
    (1, {'label': 1})
    """

    batch: Any
    other: dict[str, Any]
    number: int
    exchanges: dict[str, Any]


class Tiers:
    """Tables of a collection whose rows are on the device, in host memory and on disk.

    The tables of the collection are on the device: those of `dense_table` with as many rows as there is room for, an
    optimizer, and ``takes_slots=True``, also sharded over devices. Ids of the batches are any 64-bit integers, or up to
    `Tier.num_embeddings`. `prefetch` decides on the host which rows each batch needs on the device, fetches them with
    their optimizer state from memory and disk while earlier batches are trained, and replaces ids by slots. `load`
    exchanges the rows on the device. Lookups in these tables take the slots, and refuse ids, since a row on the device
    belongs to another id from batch to batch.

    Training gives the same numbers as one table with a row for every id, bit for bit, unless rows are rounded
    stochastically. A new row has an initial value that depends on the seed and the id alone.

    If the devices of a table belong to several processes, each of these is given the batches with the ids of all of
    them, and all call the same methods with the same arguments in the same order (`statistics`, `grow_host` and `close`
    wait for no other process). Each keeps a part of the rows that are not on a device. Batches that differ are a
    `ValueError` in all processes when it is their turn, and an error of one process in here stops all of them. As a
    thread asks for the batches, these must not come from collective operations of JAX, unless ``depth`` is 0.

    Args:
        collection: the tables on the device and the features.
        tiers: `Tier` by table, for tables with more rows than the device holds.
        path: directory of the tier on disk, for all tables; None for none. Each of several processes has its own
            directory in there.
        depth: batches that are ready ahead of the one that is loaded; with several processes, one more. Two threads
            prepare them; with 0 there are none.

    Attributes:
        collection: the tables and features, after `restore` with the capacities of the store.
        seconds_waited: the time that `prefetch` has waited for rows, and for the batches themselves.

    Raises:
        StoreError: the directory cannot be used, or belongs to other tables.

    >>> import jax, numpy as np, jax_tt
    >>> rule = jax_tt.optimizers.RowWiseAdagrad(0.1)
    >>> collection = jax_tt.Collection(
    ...     {"item": jax_tt.dense_table(64, 8, optimizer=rule, takes_slots=True)}, {"item": jax_tt.Feature("item")}
    ... )
    >>> tiers = jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=1024)})
    >>> @jax.jit
    ... def step(state, batch):
    ...     def loss(trained):
    ...         rows, _ = jax_tt.lookup_features(collection, collection.replaced(state, trained), batch)
    ...         return (rows["item"] ** 2).sum()
    ...     return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]
    >>> state = collection.init(jax.random.key(0))
    >>> ids = np.random.default_rng(0).integers(0, 2**63, size=(20, 10, 1))
    >>> for staged in tiers.prefetch({"item": batch} for batch in ids):
    ...     state = step(tiers.load(state, staged), staged.batch)
    >>> tiers.statistics()["item"].created
    200
    """

    def __init__(
        self,
        collection: Collection,
        tiers: Mapping[str, Tier],
        *,
        path: str | os.PathLike[str] | None = None,
        depth: int = 2,
    ):
        self.collection, self._depth = collection, as_int("depth", depth, 0)
        tables = checked(collection, tiers)
        self._processes = Processes.of(tables)
        self._disk: DiskStore | None = None
        layouts = {name: RecordLayout.of(unsharded(table)) for name, table in tables.items()}
        check_same(
            self._processes, collection, tiers, layouts, depth=self._depth, path=path is not None
        )
        if path is not None:
            about = {name: tiers[name].about(layout) for name, layout in layouts.items()}
            sizes = {name: layout.size for name, layout in layouts.items()}
            with self._together("path"):
                directory = self._processes.directory(Path(path))
            self._disk = DiskStore(directory, sizes, about, self._processes)
        try:
            with self._together("tiers"):
                saved = self._saved_of_rows()
                sized = {name: tiers[name].reopened(name, saved.get(name, {})) for name in tables}
            host_rows = self._processes.total([tier.host_rows or 0 for tier in sized.values()])
            totals = dict(zip(sized, host_rows, strict=True))
            with self._together("tiers"):
                self._rows = {
                    name: TieredRows(
                        name,
                        table,
                        sized[name],
                        layouts[name],
                        self._disk,
                        self._processes,
                        totals[name],
                    )
                    for name, table in tables.items()
                }
                for name, rows in self._rows.items():
                    if rows.lives is not None and name in saved:
                        put_lives(rows.lives, saved[name])
        except BaseException:  # of memory, for instance
            if self._disk is not None:
                self._disk.close()
            raise
        self._features = {
            feature: spec.table
            for feature, spec in collection.features.items()
            if spec.table in tiers
        }
        self._staged = self._loaded = 0
        # Guards the rows beyond the device. A batch is loaded without it, so that no step waits for another batch.
        self._stores = threading.Lock()
        # Of the present iteration over batches, until all of it has ended.
        self._running: Pipeline | None = None
        self._ending = self._complete = False
        self.seconds_waited = 0.0

    def prefetch(
        self,
        batches: Iterable[Any],
        *,
        epoch: int = 0,
        bounds: str | Mapping[str, str] = DEFAULT_BOUNDS,
    ) -> Iterator[Staged]:
        """Yields the batches in their order, each as soon as its rows are ready.

        Every one must be given to `load` before the next one is asked for. If the iteration ends early, batches that
        were prepared ahead are dropped.

        Args:
            batches: dicts or `KeyedBags` for `lookup_features`, of numpy arrays. A dict may hold more than features.
                With a ``depth`` they are asked for in a thread, up to three more of them than are ready. It is waited
                for when the iteration ends.
            epoch: a number that the batches belong to, such as the day. `remove` sees it of every row for its last
                request.
            bounds: as in `lookup_features`, for all tables or by table; ``"unchecked"`` raises for malformed offsets.

        Raises:
            TypeError, ValueError: a batch does not fit; with a ``depth``, this is raised when the batch is asked for.
        """
        treatments = bounds_by_table(bounds, self.collection.tables)
        of_epoch = as_int("epoch", epoch, -(2**31), 2**31 - 1)
        if self._running is not None and not self._ending:
            raise RuntimeError("prefetch: another iteration has not ended; close it first.")
        self._end()
        self._complete = False
        place = functools.partial(self._apart, functools.partial(self._place, treatments, of_epoch))
        fetch = functools.partial(self._apart, self._fetch)
        running = Pipeline(batches, place, fetch, self._depth)
        agreement = Agreement(running.next, self._processes, self._rows, self._depth)
        try:
            self._running = running
            running.start()
            while (staged := self._next(agreement)) is not None:
                yield staged
                if self._loaded <= staged.number:
                    raise RuntimeError(
                        f"prefetch: batch {staged.number} was not loaded before the next one was asked for; call "
                        "state = tiers.load(state, staged) for every batch."
                    )
                if self._running is not running:
                    raise RuntimeError("prefetch: the tiers were closed; open them again.")
        finally:
            if self._running is running:
                self._end()

    def load(self, state: States, staged: Staged) -> dict[str, dict[str, Any]]:
        """Puts the rows of a batch on the device, and returns the state. Its tables are donated.

        Args:
            state: arrays of the collection by table and name, as the step before left them.
            staged: of `prefetch`, in that order.

        Raises:
            ValueError: batches are loaded in another order; or rows of a table with tiers are sharded without
                `shard_tables`.
        """
        if staged.number != self._loaded:
            expected = f"{self._loaded}: every batch once, in the order of prefetch, and before its iteration ends"
            raise mismatch("staged", f"batch {staged.number}", expected)
        after = {name: dict(arrays) for name, arrays in state.items()}
        for name, (slots, entries) in staged.exchanges.items():
            after[name] = self._rows[name].load(staged.number, after[name], slots, entries)
        self._loaded += 1
        return after

    def save(self, state: States, other: bytes = b"") -> None:
        """Writes all rows and the rest of the state to disk, as one transaction.

        A process that dies later goes on from here: see `restore`. If the disk is full, this is an error, and nothing
        is lost: call it again once there is room. Until then, `prefetch` and `read` go on as long as no row has to go
        to disk, and raise the same error where one has to.

        Args:
            state: the arrays after a step.
            other: bytes that belong to this state, such as the serialised parameters of the rest of the model.
                Their room in the file is used again later.

        Raises:
            StoreError: there is no tier on disk, or it cannot be written; the message says whether the last save is
                intact.
        """
        disk = self._needs_disk("save")
        with self._stores:
            for name, rows in self._rows.items():
                rows.flush(state[name])
            arrays = jax.tree.map(on_host, self._rest(taken(self.collection.apart(state))))
            with self._together("save"):
                of_rows = {
                    name: rows.sizes() | (lives_arrays(rows.lives) if rows.lives else {})
                    for name, rows in self._rows.items()
                }
            disk.commit({"rows": of_rows, "rest": arrays, "other": np.frombuffer(other, np.uint8)})
            written = self._processes.total([rows.written for rows in self._rows.values()])
            for rows, count in zip(self._rows.values(), written, strict=True):
                rows.tell_written(count)

    def restore(self, state: States) -> tuple[bytes, dict[str, dict[str, Any]]] | None:
        """Reads the last `save`: the other bytes, and a state without rows on the device; None if there is none.

        Hash tables of the collection that had grown have the capacity with which they were saved, in the state and in
        `collection`: use this one from here on.

        Args:
            state: an initial state of the collection, on the devices that the arrays are to be on.

        Raises:
            RuntimeError: batches have been prefetched before.
            StoreError: there is no tier on disk, it cannot be read, or its arrays do not fit this collection, also when
                its hash tables grow as far as their ``max_capacity``; the message has both sizes.
        """
        disk = self._needs_disk("restore")
        with self._together("restore"):
            self._require_unused("restore")
            saved = disk.saved()
        if saved is None:
            return None
        rest = saved.get("rest", {})
        collection, like = grown_as_saved(self.collection, state, rest, str(disk.path))
        like = taken(collection.apart(like))
        check_like(rest, self._rest(like), str(disk.path))
        restored = {
            name: {
                **arrays,
                **self._restored(collection.tables.get(name), name, arrays, rest.get(name, {})),
            }
            for name, arrays in like.items()
        }
        self.collection = collection
        return saved["other"].tobytes(), collection.together(restored)

    def _restored(
        self, table: Any, name: str, like: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> Any:
        """Arrays of the devices of others, from what was saved."""
        if table is not None and is_sharded(table) and name not in self._rows:
            return rows_from_host(table, saved)
        return {k: like_on_device(jnp.asarray(like[k]), value) for k, value in saved.items()}

    def read(self, state: States, table: str, ids: Any) -> np.ndarray:
        """Reads rows of any ids, wherever they are; initial rows for ids that were never trained.

        Args:
            state: the arrays after a step.
            table: its name.
            ids: integers ``[n]``.

        Returns:
            ``[n, D]`` on the host.
        """
        keys, _ = keys_of(table, np.asarray(ids), None)
        with self._stores:
            return self._rows_of(table).read(state[table], keys)

    def dump(
        self,
        state: States,
        table: str,
        path: str | os.PathLike[str],
        *,
        since: str | os.PathLike[str] | None = None,
        rows_per_file: int = 1 << 18,
        progress: bool = True,
        overwrite: bool = False,
    ) -> int:
        """Writes all rows of a table, wherever they are, to files in a directory, as `files.dump` does.

        Only the rows of three files are in memory at a time, and some bytes for every key. Several processes write the
        files together, to a file system that all of them see.

        Args:
            state: the arrays after a step.
            table: its name.
            since: an earlier dump of this table; only rows that have changed since then are written, and the names of
                all keys, so that removed rows are removed where it is loaded. All rows are read and compared with
                digests in the earlier dump.
            path, rows_per_file, progress, overwrite: as in `files.dump`.

        Returns:
            The number of keys.

        Raises:
            FileError: as in `files.dump`.
        """
        target = Target(path, rows_per_file, progress, overwrite)
        with self._stores:
            arrays = self.collection.of(state, table)
            return dump_tier(self._rows_of(table), arrays, target, since)

    def load_dump(
        self,
        state: States,
        table: str,
        path: str | os.PathLike[str],
        *,
        progress: bool = True,
    ) -> dict[str, dict[str, Any]]:
        """Puts the rows of a dump into host memory and on disk, before the first batch.

        Args:
            state: an initial state of the collection.
            table: its name.
            path: of the directory that `dump` or `files.dump` wrote. Changes come after the dump that they follow.
            progress: as in `files.dump`.

        Returns:
            The state with the other arrays of the dump, such as step counts.

        Raises:
            RuntimeError: batches have been prefetched before.
            FileError: the dump is missing, incomplete, damaged, or of another kind of table.
            StoreError: there is no disk, and host memory has no room for all rows, before anything changes; or the
                disk is full.
            ValueError: the dump is one of changes, which follow another state.

        After an error in the middle, such as a damaged file, every call raises a `StoreError` until the tiers are
        opened again.
        """
        with self._together("load_dump"):
            self._require_unused("load_dump")
        rows, apart = self._rows_of(table), self.collection.apart(state)
        with self._stores:
            rest = load_tier(rows, apart[table], path, progress)
        apart[table] |= {
            name: like_on_device(jnp.asarray(array), rest[name])
            for name, array in rows.rest(apart[table]).items()
            if name in rest and rest[name].shape == array.shape
        }
        return self.collection.together(apart)

    def _rows_of(self, table: str) -> TieredRows:
        if table not in self._rows:
            raise UnknownName("table", table, self._rows)
        return self._rows[table]

    def remove(
        self, table: str, ids: Any = None, *, where: Callable[[TierView], Any] | None = None
    ) -> np.ndarray:
        """Removes rows with their optimizer state, wherever they are; they are new when they are requested again.

        Call it between two iterations of `prefetch`, so that it does not matter how far batches are prepared ahead.
        Their room in host memory is free at once, and the one on disk after the next `save`.

        Args:
            table: its name.
            ids: integers ``[n]``; those without a row are skipped.
            where: instead, a function from a `pipeline.TierView` of all rows to bool ``[n]``, such as
                ``lambda view: view.age > 1000``. It takes a `Tier` with ``ages=True``.

        Returns:
            The keys that were removed, uint64 in ascending order.

        Raises:
            RuntimeError: batches have been prepared that are not loaded.
            KeyError: there is no such table.
            ValueError: there are ids and a condition, or neither; or the table has no ages; or ids are no integers.
        """
        rows = self._rows_of(table)
        if (ids is None) == (where is None):
            got = "neither" if ids is None else "both"
            raise ValueError(f"ids, where: got {got}; expected one of them, ids or a condition.")
        if self._staged > self._loaded or (self._running is not None and self._depth):
            raise RuntimeError(
                "remove: batches are prepared ahead; end the iteration over prefetch first, e.g. give it the batches "
                "of an hour, and remove rows after each."
            )
        with self._stores:
            if where is None:
                given = np.asarray(ids)
                if not given.size:
                    given = given.astype(np.int64)  # numpy takes empty lists for floats
                if given.dtype.kind not in "iu" or given.ndim != 1:
                    raise mismatch("ids", given, f"integers [n], ids of tiers[{table!r}]")
                return rows.remove(keys_of(table, given, None)[0])
            if rows.lives is None:
                got = f"a condition for tiers[{table!r}], whose ages are not kept"
                raise mismatch("where", got, "Tier(..., ages=True)")
            with self._together("where"):
                view = rows.lives.view()
                chosen = as_condition("where", where, view, view.keys.shape, "per row")
            return rows.remove(view.keys[np.asarray(chosen)])

    def grow_host(self, table: str, rows: int) -> None:
        """Makes room for this number of rows of a table in host memory, for instance after a `StoreError` said so.

        Raises:
            ValueError: there is more room already.
        """
        with self._stores:
            self._rows_of(table).grow_host(rows)

    def statistics(self) -> dict[str, TierStatistics]:
        """Returns totals by table so far."""
        with self._stores:
            return {name: rows.statistics() for name, rows in self._rows.items()}

    def close(self) -> None:
        """Ends the threads, and closes the tier on disk without saving."""
        try:
            self._end()
        finally:
            if self._disk is not None:
                self._disk.close()

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _rest(self, apart: States) -> dict[str, dict[str, Any]]:
        """The arrays that have no entry for every row of a table with tiers, by table."""
        rest = {}
        for name, arrays in apart.items():
            table = self.collection.tables.get(name)
            if name in self._rows:
                rest[name] = self._rows[name].rest(arrays)
            else:
                rest[name] = dict(arrays) if table is None else rows_on_host(table, arrays)
        return rest

    def _saved_of_rows(self) -> dict[str, dict[str, Any]]:
        """Sizes and ages of rows, by table, of the last save."""
        saved = None if self._disk is None else self._disk.saved()
        return (saved or {}).get("rows", {})

    def _together(self, label: str) -> contextlib.AbstractContextManager[None]:
        return self._processes.together(label, StoreError)

    def _require_unused(self, caller: str) -> None:
        if self._staged:
            raise RuntimeError(
                f"{caller}: rows have changed since the tiers were opened; close them without saving, and call it on "
                "new ones before the first batch."
            )

    def _needs_disk(self, caller: str) -> DiskStore:
        if self._disk is None:
            raise StoreError(f"{caller}: there is no tier on disk; expected Tiers(..., path=...).")
        return self._disk

    def _next(self, agreement: Agreement) -> Staged | None:
        start = time.perf_counter()
        staged = agreement.next()
        self._complete = staged is None
        self.seconds_waited += time.perf_counter() - start
        return staged

    def _end(self) -> None:
        """Ends the present iteration. If this is interrupted, the next call does the rest."""
        if self._running is None:
            return
        self._ending = True
        self._running.stop()
        self._forget_what_was_not_loaded()
        self._running, self._ending = None, False

    def _apart(self, step: Callable[[Any], Staged], batch: Any) -> Staged:
        with self._processes.apart():
            return step(batch)

    def _place(self, bounds: Mapping[str, str], epoch: int, batch: Any) -> Staged:
        """Decides which rows a batch exchanges; they are yet to be fetched."""
        values, other = features_of(batch, self.collection.features)
        values = entered(self.collection, values, bounds)
        # Counted before the first change, so that the changes of a failed batch are forgotten.
        number, self._staged = self._staged, self._staged + 1
        slots: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        plans = {}
        for name, rows in self._rows.items():
            features = [feature for feature, table in self._features.items() if table == name]
            parts_of = [keys_of(f, values[f], rows.tier.num_embeddings) for f in features]
            keys, present = (np.concatenate(parts) for parts in zip(*parts_of, strict=True))
            placed, plans[name] = rows.place(keys, present, epoch)
            parts = np.split(placed, np.cumsum([len(part) for part, _ in parts_of])[:-1])
            pairs = zip(parts, (here for _, here in parts_of), strict=True)
            slots |= zip(features, pairs, strict=True)
        return Staged(with_slots(values, slots), other, number, plans)

    def _fetch(self, placed: Staged) -> Staged:
        """Fetches the rows that a batch brings to the device."""
        exchanges = {}
        for name, rows in self._rows.items():
            with self._stores:
                plan = placed.exchanges[name]
                exchanges[name] = rows.fetch(placed.number, plan, self._depth)
        return placed._replace(exchanges=exchanges)

    def _forget_what_was_not_loaded(self) -> None:
        # Another process may have prepared more batches than this one, and all of them go on from the same places.
        elsewhere = not (self._processes.alone or self._complete)
        if self._staged > self._loaded or elsewhere:
            for rows in self._rows.values():
                rows.forget_staged(self._loaded)
            # Numbers are not used again, so that `load` refuses the batches that were dropped.
            self._loaded = self._staged
