"""How the ids of a stream reach the tables: one learner for each way."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from examples.streaming import tables
from examples.streaming.clicks import Clicks
from examples.streaming.model import train_step
from examples.streaming.settings import Config

# Where the row of a requested id came from; the others are ids that the batch requests again.
SERVED = ("device", "host", "disk", "new")


class Outcome(NamedTuple):
    """What a step gave.

    Attributes:
        clicks: the batch.
        logits: [B], predicted before the step.
        served: ids by where their row came from, some of `SERVED`.
        moved: bytes of the rows that came to the device and left it.
    """

    clicks: Clicks
    logits: np.ndarray
    served: dict[str, int]
    moved: int = 0


class Learner(Protocol):
    """Trains on a stream."""

    def outcomes(self, stream: Iterator[Clicks]) -> Iterator[Outcome]:
        """Predicts, then trains, batch by batch."""
        ...

    def device_bytes(self) -> dict[str, int]:
        """By part."""
        ...

    def other_bytes(self) -> dict[str, int]:
        """By tier below the device."""
        ...

    def save(self, other: bytes) -> None:
        """Stores everything after a step, and these bytes; a process that is killed goes on from there."""
        ...

    def restored(self) -> bytes | None:
        """Goes back to what was saved last. Returns its other bytes, or None if nothing was saved."""
        ...

    @property
    def seconds_waited(self) -> float:
        """For rows that were not ready."""
        ...


def make(config: Config, workdir: Path) -> Learner:
    """The learner of a variant, which is saved in the workdir."""
    if config.variant == "tiers":
        return Tiered(config, workdir / "disk")
    kind = Hashed if config.variant == "hashing" else Dynamic
    return kind(config, workdir / "checkpoint.npz")


class Hashed:
    """Row = id modulo the number of rows: ids that collide share a row for ever."""

    seconds_waited = 0.0

    def __init__(self, config: Config, path: Path):
        self.path = path
        self.collection = tables.make(config)
        self.state: Any = self.collection.init(jax.random.key(config.seed))
        self.bias = jnp.zeros(())

    def outcomes(self, stream: Iterator[Clicks]) -> Iterator[Outcome]:
        for clicks in stream:
            logits, counts = self._trained(self._ids(clicks), clicks.labels)
            yield Outcome(clicks, logits, self._served(counts))

    def device_bytes(self) -> dict[str, int]:
        return tables.device_bytes(self.state)

    def other_bytes(self) -> dict[str, int]:
        return {}

    def save(self, other: bytes) -> None:
        arrays = {
            f"{table}/{name}": array
            for table, own in jax.device_get(self.state).items()
            for name, array in own.items()
        }
        write_whole(
            self.path, arrays | {"bias": self.bias, "other": np.frombuffer(other, np.uint8)}
        )

    def restored(self) -> bytes | None:
        if not self.path.exists():
            return None
        with np.load(self.path) as file:
            arrays = dict(file)
        other, self.bias = arrays.pop("other").tobytes(), jnp.asarray(arrays.pop("bias"))
        self.state = {}
        for path, array in arrays.items():
            table, name = path.split("/")
            self.state.setdefault(table, {})[name] = jnp.asarray(array)
        return other

    def _ids(self, clicks: Clicks) -> Any:
        rows = {
            name: np.uint64(table.num_embeddings) for name, table in self.collection.tables.items()
        }
        return self.collection.host_batch({f: ids % rows[f] for f, ids in clicks.ids.items()})

    def _served(self, counts: Any) -> dict[str, int]:
        del counts
        return {}

    def _trained(self, ids: Any, labels: np.ndarray) -> tuple[np.ndarray, Any]:
        self.state, self.bias, logits, counts = train_step(
            self.collection, self.state, self.bias, ids, labels
        )
        return jax.device_get((logits, counts))


class Dynamic(Hashed):
    """Keys get a row when they come; the least recently used ones lose theirs, or the table grows."""

    def _ids(self, clicks: Clicks) -> Any:
        grown: dict[str, jax_tt.Table] = {}
        for name, table in self.collection.tables.items():
            assert isinstance(table, jax_tt.tables.HashTable)
            grown[name], self.state[name] = jax_tt.dynamic.grow_if_full(table, self.state[name])
        self._use(grown)
        return self.collection.host_batch(clicks.ids)

    def restored(self) -> bytes | None:
        other = super().restored()
        if other is not None:
            self._use(
                {
                    name: tables.of_size(table, self.state[name])
                    for name, table in self.collection.tables.items()
                }
            )
        return other

    def _use(self, grown: dict[str, jax_tt.Table]) -> None:
        if grown != dict(self.collection.tables):
            self.collection = jax_tt.Collection(grown, self.collection.features)

    def _served(self, counts: Any) -> dict[str, int]:
        return {
            "device": sum(int(own["hits"]) for own in counts.values()),
            "new": sum(int(own["inserted"]) for own in counts.values()),
        }


class Tiered(Hashed):
    """Rows that lose their place on the device go to host memory, and from there to disk."""

    def __init__(self, config: Config, path: Path):
        super().__init__(config, path)
        self._config = config
        self._tiers = tables.make_tiers(config, self.collection, path)
        self._before, self._moved_before = dict.fromkeys(SERVED, 0), 0

    @property
    def seconds_waited(self) -> float:
        return self._tiers.seconds_waited

    def outcomes(self, stream: Iterator[Clicks]) -> Iterator[Outcome]:
        waiting: queue.SimpleQueue[Clicks] = queue.SimpleQueue()

        def ids() -> Iterator[dict[str, np.ndarray]]:
            for clicks in stream:
                waiting.put(clicks)
                yield clicks.ids

        for staged in self._tiers.prefetch(ids()):
            clicks = waiting.get()
            self.state = self._tiers.load(self.state, staged)
            logits, _ = self._trained(staged.batch, clicks.labels)
            yield Outcome(clicks, logits, self._served_by_tiers(), self._moved())

    def device_bytes(self) -> dict[str, int]:
        return tables.device_bytes(self.state) | {
            "on their way": tables.in_flight_bytes(self._config)
        }

    def other_bytes(self) -> dict[str, int]:
        rows = tables.host_rows(self._config, self.collection)
        sizes = [own.record_bytes for own in self._tiers.statistics().values()]
        return {
            "host": rows * sum(sizes),
            "disk": sum(file.stat().st_size for file in self.path.iterdir()),
        }

    def save(self, other: bytes) -> None:
        self._tiers.save(self.state, np.float32(self.bias).tobytes() + other)

    def restored(self) -> bytes | None:
        found = self._tiers.restore(self.state)
        if found is None:
            return None
        other, self.state = found
        self.bias = jnp.asarray(np.frombuffer(other, np.float32, 1)[0])
        return other[4:]

    def _served_by_tiers(self) -> dict[str, int]:
        """Since the last call."""
        found = self._tiers.statistics().values()
        totals = {
            "device": sum(own.device_hits for own in found),
            "host": sum(own.host_hits for own in found),
            "disk": sum(own.disk_hits for own in found),
            "new": sum(own.created for own in found),
        }
        before, self._before = self._before, totals
        return {name: totals[name] - before[name] for name in SERVED}

    def _moved(self) -> int:
        """Bytes since the last call."""
        found = self._tiers.statistics().values()
        total = sum((own.loaded + own.evicted) * own.record_bytes for own in found)
        before, self._moved_before = self._moved_before, total
        return total - before


def write_whole(path: Path, arrays: dict[str, Any]) -> None:
    """Writes an .npz file that is complete, or is not there."""
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, allow_pickle=False, **arrays)
    unfinished.replace(path)
